"""A job's metadata: what it is, which parts are done, and what it leaves when all are.

Everything lies in the output directory, under names that readers of datasets pass over. Records
of parts are the truth; only the client reads them together, and writes the manifest at the end.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import logging
import platform
import posixpath
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from dask.utils import format_bytes

from gpuclassify._version import installed_versions
from gpuclassify.jobs.ledger.encoding import Encoding
from gpuclassify.jobs.ledger.records import (
    FUNCTION,
    JOB,
    KEY_DIGITS,
    MALFORMED,
    METADATA,
    QUARANTINE,
    RECORDS,
    SCRATCH,
    WHOLE,
    JobChangedError,
    Record,
    check_current,
    complete,
    is_published,
    key_in,
    metadata_gone,
    parse_record,
    part_name,
    published_path,
    quarantine_path,
    record_path,
    sealed,
    stem_of,
    unsealed,
)
from gpuclassify.jobs.stores.names import JSONL, PARQUET, file_format
from gpuclassify.jobs.stores.store import Store
from gpuclassify.settings.checks import check_choice

logger = logging.getLogger(__name__)

MANIFEST, SUCCESS = f"{METADATA}/manifest.jsonl", "_SUCCESS"
REPORTS = ("_report/report.json", "_report/report.html")
# What tells the library datasets which files are data; and where users may do so themselves, which
# other readers would take for data.
CARD, README = ".huggingface.yaml", "README.md"
NEW_FILES = "input files new"  # of the changes of a job
MOST_FILES_NAMED = 3  # of those that are gone, new or changed
MOST_PARTS = 10_000_000
VERIFY = ("digest", "size")
_CARD_MARK = "# By gpuclassify"
_CARD = f"""{_CARD_MARK} for the library datasets; without this line it stays as it is.
configs:
- config_name: default
  data_files: "{{data}}"
"""
# Takes the `Store.digests` of files in a directory.
Digest = Callable[[Store, Sequence[str]], Iterable[tuple[str, str, str]]]
_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_JOB_TYPES = {"key": str, "parts": int, "identity": dict, "earlier": list, "versions": dict}
_PACKAGES = ("gpuclassify", "torch", "transformers", "dask", "pandas", "pyarrow")


class DamagedMetadataError(ValueError):
    """Error for an unreadable file that describes the job of an output directory."""


@dataclass
class Checked:
    """Files that are as they were written.

    By digest, the SHA-256 of files is that of what was written, or a store tells of the right MD5
    by itself; by size, nothing is read.
    """

    by: str
    # Size in bytes of each file that holds, by its name and digest; none is read twice.
    files: dict[tuple[str, str], int] = field(default_factory=dict)

    def __str__(self) -> str:
        way = "digests" if self.by == "digest" else "sizes alone"
        count, size = len(self.files), format_bytes(sum(self.files.values()))
        return f"{way} of {count:,} file{'' if count == 1 else 's'}, {size}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"by": self.by, "files": len(self.files), "bytes": sum(self.files.values())}


@dataclass(frozen=True)
class RunOptions:
    """Options of one run of a job: how it begins or continues, and nothing of what the job is."""

    restart: bool = False  # begin anew: remove what earlier runs of any job wrote, and nothing else
    verify: str = VERIFY[0]  # how to find out whether parts that are done hold
    accept_changed_code: bool = False  # continue though functions, and nothing else, differ
    command: str = ""  # that began the run, for the report

    def __post_init__(self) -> None:
        check_choice("verify", self.verify, VERIFY)


@dataclass(frozen=True)
class Manifest:
    """Metadata of one job, in its output directory."""

    directory: Store
    # Settings of each input, stage and output by its name: JSON values, no secret. Parts of jobs
    # that differ in it never mix.
    identity: dict[str, dict[str, Any]]
    count: int  # of parts
    encoding: Encoding
    options: RunOptions = RunOptions()
    code: str = ""  # that makes the same job again, in Python
    folders: dict[str, str] | None = None  # Arrow types of the columns that name folders
    columns: pa.Schema | None = None  # of the input's files, for sets that grow by other files
    # Leave parts of earlier runs until all others are there, which may be made of them.
    keeps_earlier: bool = False

    @functools.cached_property
    def checked(self) -> Checked:
        """Files of finished parts that `begin` has found to be as they were written."""
        return Checked(self.options.verify)

    @functools.cached_property
    def key(self) -> str:
        """Key in the names of all files of this run, and of the runs that continue it.

        A digest of the identity, so that several clients of one job agree. A run that begins anew
        has another key: attempts of the one before may be at work still.
        """
        if self.options.restart:
            return uuid.uuid4().hex[:KEY_DIGITS]
        earlier = self._earlier()
        goes_on = earlier and self._is_same(earlier, but_code=self.options.accept_changed_code)
        return str(earlier["key"]) if earlier and goes_on else _key_of(self.identity)

    def names(self) -> list[str]:
        """Return the names of all parts, in their order."""
        return [*self._names]

    @functools.cached_property
    def _names(self) -> dict[str, int]:
        suffix = self.encoding.suffix
        return {part_name(n, self.count, self.key, suffix): n for n in range(self.count)}

    def check(self) -> None:
        """Raise unless this job may write here; writes nothing.

        Nothing is overwritten: not a file with the directory's name, nor data files that no job
        wrote. Parts of another job, or of one that cannot be read, need a start over.
        """
        self.directory.refuse_file()
        earlier = self._earlier()
        self._refuse_foreign_files(earlier)
        if earlier is None or self.options.restart:
            return
        is_same = self._is_same(earlier, but_code=self.options.accept_changed_code)
        if earlier["key"] != self.key or not is_same:
            changes = "; ".join(_changes(earlier["identity"], self.identity))
            hint = " (annotations of new files are written alone)" if NEW_FILES in changes else ""
            raise JobChangedError(
                f"{self.directory} holds parts of a job that differs: "
                f"{changes or 'it has begun anew meanwhile'}{hint}. Parts of both would mix: "
                f"{self._ways_with_code(earlier)}go back to the earlier settings, write to another "
                "directory, or start over, which removes those parts (restart=True)"
            )

    def check_like(self, identity: Mapping[str, dict[str, Any]]) -> None:
        """Raise JobChangedError unless another job did the same, if with other files."""

        def settings(whole: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            return {
                name: of
                for name, of in whole.items()
                if not name.startswith(("input", "annotations "))
            }

        mine, theirs = replace(self, identity=settings(self.identity)), settings(identity)
        if not mine._is_same({"identity": theirs}, but_code=self.options.accept_changed_code):
            raise JobChangedError(
                f"the files before those of {self.directory} were annotated by a job that differs: "
                f"{'; '.join(_changes(theirs, mine.identity))}. Go back to the earlier settings, "
                "write to another directory, or start over (restart=True)"
            )

    def _is_same(self, earlier: dict[str, Any], *, but_code: bool) -> bool:
        """Tell whether an earlier job is this one, or would be with this one's functions."""
        functions = {part for part, values in self.identity.items() if FUNCTION in values}
        untold = (FUNCTION, "code") if but_code else ()  # which is what it was called before
        before, after = (
            {
                part: {n: v for n, v in values.items() if part not in functions or n not in untold}
                for part, values in identity.items()
            }
            for identity in (earlier["identity"], self.identity)
        )
        return _key_of(before) == _key_of(after)

    def _ways_with_code(self, earlier: dict[str, Any]) -> str:
        """Return further advice about a job that differs in the code of functions alone."""
        if not self._is_same(earlier, but_code=True):
            return ""
        then, now = (known.get("python", "") for known in (earlier["versions"], _versions()))
        is_other = then.split(".")[:2] != now.split(".")[:2]
        why = f", which Python {now} compiles otherwise than {then} did" if is_other else ""
        return (
            f"put the code back as it was{why}; if rows come out the same, as where a variable has "
            "another name, keep the parts by run(accept_changed_code=True); or else "
        )

    def begin(self, digest: Digest | None = None) -> Iterator[Record]:
        """Make the directory ready, and yield the records of parts that are done already.

        `digest` reads files to verify them; by default threads do, here. Raises what `check` does,
        and UnsupportedStorageError where files cannot be created exclusively.
        """
        self.check()
        earlier = self._earlier()
        if self.options.restart and earlier is not None:
            self._clear(earlier)
        self.directory.make(METADATA, RECORDS, SCRATCH, QUARANTINE)
        if self.encoding.partition_by:
            self.directory.make(WHOLE)
        self.directory.check_creates(SCRATCH)
        self.directory.sweep("", METADATA, QUARANTINE, posixpath.dirname(REPORTS[0]))
        if self.options.restart or earlier is None or earlier["parts"] != self.count:
            self._write_job(earlier)
        else:
            if not self._is_same(earlier, but_code=False):
                changes = "; ".join(_changes(earlier["identity"], self.identity))
                logger.warning("the job goes on as was asked, although %s", changes)
                self.directory.replace(
                    JOB, sealed({**earlier, "identity": self.identity}, indent=1)
                )
            known, today = earlier["versions"], _versions()
            names = [name for name in {**known, **today} if known.get(name) != today.get(name)]
            if names:
                shown = ", ".join(
                    f"{name} {known.get(name)} -> {today.get(name)}" for name in names
                )
                logger.warning("the job goes on with other versions than it began with: %s", shown)
        self.directory.remove(*self._strays())
        done: set[str] = set()
        for record in self._sound_records(digest):
            done.add(stem_of(record.name))
            yield record
        # Of other parts, attempts may be at work: those of another client of this job.
        self._remove_scratch(done)
        if len(done) < self.count:
            self.directory.remove(SUCCESS)

    def is_complete(self) -> bool:
        """Tell whether the output is marked as complete, and every part is as it was written."""
        try:
            mark = json.loads(self.directory.read(SUCCESS))
        except (FileNotFoundError, ValueError, RecursionError):
            return False
        if mark != {"key": self.key, "parts": self.count}:
            return False
        recorded, damage = self.examine()
        if damage or len(recorded) < self.count or self._strays():
            return False
        with contextlib.suppress(FileNotFoundError):
            lines = self.directory.read(MANIFEST).splitlines()
            return [*map(parse_record, lines)] == [*recorded.values()]
        return False

    def written(self) -> int:
        """Count the parts that are there, with a record or published without one yet."""
        folder = posixpath.dirname(published_path("", self.encoding))
        there = {*self.directory.sizes(RECORDS), *self.directory.sizes(folder)}
        return len({*map(stem_of, there)} & {*map(stem_of, self.names())})

    def records(self) -> dict[str, Record | None]:
        """Return the records of parts that have one, by the parts' names; None for damaged ones."""
        names = {f"{stem_of(name)}.json": name for name in self.names()}
        there = self.directory.sizes(RECORDS)
        named = sorted(name for record in there if (name := names.get(record)))
        contents = self.directory.read_all([record_path(name) for name in named])
        records = {name: parse_record(text) for name, text in zip(named, contents, strict=True)}
        return {
            name: r if r is not None and r.name == name else None for name, r in records.items()
        }

    def _strays(self) -> list[str]:
        """Return the paths of records by this run's key that are of none of its parts."""
        known = {record_path(name) for name in self.names()}
        there = [f"{RECORDS}/{name}" for name in self.directory.sizes(RECORDS)]
        return [path for path in there if path not in known and key_in(path) == self.key]

    def listed(self) -> dict[str, Record | None]:
        """Return `records`, of a finished job from one file; None also for those that it lacks."""
        if not self.directory.has(SUCCESS):
            return self.records()
        with contextlib.suppress(FileNotFoundError):
            lines = self.directory.read(MANIFEST).splitlines()
            listed = {record.name: record for record in map(parse_record, lines) if record}
            return {name: listed.get(name) for name in self.names()}
        return dict.fromkeys(self.names())

    def examine(
        self, digest: Digest | None = None
    ) -> tuple[dict[str, Record | None], dict[str, str]]:
        """Return the records by the parts' names, and why parts that have one are damaged.

        A record is None if it is damaged itself. `digest` is as of `begin`. Files beside
        those of parts that are done, called as they are, raise FileExistsError.
        """
        recorded = self.records()  # first: whoever is at work writes them last
        there = self.directory.part_infos()
        records = [record for record in recorded.values() if record is not None]
        known = {path for record in records for path in record.files}
        done = {record.name for record in records}
        for path in sorted({*there} - known):
            if posixpath.basename(path) in done:
                raise FileExistsError(
                    f"{self.directory} holds {path}, which is called as a part and which no job "
                    "wrote there: move it away"
                )
        damage = _find_damage(self.directory, records, there, self.checked, digest)
        lost = [name for name, record in recorded.items() if record is None]
        return recorded, damage | dict.fromkeys(lost, "its record is not what was written")

    def finish(self) -> None:
        """Write the manifest, and mark the output as complete at last."""
        check_current(self.directory, self.key)
        contents = self.directory.read_all([record_path(name) for name in self.names()])
        try:
            with self.directory.replacing(self.directory.path(MANIFEST)) as file:
                for content in contents:
                    file.write(content + b"\n")
        except FileNotFoundError as err:
            raise metadata_gone(self.directory) from err
        self._remove_scratch()
        earlier = {*read_job(self.directory)["earlier"]} - {self.key}
        self._remove_parts(earlier)  # of attempts that came late
        self.directory.prune(QUARANTINE)
        self.directory.sync()
        check_current(self.directory, self.key)
        content = json.dumps({"key": self.key, "parts": self.count}).encode()
        self.directory.replace(SUCCESS, content)
        self.directory.sync()

    def write_card(self) -> None:
        """Write the card that tells the library datasets what is data here, unless a user does."""
        folders = "*=*/" * len(self.encoding.partition_by)
        card = _CARD.format(data=f"{folders}part-*{self.encoding.suffix}")
        for name in self._replaceable_cards():
            self.directory.replace(name, card.encode())

    def _replaceable_cards(self) -> list[str]:
        """List `CARD` if it is a job's, or if neither it nor a `README` is there."""
        try:
            content = self.directory.read(CARD)
        except FileNotFoundError:
            return [CARD] * (not self.directory.has(README))
        except (OSError, ValueError):  # a folder, a link, or not for us to read
            return []
        return [CARD] * (not content or content.startswith(_CARD_MARK.encode()))

    def _earlier(self) -> dict[str, Any] | None:
        """Return the description of the job that has begun in the directory, or None.

        What is damaged is written anew if the names of records show that it described this job.
        """
        try:
            return read_job(self.directory)
        except FileNotFoundError:
            return None
        except DamagedMetadataError as err:
            named = [*self.directory.sizes(RECORDS), *self.directory.sizes(SCRATCH)]
            keys = {key for name in named if (key := key_in(name)) is not None}
            if self.options.restart:
                return {"key": self.key, "earlier": sorted(keys)}
            if (mine := _key_of(self.identity)) not in keys:
                raise
            logger.warning("%s: it is written anew, for the parts are this job's", err)
            known = {"key": mine, "earlier": sorted(keys), "identity": self.identity}
            return {**known, "parts": None, "versions": _versions()}

    def _refuse_foreign_files(self, earlier: dict[str, Any] | None) -> None:
        keys = {self.key, earlier["key"], *earlier["earlier"]} if earlier else set()
        foreign = [
            name
            for name in sorted(self.directory.part_sizes())
            if file_format(name) is not None
            and not (base := posixpath.basename(name)).startswith((".", "_"))
            and not name.endswith(".json")
            # It has the key of no run, or that of this one and no name of one of its parts.
            and (key_in(name) not in keys or (key_in(base) == self.key and base not in self._names))
        ]
        if foreign:
            raise FileExistsError(
                f"{self.directory} holds {len(foreign)} files that no job wrote, such as "
                f"{foreign[0]}: choose another directory, or move them away"
            )

    def _remove_parts(self, keys: Collection[str]) -> None:
        """Remove the part files of the runs with these keys, and folders that are empty then."""
        parts = [name for name in sorted(self.directory.part_sizes()) if key_in(name) in keys]
        self.directory.remove(*parts)
        self.directory.prune(*{posixpath.dirname(name) for name in parts} - {""})

    def _clear(self, earlier: dict[str, Any]) -> None:
        """Remove what earlier runs wrote, but for job.json, which is replaced later."""
        keys = {earlier["key"], *earlier["earlier"]}
        remove = self.directory.remove
        remove(SUCCESS)
        for folder in (RECORDS, QUARANTINE):
            named = self.directory.sizes(folder)
            remove(*(f"{folder}/{name}" for name in named if key_in(name) in keys))
        if not self.keeps_earlier:
            self._remove_parts(keys)
        remove(MANIFEST, *REPORTS, *self._replaceable_cards())
        self._remove_scratch()

    def _write_job(self, earlier: dict[str, Any] | None) -> None:
        past = {earlier["key"], *earlier["earlier"]} - {self.key} if earlier else set()
        content = {
            "key": self.key,
            "parts": self.count,
            "identity": self.identity,
            "code": self.code,
            "command": self.options.command,
            "earlier": sorted(past),
            "versions": _versions(),
            "folders": self.folders or {},
            **self._noted_columns(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        data = sealed(content, indent=1)
        if earlier is not None:
            self.directory.replace(JOB, data)
        elif not self.directory.create(JOB, data, SCRATCH, is_lasting=True):
            self.check()  # another client was faster; with the same job, both may go on

    def _noted_columns(self) -> dict[str, str]:
        """Return the input's columns as Parquet notes them in its files: Arrow's form in base64."""
        if self.columns is None:
            return {}
        return {"columns": base64.b64encode(self.columns.serialize()).decode()}

    def _sound_records(self, digest: Digest | None) -> Iterator[Record]:
        """Yield records of parts that are there; complete or remove those broken or half done."""
        recorded, damage = self.examine(digest)
        for name, record in recorded.items():
            if name not in damage and record is not None:
                yield record
        for name, reason in damage.items():
            logger.warning("%s is done again: %s", name, reason)
            self.directory.remove(record_path(name))
        mine = {*self.names()} - {*recorded} | {*damage}
        there = self.directory.part_sizes()
        folder = posixpath.dirname(published_path("", self.encoding))
        begun = {*self.directory.sizes(folder), *map(posixpath.basename, there)}
        for name in sorted(begun & mine):
            if name not in damage:
                if is_published(self.directory, name, self.encoding):
                    record = complete(self.directory, name, self.encoding)
                    if record is not None:
                        yield record
                        continue
                logger.warning("%s is done again: it has no record", name)
            files = [path for path in there if posixpath.basename(path) == name]
            published = published_path(name, self.encoding)
            self.directory.remove(published, quarantine_path(name), *files)

    def _remove_scratch(self, stems: Collection[str] | None = None) -> None:
        """Remove what attempts have left, of all parts or of those with these stems."""
        for folder in (SCRATCH, WHOLE):
            left = self.directory.sizes(folder)
            names = [name for name in left if stems is None or stem_of(name) in stems]
            self.directory.remove(*(f"{folder}/{name}" for name in names))


def manifest_of(directory: Store) -> Manifest:
    """Return the metadata of the job whose output a directory is; see `read_job`."""
    job = read_job(directory)
    output, options = job["identity"]["output"], RunOptions(command=job.get("command", ""))
    names = tuple(name for name in output.get("partition_by", "").split(", ") if name)
    encoding = Encoding(output["format"], output["compression"], names)
    return Manifest(directory, job["identity"], job["parts"], encoding, options)


def read_job(directory: Store) -> dict[str, Any]:
    """Read job.json, which describes the job that has begun in a directory.

    Raises FileNotFoundError if none has, NotADirectoryError for a file in the directory's place,
    and DamagedMetadataError.
    """
    try:
        with directory.explained():
            content = directory.read(JOB)
    except NotADirectoryError:
        directory.refuse_file()
        raise
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{directory} is no output of a job: name the directory that a job wrote to"
        ) from None
    job = _parse_job(content)
    if job is None:
        raise DamagedMetadataError(
            f"{directory.path(JOB)} is damaged, and not what a job wrote: start over, which "
            "removes the parts that are there (restart=True), or write to another "
            "directory"
        )
    return job


def _parse_job(content: bytes) -> dict[str, Any] | None:
    """Parse job.json; return None unless it has the values that jobs write, which others may not.

    Its key and format become parts of names, and the names of all parts are made.
    """
    try:
        job = unsealed(content) or {}
        parts, output = job["identity"], job["identity"]["output"]
        is_sound = (
            all(isinstance(job[name], kind) for name, kind in _JOB_TYPES.items())
            and key_in(part_name(0, 1, job["key"], ".")) == job["key"]
            and 0 <= job["parts"] <= MOST_PARTS
            and all(isinstance(values, dict) for values in parts.values())
            and output["format"] in (PARQUET, JSONL)
            and output["compression"] in (None, *_COMPRESSIONS)
            and isinstance(output.get("partition_by", ""), str)
        )
    except MALFORMED:
        return None
    return job if is_sound else None


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results may depend on."""
    return {"python": platform.python_version()} | installed_versions(*_PACKAGES)


def _key_of(identity: dict[str, dict[str, Any]]) -> str:
    content = json.dumps(identity, sort_keys=True).encode("utf-8", "backslashreplace")
    return hashlib.sha256(content).hexdigest()[:KEY_DIGITS]


def _changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the differences of two identities: settings of stages, of inputs, then files.

    The columns and parts of an input may differ because its files do.
    """
    parts = {**before, **after}
    files = [part for part in parts if part.endswith(" file")]
    inputs = [part.removesuffix(" file") for part in files]
    settings = [part for part in parts if part not in files]
    for part in sorted(settings, key=inputs.__contains__):
        yield from _setting_changes(part, before, after)
    for part in files:
        yield from _file_changes(f"{part}s", before.get(part, {}), after.get(part, {}))


def _setting_changes(
    part: str, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> Iterator[str]:
    if part not in before or part not in after:
        yield f"{part} is {'new' if part in after else 'gone'}"
        return
    old, new = before[part], after[part]
    if FUNCTION in new and new.get(FUNCTION) != old.get(FUNCTION):
        yield (
            f"{part} has other code (its bytecode, its defaults, or what it closes over, reads "
            "or calls)"
        )
        return
    names = [n for n in {**old, **new} if old.get(n, "") != new.get(n, "")]
    for name in names:
        if name not in old or name not in new:
            yield f"{part} {name} is {'new' if name in new else 'gone'}"
        elif name != "code":
            yield f"{part} {name} was {old[name]!r} and is {new[name]!r}"
    if names == ["code"]:
        yield f"{part} has another model, or a class with other code"


def _file_changes(what: str, old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    """Yield how many files are gone, new and changed, and the names of a few of each."""
    kinds = {
        "gone": [name for name in old if name not in new],
        "new": [name for name in new if name not in old],
        "changed": [
            f"{name}, which was {old[name]!r} and is {new[name]!r}"
            for name in new
            if old.get(name, new[name]) != new[name]
        ],
    }
    for kind, names in kinds.items():
        if names:
            more = len(names) - MOST_FILES_NAMED
            shown = "; ".join(names[:MOST_FILES_NAMED]) + (f"; and {more:,} more" * (more > 0))
            yield f"{what} {kind}: {len(names):,} ({shown})"


# Whether files of parts that are done are still what was written.


def _find_damage(
    directory: Store,
    records: Iterable[Record],
    there: Mapping[str, Mapping[str, Any]],
    checked: Checked,
    digest: Digest | None,
) -> dict[str, str]:
    """Return the damage to files of finished parts: the reason by the part's name.

    `there` are the files, from `Store.part_infos`. Those that hold are added to `checked`.
    """

    def has_md5(path: str, info: Mapping[str, Any], record: Record) -> bool:
        return directory.reported_md5(info) == (record.md5 or {}).get(path, "")

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
            elif checked.by == "size" or directory.reported_md5(info) == (record.md5 or {}).get(
                path, ""
            ):
                checked.files[path, record.digests[path]] = size
            elif (path, record.digests[path]) not in checked.files:
                unread[path] = record
        for path in record.quarantine or () if checked.by == "digest" else ():
            unread[path] = record
    for path, sha256, problem in (digest or Store.digests)(directory, [*unread]):
        record = unread[path]
        if sha256 == (record.quarantine or {}).get(path):
            continue
        if sha256 == record.digests.get(path):
            checked.files[path, sha256] = record.files[path]
        else:
            reason = problem or "has other content than was written"
            damage[record.name] = f"{path} {reason}"
    return damage
