"""Metadata of a job in its output directory: its identity, finished parts, and manifest.

Readers of datasets ignore the names of these files. The records of parts are authoritative; only
the client reads all of them, and writes the manifest at the end.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import itertools
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
from dask import hashing
from dask.utils import format_bytes

from gpuclassify._version import installed_versions
from gpuclassify.jobs.ledger.encoding import Encoding
from gpuclassify.jobs.ledger.records import (
    FUNCTION,
    JOB,
    KEY_DIGITS,
    MALFORMED,
    METADATA,
    PART_NAME,
    PARTS,
    QUARANTINE,
    RECORDS,
    SCRATCH,
    SOURCE,
    WHOLE,
    JobChangedError,
    Record,
    check_current,
    complete,
    is_joined,
    is_published,
    joined_name,
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
from gpuclassify.mapping.partition_map import CODE, FULL_SETTINGS, MODEL_DESCRIPTION
from gpuclassify.settings.checks import check_choice
from gpuclassify.settings.signatures import short

logger = logging.getLogger(__name__)

MANIFEST, SUCCESS = f"{METADATA}/manifest.jsonl", "_SUCCESS"
REPORTS = ("_report/report.json", "_report/report.html", "_report/README.md")
# CARD tells the library `datasets` which files are data. Users may say so in a README instead. Jobs
# write none, because other readers would read that file as data.
CARD, README = ".huggingface.yaml", "README.md"
NEW_FILES = "input files new"
DASK_KEY = "Dask key"  # key of the input frame in a job's identity
HASHES = "Dask's hash"  # among the versions
MOST_FILES_NAMED = 3
MOST_PARTS = 10_000_000
VERIFY = ("digest", "size")
_CARD_MARK = "# By gpuclassify"
_CARD = f"""{_CARD_MARK} for the library datasets; without this line it stays as it is.
configs:
- config_name: default
  data_files: "{{data}}"
"""
# Function like `Store.digests`, which reads files here or on workers.
Digest = Callable[[Store, Sequence[str]], Iterable[tuple[str, str, str]]]
_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_JOB_TYPES = {"key": str, "parts": int, "identity": dict, "earlier": list, "versions": dict}
# Entries that `PartitionMap.digest` adds to settings.
_DIGESTS = (f" {FULL_SETTINGS}", f" {MODEL_DESCRIPTION}")
_PACKAGES = ("gpuclassify", "torch", "transformers", "dask", "pandas", "pyarrow")


class DamagedMetadataError(ValueError):
    """Error for a damaged job.json, the description of a job in its output directory."""


@dataclass
class Checked:
    """Output files that a run has found undamaged, and the method of verification, `by`.

    With "digest", sizes and digests were compared; with "size", only sizes.
    """

    by: str
    # Size in bytes by name and digest; such files are not read again.
    files: dict[tuple[str, str], int] = field(default_factory=dict)

    def __str__(self) -> str:
        method = "digests" if self.by == "digest" else "sizes alone"
        count, size = len(self.files), format_bytes(sum(self.files.values()))
        return f"{method} of {count:,} file{'' if count == 1 else 's'}, {size}"

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON: ``by``, the number of ``files``, and their total ``bytes``."""
        return {"by": self.by, "files": len(self.files), "bytes": sum(self.files.values())}


@dataclass(frozen=True)
class RunOptions:
    """Options of one run of a job, which are no part of the job's identity."""

    restart: bool = False  # remove the output of earlier runs of any job, and nothing else
    verify: str = VERIFY[0]  # how to verify finished parts
    accept_changed_code: bool = False  # continue if only code or versions have changed
    command: str = ""  # command line, for the report

    def __post_init__(self) -> None:
        check_choice("verify", self.verify, VERIFY)


@dataclass(frozen=True)
class Manifest:
    """Metadata of a job in its output directory: its settings, and records of its finished parts.

    A part is a slice of the input that is processed and committed as one unit; when all are done,
    neighbouring parts are joined into larger files, if the encoding says so.
    """

    directory: Store
    # Settings by name of input, stage or output: JSON values without secrets. Parts of jobs with
    # different identities never mix.
    identity: dict[str, dict[str, Any]]
    count: int  # number of parts
    encoding: Encoding
    options: RunOptions = RunOptions()
    code: str = ""  # Python code that makes the same job
    folders: dict[str, str] | None = None  # Arrow types of the columns that name folders
    provenance: dict[str, Any] | None = None  # see `Provenance.as_dict`
    columns: pa.Schema | None = None  # columns of the input's files, if files may be added later
    # Keep parts of earlier runs until the job is done, because its input may be made of them.
    keeps_earlier: bool = False

    @functools.cached_property
    def checked(self) -> Checked:
        """Output files that `examine` has found undamaged so far, and how they were verified."""
        return Checked(self.options.verify)

    @functools.cached_property
    def key(self) -> str:
        """Eight hex digits in the names of this run's output files, and of runs that continue it.

        With `restart`, they are random, because attempts of the run before may still be at work.
        Otherwise they are the key in the directory's job.json if that describes the same job, else
        a digest of the identity, so that several clients of one job agree.
        """
        if self.options.restart:
            return uuid.uuid4().hex[:KEY_DIGITS]
        earlier = self._earlier()
        if earlier and self._is_same(earlier, ignores_code=self.options.accept_changed_code):
            return str(earlier["key"])
        return _key_of(self.identity)

    @property
    def joins(self) -> bool:
        """Whether neighbouring parts are joined into larger files when all parts are done."""
        return self.encoding.output_bytes > 0 and self.count > 1

    def names(self) -> list[str]:
        """Return the file names of all parts, in order; files of joined parts have other names."""
        return [*map(self.name, range(self.count))]

    def numbers(self, path: str) -> range:
        """Return the numbers of the parts, from 0, in an output file of this run, or ``range(0)``.

        `path` is the name or path of the file, or of its record; a joined file has several parts.
        """
        match = PART_NAME.match(posixpath.basename(path))
        if match is None or match[3] != self.key:
            return range(0)
        first, last = int(match[1]), None if match[2] is None else int(match[2])
        numbers = range(first, (first if last is None else last) + 1)
        is_own = numbers and numbers[-1] < self.count and (last is None or self.joins)
        return numbers if is_own and stem_of(path) == stem_of(self.name(first, last)) else range(0)

    def name(self, first: int, last: int | None = None) -> str:
        """Return the file name of part `first`, or of a joined file of parts `first` to `last`.

        Parts are numbered from 0, and `last` is included; it is None for a single part. The name of
        a single part begins with the folder `PARTS` if parts will be joined.
        """
        if last is not None:
            return joined_name(first, last, self.count, self.key, self.encoding.suffix)
        name = part_name(first, self.count, self.key, self.encoding.suffix)
        return f"{PARTS}/{name}" if self.joins else name

    def _name_of(self, path: str) -> str:
        """Return the name of this run's output file for a path, or "" for other paths.

        `path` is of the file itself, its copy in a partition folder, or its record.
        """
        numbers = self.numbers(path)
        return self.name(numbers[0], numbers[-1] if is_joined(path) else None) if numbers else ""

    def check(self) -> None:
        """Raise an error if this job may not write to the directory; nothing is written.

        NotADirectoryError: the directory is a file. FileExistsError: it has data files that neither
        this run nor the runs in its job.json wrote. JobChangedError or DamagedMetadataError:
        without `restart`, it has parts of another job or run, or damaged metadata and none of this
        job's parts.
        """
        self.directory.refuse_file()
        earlier = self._earlier()
        self._refuse_foreign_files(earlier)
        if earlier is None or self.options.restart:
            return
        if not self._is_same(earlier, ignores_code=self.options.accept_changed_code):
            changes = "; ".join(_changes(earlier["identity"], self.identity))
            hint = " (annotations of new files are written alone)" if NEW_FILES in changes else ""
            now = _versions()[HASHES]
            then = earlier["versions"].get(HASHES, now)
            if DASK_KEY in changes and then != now:
                hint = (
                    f" (Dask's keys of equal frames differ, because it hashes by {now} here, and "
                    f"hashed by {short(then)}: which of xxhash and mmh3 is installed decides)"
                )
            raise JobChangedError(
                f"{self.directory} holds parts of a job that differs: {changes}{hint}. Parts of "
                f"both would mix: {self._code_advice(earlier)}go back to the earlier settings, "
                "write to another directory, or start over, which removes those parts "
                "(restart=True)"
            )
        if earlier["key"] != self.key:
            raise JobChangedError(
                f"another run of this job has started over in {self.directory} meanwhile, and "
                "parts of both would mix: run the job again to continue that run, or write to "
                "another directory"
            )

    def check_like(self, earlier: dict[str, Any]) -> None:
        """Raise JobChangedError if the job with job.json `earlier` differs in more than its input.

        With `accept_changed_code`, code and versions may differ, too.
        """

        def settings(identity: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            return {
                name: values
                for name, values in identity.items()
                if not name.startswith(("input", "annotations "))
            }

        mine = replace(self, identity=settings(self.identity))
        theirs = settings(earlier["identity"])
        if not mine._is_same({"identity": theirs}, ignores_code=self.options.accept_changed_code):
            raise JobChangedError(
                f"the files before those of {self.directory} were annotated by a job that differs: "
                f"{'; '.join(_changes(theirs, mine.identity))}. "
                f"{mine._code_advice({**earlier, 'identity': theirs}).capitalize()}"
                "go back to the earlier settings, write to another directory, or start over "
                "(restart=True)"
            )

    def _is_same(self, earlier: dict[str, Any], *, ignores_code: bool) -> bool:
        """Return whether the job with the job.json `earlier` has this job's identity."""
        before, after = earlier["identity"], self.identity
        if ignores_code:
            before, after = _without_code(before), _without_code(after)
        return _key_of(before) == _key_of(after)

    def _code_advice(self, earlier: dict[str, Any]) -> str:
        """Return the start of a sentence if only code differs from job.json `earlier`; else ""."""
        if not self._is_same(earlier, ignores_code=True):
            return ""
        changed = {
            name.rpartition(" ")[2]
            for part, values in self.identity.items()
            for name in _changed_code(earlier["identity"].get(part, {}), values)
        }
        cures = []
        if {FUNCTION, SOURCE} & changed:
            then, now = (known.get("python", "") for known in (earlier["versions"], _versions()))
            is_other = then.split(".")[:2] != now.split(".")[:2]
            why = f", which Python {now} compiles otherwise than {then} did" if is_other else ""
            cures.append(f"put the code back as it was{why}")
        if changed - {FUNCTION, SOURCE, "class"}:
            cures.append("install the version that the job began with")
        return (
            f"{'; '.join(cures) or 'name the class as before'}; if rows come out the same, as "
            "where a variable has another name, keep the parts (accept_changed_code=True); or else "
        )

    def begin(self, digest: Digest | None = None) -> Iterator[Record]:
        """Prepare the directory for this run, and yield the records of undamaged output files.

        A file has one finished part, or several that have been joined. Damaged files, leftovers of
        failed attempts and, with `restart`, the output of earlier runs are removed. All this
        happens during iteration, so the iterator must be exhausted. `digest` computes SHA-256 of
        files, as `Store.digests`, the default, does.
        """
        self.check()
        earlier = self._earlier()
        if self.options.restart and earlier is not None:
            self._clear(earlier)
        self.directory.make(METADATA, RECORDS, SCRATCH, QUARANTINE)
        if self.joins:
            self.directory.make(PARTS)
        if self.encoding.partition_by:
            self.directory.make(WHOLE)
        self.directory.check_creates(SCRATCH)
        self.directory.sweep("", METADATA, QUARANTINE, posixpath.dirname(REPORTS[0]))
        if self.options.restart or earlier is None or earlier["parts"] != self.count:
            self._write_job(earlier)
        else:
            if not self._is_same(earlier, ignores_code=False):
                changes = "; ".join(_changes(earlier["identity"], self.identity))
                logger.warning("the job goes on as was asked, although %s", changes)
                self.directory.replace(
                    JOB, sealed({**earlier, "identity": self.identity}, indent=1)
                )
            then, now = earlier["versions"], _versions()
            changes = ", ".join(
                f"{name} {then.get(name)} -> {now.get(name)}"
                for name in {**then, **now}
                if then.get(name) != now.get(name) and name != HASHES  # keys of frames alone
            )
            if changes:
                logger.warning(
                    "the job goes on with other versions than it began with: %s", changes
                )
        self._complete_joined()
        self.directory.remove(*self._strays())
        done: set[str] = set()
        missing = {*range(self.count)}
        for record in self._sound_records(digest):
            done |= {stem_of(known.name) for known in (record, *record.parts)}
            if not self.joins or record.joined:
                missing -= {*self.numbers(record.name)}
            yield record
        # Another client of this job may be at work on the other parts.
        self._remove_scratch(done)
        if missing:
            self.directory.remove(SUCCESS)

    def is_complete(self) -> bool:
        """Return whether this job has marked the output as complete, and no file is damaged.

        This process verifies the files, as in `examine`.
        """
        try:
            mark = json.loads(self.directory.read(SUCCESS))
        except (FileNotFoundError, ValueError, RecursionError):
            return False
        if mark != {"key": self.key, "parts": self.count}:
            return False
        recorded, damage = self.examine()
        is_final = not self.joins or all(map(is_joined, recorded))
        if damage or not is_final or self.done(recorded) < self.count or self._strays():
            return False
        with contextlib.suppress(FileNotFoundError):
            lines = self.directory.read(MANIFEST).splitlines()
            return [*map(parse_record, lines)] == [*recorded.values()]
        return False

    def written(self) -> int:
        """Return the number of this run's parts that have a file or a record."""
        folders = {RECORDS, PARTS, posixpath.dirname(published_path("", self.encoding))}
        return self.done(name for folder in folders for name in self.directory.sizes(folder))

    def done(self, names: Iterable[str]) -> int:
        """Count the parts of this run in files with these names; other files are ignored."""
        return len({number for name in names for number in self.numbers(name)})

    def records(self) -> dict[str, Record | None]:
        """Read the record of each output file that has one, by file name, in order of the parts.

        Records of parts that have been joined are left out, because the joined file has one. None
        stands for a record that is damaged, or describes another file.
        """
        names = self._recorded()
        contents = self.directory.read_all([record_path(name) for name in names])
        records = {name: parse_record(text) for name, text in zip(names, contents, strict=True)}
        return {
            name: r if r is not None and self._describes(r, name) else None
            for name, r in records.items()
        }

    def _describes(self, record: Record, name: str) -> bool:
        """Return whether a record is of the file `name`, by its name and list of joined parts."""
        parts = map(self.name, self.numbers(name) if is_joined(name) else ())
        return record.name == name and [part.name for part in record.joined] == [*parts]

    def _recorded(self) -> list[str]:
        """List the output files that have a record, in order, without parts that are joined."""
        paths = [*self.directory.sizes(RECORDS)]
        names = {name for path in paths if (name := self._name_of(path))}
        joined = {number for name in names if is_joined(name) for number in self.numbers(name)}
        left = [n for n in names if is_joined(n) or joined.isdisjoint(self.numbers(n))]
        return sorted(left, key=lambda name: (self.numbers(name)[0], name))

    def _strays(self) -> list[str]:
        """List the paths of this run's obsolete records, such as of parts that have been joined."""
        known = {*map(record_path, self._recorded())}
        paths = [f"{RECORDS}/{name}" for name in self.directory.sizes(RECORDS)]
        return [path for path in paths if path not in known and key_in(path) == self.key]

    def file_infos(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's info dict (size, ETag and so on) of each file in the output, by path.

        Includes partition folders, parts that are not joined yet, and files that no job wrote.
        """
        infos = self.directory.part_infos()
        return infos | self.directory.part_infos(PARTS) if self.joins else infos

    def listed(self) -> dict[str, Record | None]:
        """Return the record of each output file by name, from the manifest file of a finished job.

        The manifest is one file, read faster than all records. Records that it lacks, or that are
        damaged there, are None, also for parts without any file. For an unfinished job, returns
        `records`.
        """
        if not self.directory.has(SUCCESS):
            return self.records()
        with contextlib.suppress(FileNotFoundError):
            lines = self.directory.read(MANIFEST).splitlines()
            parsed = (record for record in map(parse_record, lines) if record)
            listed = {r.name: r for r in parsed if self._describes(r, self._name_of(r.name))}
            names = dict.fromkeys([*listed, *self._recorded()])
            done = {number for name in names for number in self.numbers(name)}
            lost = [name for number, name in enumerate(self.names()) if number not in done]
            return {**names, **dict.fromkeys(lost), **listed}
        return dict.fromkeys(self.names())

    def examine(
        self, digest: Digest | None = None
    ) -> tuple[dict[str, Record | None], dict[str, str]]:
        """Read the records as `records` does, and verify the files that they describe.

        Returns the records and, by file name, the reason why a file or its record is damaged, for
        damaged ones only. Undamaged files are added to `checked`. `digest` computes SHA-256 of
        files, as `Store.digests`, the default, does. Raises FileExistsError if a file has the name
        of a finished part, in a folder where no job wrote it.
        """
        recorded = self.records()  # before the files, because attempts write records last
        infos = self.file_infos()
        records = [record for record in recorded.values() if record is not None]
        known = {path for record in records for path in record.files}
        done = {posixpath.basename(record.name) for record in records}
        for path in sorted({*infos} - known):
            if posixpath.basename(path) in done:
                raise FileExistsError(
                    f"{self.directory} holds {path}, which is called as a part and which no job "
                    "wrote there: move it away"
                )
        damage = _find_damage(self.directory, records, infos, self.checked, digest)
        lost = [name for name, record in recorded.items() if record is None]
        damage |= dict.fromkeys(lost, "its record has changed since it was written")
        for name, later in itertools.pairwise(recorded):
            if self.numbers(later)[0] <= self.numbers(name)[-1]:
                damage[later] = f"{name} has parts of it"
        return recorded, damage

    def finish(self) -> dict[str, int]:
        """Write the manifest file, remove temporary files, and mark the output as complete.

        Parts of earlier runs are removed, too. Returns the size in bytes of each output file by
        path. Raises JobChangedError if another run has started, or records of parts are missing.
        """
        check_current(self.directory, self.key)
        names = self._recorded()
        if [number for name in names for number in self.numbers(name)] != [*range(self.count)]:
            raise metadata_gone(self.directory)
        files: dict[str, int] = {}
        try:
            with self.directory.replacing(self.directory.path(MANIFEST)) as file:
                for content in self.directory.read_all([record_path(name) for name in names]):
                    file.write(content + b"\n")
                    record = parse_record(content)
                    files |= record.files if record else {}
        except FileNotFoundError as err:
            raise metadata_gone(self.directory) from err
        self._remove_scratch()
        self.directory.remove(*self._strays())  # records of late attempts
        earlier = {*read_job(self.directory)["earlier"]} - {self.key}
        self._remove_parts(earlier)  # late attempts may have written some
        self.directory.prune(QUARANTINE)
        self.directory.sync()
        check_current(self.directory, self.key)
        content = json.dumps({"key": self.key, "parts": self.count}).encode()
        self.directory.replace(SUCCESS, content)
        self.directory.sync()
        return files

    def write_card(self) -> None:
        """Write `CARD`, a YAML file that names the data files to Hugging Face's `datasets`.

        Nothing is written if a user has a file of this name, or a `README` instead.
        """
        folders = "*=*/" * len(self.encoding.partition_by)
        card = _CARD.format(data=f"{folders}part-*{self.encoding.suffix}")
        for name in self._replaceable_cards():
            self.directory.replace(name, card.encode())

    def _replaceable_cards(self) -> list[str]:
        """Return [`CARD`] if a job may write that file, and [] if a user wrote it or a `README`."""
        try:
            content = self.directory.read(CARD)
        except FileNotFoundError:
            return [CARD] * (not self.directory.has(README))
        except (OSError, ValueError):  # a folder, a link, or unreadable
            return []
        return [CARD] * (not content or content.startswith(_CARD_MARK.encode()))

    def _earlier(self) -> dict[str, Any] | None:
        """Return the parsed job.json of the directory, or None if no job has begun there.

        If it is damaged, a dict is made from names of files. With `restart`, it has only the
        entries ``key`` and ``earlier``. Else it describes this job, if files have its key; if not,
        raises DamagedMetadataError.
        """
        try:
            return read_job(self.directory)
        except FileNotFoundError:
            return None
        except DamagedMetadataError as err:
            names = [*self.directory.sizes(RECORDS), *self.directory.sizes(SCRATCH)]
            keys = {key for name in names if (key := key_in(name)) is not None}
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
            # Its key is of no run, or of this run, which writes no file of this name.
            and (
                key_in(name) not in keys
                or (key_in(base) == self.key and base != self._name_of(base))
            )
        ]
        if foreign:
            raise FileExistsError(
                f"{self.directory} holds {len(foreign)} files that no job wrote, such as "
                f"{foreign[0]}: choose another directory, or move them away"
            )

    def _remove_parts(self, keys: Collection[str]) -> None:
        parts = [name for name in sorted(self.directory.part_sizes()) if key_in(name) in keys]
        self.directory.remove(*parts)
        self.directory.prune(*{posixpath.dirname(name) for name in parts} - {""})

    def _clear(self, earlier: dict[str, Any]) -> None:
        """Remove the output of the runs in job.json `earlier`; with `keeps_earlier`, keep parts."""
        keys = {earlier["key"], *earlier["earlier"]}
        remove = self.directory.remove
        remove(SUCCESS)
        for folder in (RECORDS, QUARANTINE):
            names = self.directory.sizes(folder)
            remove(*(f"{folder}/{name}" for name in names if key_in(name) in keys))
        if not self.keeps_earlier:
            self._remove_parts(keys)
        remove(MANIFEST, *REPORTS, *self._replaceable_cards())
        self._remove_scratch()

    def _write_job(self, earlier: dict[str, Any] | None) -> None:
        past = {earlier["key"], *earlier["earlier"]} - {self.key} if earlier else set()
        columns: dict[str, str] = {}
        if self.columns is not None:
            columns["columns"] = base64.b64encode(self.columns.serialize()).decode()
        content = {
            "key": self.key,
            "parts": self.count,
            "identity": self.identity,
            "code": self.code,
            "command": self.options.command,
            "earlier": sorted(past),
            "versions": _versions(),
            "folders": self.folders or {},
            "provenance": self.provenance,
            **columns,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        data = sealed(content, indent=1)
        if earlier is not None:
            self.directory.replace(JOB, data)
        elif not self.directory.create(JOB, data, SCRATCH, is_lasting=True):
            self.check()  # another client was faster; with the same job, both may go on

    def _begun(self) -> dict[str, list[str]]:
        """Return lists of the paths of this run's files that exist, by the name of the output file.

        With partition folders, an output file has a path in each folder that has rows of it, and
        one in `WHOLE` until they are spread. Files without a record are included.
        """
        folder = posixpath.dirname(published_path("", self.encoding))
        paths = [*self.file_infos()]
        paths += [f"{folder}/{name}" for name in self.directory.sizes(folder) if folder]
        begun: dict[str, list[str]] = {}
        for path in sorted(paths):
            if name := self._name_of(path):
                begun.setdefault(name, []).append(path)
        return begun

    def _complete_joined(self) -> None:
        """Create missing records of joined files (of several parts), if the writing task died.

        Parts of a joined file may be removed only when its record exists.
        """
        recorded = self._recorded() if self.joins else ()
        for name in self._begun() if self.joins else ():
            is_left = is_joined(name) and name not in recorded
            if is_left and is_published(self.directory, name, self.encoding):
                complete(self.directory, name, self.encoding)

    def _sound_records(self, digest: Digest | None) -> Iterator[Record]:
        """Yield the records of undamaged output files, and remove this run's other output files.

        A file of a single part without a record gets one, if the attempt that wrote it left its
        private copy of the record. `examine` explains `digest`.
        """
        recorded, damage = self.examine(digest)
        done: set[int] = set()
        for name, record in recorded.items():
            if name not in damage and record is not None:
                done |= {*self.numbers(name)}
                yield record
        for name, reason in damage.items():
            logger.warning("writing %s again: %s", name, reason)
            self.directory.remove(record_path(name))
        for name, paths in self._begun().items():
            if name in recorded and name not in damage:
                continue
            numbers = {*self.numbers(name)} - done  # parts that have been joined may have files
            if name not in damage and numbers:
                if not is_joined(name) and is_published(self.directory, name, self.encoding):
                    record = complete(self.directory, name, self.encoding)
                    if record is not None:
                        yield record
                        continue
                logger.warning("%s is done again: it has no record", name)
            self.directory.remove(*map(quarantine_path, map(self.name, numbers)), *paths)

    def _remove_scratch(self, stems: Collection[str] | None = None) -> None:
        """Remove temporary files of the output files with these stems (see `stem_of`).

        None: all temporary files, of any run, and all files in `PARTS`.
        """
        for folder in (SCRATCH, WHOLE, *([PARTS] if stems is None else [])):
            names = self.directory.sizes(folder)
            left = [name for name in names if stems is None or stem_of(name) in stems]
            self.directory.remove(*(f"{folder}/{name}" for name in left))


def manifest_of(directory: Store) -> Manifest:
    """Return the manifest of the job that wrote into a directory, made from its job.json.

    It has the job's identity, number of parts, encoding and command; other fields are defaults.
    """
    job = read_job(directory)
    output, options = job["identity"]["output"], RunOptions(command=job.get("command", ""))
    names = tuple(name for name in output.get("partition_by", "").split(", ") if name)
    joins = output.get("output_bytes", 0)
    encoding = Encoding(output["format"], output["compression"], names, output_bytes=joins)
    return Manifest(directory, job["identity"], job["parts"], encoding, options)


def read_job(directory: Store) -> dict[str, Any]:
    """Read and parse job.json, which describes the job that has begun in a directory.

    It has the job's ``key``, number of ``parts``, ``identity``, ``versions`` and more. Raises
    FileNotFoundError if no job has begun there, NotADirectoryError if the directory is a file, and
    DamagedMetadataError if job.json is damaged.
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
    """Parse the content of job.json; return None if it is damaged or has unexpected values.

    The file is untrusted, and its key, format and number of parts determine file names.
    """
    try:
        job = unsealed(content) or {}
        parts, output = job["identity"], job["identity"]["output"]
        is_sound = (
            all(isinstance(job[name], kind) for name, kind in _JOB_TYPES.items())
            and key_in(part_name(0, 1, job["key"], ".")) == job["key"]
            and 0 <= job["parts"] <= MOST_PARTS
            and all(_has_sound_code(part, values) for part, values in parts.items())
            and output["format"] in (PARQUET, JSONL)
            and output["compression"] in (None, *_COMPRESSIONS)
            and isinstance(output.get("partition_by", ""), str)
            and isinstance(output.get("output_bytes", 0), int)
        )
    except MALFORMED:
        return None
    return job if is_sound else None


def _has_sound_code(part: str, values: Any) -> bool:
    """Return whether `values`, the section `part` of job.json's ``identity``, has expected types.

    A value that is no dict may raise AttributeError, which `_parse_job` catches.
    """
    if part.endswith(" file"):  # sizes and versions by name; any name may be a file's
        return isinstance(values, dict)
    code = values.get(CODE, {})
    return isinstance(code, dict) and all(isinstance(known, str) for known in code.values())


def _without_code(identity: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        part: {n: v for n, v in values.items() if n != CODE or part.endswith(" file")}
        for part, values in identity.items()
    }


def _versions() -> dict[str, str]:
    """Return versions of Python and packages that may affect results, and Dask's hash function."""
    hashes = hashing.hashers[0].__name__.removeprefix("_hash_")
    versions = {"python": platform.python_version()} | installed_versions(*_PACKAGES)
    return versions | {HASHES: hashes}


def _key_of(identity: dict[str, dict[str, Any]]) -> str:
    content = json.dumps(identity, sort_keys=True).encode("utf-8", "backslashreplace")
    return hashlib.sha256(content).hexdigest()[:KEY_DIGITS]


def _changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield phrases on the differences of two jobs' identities, for error messages."""
    parts = {**before, **after}
    files = [part for part in parts if part.endswith(" file")]
    inputs = [part.removesuffix(" file") for part in files]
    settings = [part for part in parts if part not in files]
    # Inputs come last, because their columns may differ only as a result of other files.
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
    settings = [name for name in {**old, **new} if old.get(name, "") != new.get(name, "")]
    digests = [name for name in settings if f" {name}".endswith(_DIGESTS)]
    # A setting that is shown explains the digest of all.
    shown = [name for name in settings if name != CODE and name not in digests]
    for name in shown or digests:
        if name not in old or name not in new:
            yield f"{part} {name} is {'new' if name in new else 'gone'}"
        elif name in digests:
            yield f"{part} has another {name} ({_digests(old[name], new[name])})"
        else:
            yield f"{part} {name} was {old[name]!r} and is {new[name]!r}"
    for name, (then, now) in _changed_code(old, new).items():
        mapper, _, kind = name.rpartition(" ")
        mapper, kind = (t if t.isprintable() and len(t) < 100 else short(t) for t in (mapper, kind))
        owner = f"{part} {mapper}".rstrip()
        if kind == FUNCTION:
            yield (
                f"{owner} has other code (its bytecode, its defaults, or what it closes over, "
                f"reads or calls; {_digests(then, now)})"
            )
        elif kind == SOURCE:
            yield f"the class of {owner} has other code ({_digests(then, now)})"
        else:
            yield f"{owner} {kind} was {short(then)} and is {short(now)}"


def _digests(then: object, now: object) -> str:
    before, after = (ascii(str(digest)[:KEY_DIGITS]).strip("'") for digest in (then, now))
    return f"digest {before}, now {after}"


def _changed_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the digests and versions of a stage's code that differ, as (old, new) by name."""
    before, after = old.get(CODE, {}), new.get(CODE, {})
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _file_changes(what: str, old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    """Yield phrases on gone, new and changed files, such as "input files new: 2 (a; b)"."""
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
            examples = "; ".join(names[:MOST_FILES_NAMED]) + (f"; and {more:,} more" * (more > 0))
            yield f"{what} {kind}: {len(names):,} ({examples})"


def _find_damage(
    directory: Store,
    records: Iterable[Record],
    infos: Mapping[str, Mapping[str, Any]],
    checked: Checked,
    digest: Digest | None,
) -> dict[str, str]:
    """Verify the files that `records` describe; return the reasons for damaged ones by record name.

    `infos` are fsspec's info dicts of the output's files by path. Undamaged files are added to
    `checked`, and files that it has already are not read again. If ``checked.by`` is "digest",
    contents and quarantine files are verified, too, by `digest` (None: `Store.digests`).
    """
    damage: dict[str, str] = {}
    unread: dict[str, Record] = {}
    for record in records:
        for path, size in record.files.items():
            info = infos.get(path)
            if info is None:
                damage[record.name] = f"{path} is gone"
            elif info["size"] != size:
                damage[record.name] = (
                    f"{path} has {info['size']:,} bytes, and {size:,} were written"
                )
            else:
                md5 = (record.md5 or {}).get(path)
                is_same = md5 is not None and directory.reported_md5(info) == md5
                if checked.by == "size" or is_same:
                    checked.files[path, record.digests[path]] = size
                elif (path, record.digests[path]) not in checked.files:
                    unread[path] = record
        for path in record.quarantined if checked.by == "digest" else ():
            unread[path] = record
    for path, sha256, problem in (digest or Store.digests)(directory, [*unread]):
        record = unread[path]
        if sha256 == record.quarantined.get(path):
            continue
        if sha256 == record.digests.get(path):
            checked.files[path, sha256] = record.files[path]
        else:
            reason = problem or "has other content than was written"
            damage[record.name] = f"{path} {reason}"
    return damage
