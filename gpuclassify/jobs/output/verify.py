"""Whether files of parts that are done are still what was written."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dask.utils import format_bytes

from gpuclassify.jobs.execution import run_tasks
from gpuclassify.jobs.output.records import Record, parse_record, record_path
from gpuclassify.jobs.storage import FILES_AT_A_TIME, Directory, Place, told_md5

VERIFY = ("digest", "size")
FILES_A_TASK = 64


@dataclass
class Checked:
    """What was found to be as it was written.

    Attributes
    ----------
    by : {"digest", "size"}
        Whether the content of files is looked at: their SHA-256 is that of what was written, or a
        store tells of the right MD5 by itself. Or their sizes alone.
    files : dict
        Size in bytes of each file that holds, by its name and digest; none is read twice.
    """

    by: str
    files: dict[tuple[str, str], int] = field(default_factory=dict)

    def __str__(self) -> str:
        way = "digests" if self.by == "digest" else "sizes alone"
        count, size = len(self.files), format_bytes(sum(self.files.values()))
        return f"{way} of {count:,} file{'' if count == 1 else 's'}, {size}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"by": self.by, "files": len(self.files), "bytes": sum(self.files.values())}


def read_records(directory: Directory, names: Sequence[str]) -> Iterator[tuple[str, Record | None]]:
    """The record of each of these parts that has one; None for one that is damaged."""
    contents = directory.read_all([record_path(name) for name in names])
    for name, content in zip(names, contents, strict=True):
        record = parse_record(content)
        yield name, record if record is not None and record.name == name else None


def find_damage(
    directory: Directory,
    records: Iterable[Record],
    there: Mapping[str, Mapping[str, Any]],
    checked: Checked,
    client: Any = None,
    place: Place | None = None,
) -> dict[str, str]:
    """What is wrong with files of parts that are done.

    Parameters
    ----------
    directory : Directory
    records : iterable of Record
    there : mapping
        The files, from `Directory.part_entries`.
    checked : Checked
        Files that are known to hold; those that do are added.
    client : distributed.Client, optional
        Whose workers read the files. Default: threads of this process.
    place : Place, optional
        The directory, for workers.

    Returns
    -------
    dict of str to str
        The reason by the part's name.
    """
    damage: dict[str, str] = {}
    unread: dict[str, Record] = {}
    for record in records:
        for path, size in record.files.items():
            info = there.get(path)
            if info is None:
                damage[record.name] = f"{path} is gone"
            elif info["size"] != size:
                damage[record.name] = (
                    f"{path} has {info['size']:,} bytes, and {size:,} were written"
                )
            elif checked.by == "size" or told_md5({**info}) == (record.md5 or {}).get(path, ""):
                checked.files[path, record.digests[path]] = size
            elif (path, record.digests[path]) not in checked.files:
                unread[path] = record
        for path in record.quarantine or () if checked.by == "digest" else ():
            unread[path] = record
    for path, (digest, problem) in _digests(directory, [*unread], client, place):
        record = unread[path]
        if digest == (record.quarantine or {}).get(path):
            continue
        if digest == record.digests.get(path):
            checked.files[path, digest] = record.files[path]
        else:
            reason = problem or "has other content than was written"
            damage[record.name] = f"{path} {reason}"
    return damage


def _digests(
    directory: Directory, names: Sequence[str], client: Any, place: Place | None
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Of each file its SHA-256, or what keeps it from being read."""
    if client is None or place is None:
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            yield from zip(
                names, pool.map(lambda name: _digest(directory, name), names), strict=True
            )
        return
    some = (names[at : at + FILES_A_TASK] for at in range(0, len(names), FILES_A_TASK))
    for found in run_tasks(client, _digests_here, ((place, batch) for batch in some)):
        yield from found


def _digests_here(place: Place, names: Sequence[str]) -> list[tuple[str, tuple[str, str]]]:
    """As `_digests`, on a worker."""
    return list(_digests(place.open(), names, None, None))


def _digest(directory: Directory, name: str) -> tuple[str, str]:
    try:
        return directory.digest(name), ""
    except OSError as err:
        if err.errno not in (errno.EIO, errno.ENOENT):  # others pass, such as of a network
            raise
        return "", f"cannot be read: {err}"
