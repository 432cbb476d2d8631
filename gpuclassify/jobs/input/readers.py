"""Parquet and JSON lines files as the input of a job, or as a lazy Dask frame.

A part is a run of row groups of a Parquet file, a byte range of a JSON lines file, or several small
files, so that a large file is several tasks. All parts have the same dtypes, which are inferred
beforehand.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import pyarrow as pa

from gpuclassify.jobs.input.annotations import AnnotationSet, add_annotations
from gpuclassify.jobs.input.files import BrokenInputError, InputFile, add_link_targets, find_files
from gpuclassify.jobs.input.jsonl import MOST_LINE_BYTES, BadLine
from gpuclassify.jobs.input.left_out import report_left_out
from gpuclassify.jobs.input.part_finder import PartFinder
from gpuclassify.jobs.input.parts import (
    CURES,
    InputParts,
    Limit,
    Lines,
    Part,
    add_path_columns,
    first_of_parquet,
    read_lines,
    read_part,
    unreadable,
)
from gpuclassify.jobs.input.schema import fitted, named_type, to_pandas
from gpuclassify.jobs.ledger.quarantine import FILE, LINE, ON_ERROR, OnError, Problem
from gpuclassify.jobs.stores.hub import keep_tokens, share_tokens
from gpuclassify.jobs.stores.names import JSONL, PARQUET, file_format, redacted
from gpuclassify.jobs.stores.store import BrokenContentError, UnreadableInputError
from gpuclassify.settings.checks import check_choice, check_ordered, check_text
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.options import Surrogates

if TYPE_CHECKING:
    import dask.dataframe as dd

FIRST_ROWS_A_PART = 1_000


def _paths(paths: Any) -> list[str]:
    check_ordered("paths", paths)
    names = [*map(str, [paths] if isinstance(paths, str) else paths)]
    for name in names:
        check_text("path", name, "a path: '.' is the current directory")
    return names


def _distinct(names: tuple[Any, ...] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(dict.fromkeys(map(str, names)))


def _types(types: Any) -> dict[str, str] | None:
    for name, kind in (types or {}).items():
        named_type(name, kind)
    return None if types is None else dict(types)


@declared
class FileReader(Declared):
    r"""Reader of Parquet and JSON lines files, the input of a `gpuclassify.jobs.pipeline.Pipeline`.

    The names of files give their formats, and one input may have both. A column then has a type
    that holds the values of both, and is null in files that lack it.

    Parameters
    ----------
    paths : str, path or iterable of them
        Files, directories, globs or fsspec URLs (``s3://``, ``gs://``, ``memory://``, and
        ``hf://datasets/OWNER/NAME[@REVISION]/...``, which is read at the commit of the revision
        when the job begins). Folder names such as ``lang=de`` give columns that no file holds, as
        in Dask: integers if all values fit into int32, else text.
    fields : str or sequence of str, optional
        Columns to read. Default: all but ``__null_dask_index__`` and ``__index_level_0__`` of
        Parquet files, which Dask and pandas call an index that has no name.
    part_bytes : int, optional
        Bytes of a part, without compression: lines of a compressed file are taken for four times
        its size. Default: a two-hundredth of all input, between 8 MiB and 64 MiB. If a neural
        network or a callable is a stage, a small input is some 50 parts of at least 64 KiB (more
        for hundreds of columns). By default the first parts are smaller: a part is as large as all
        parts before it together, so that the first results show early.
    files_per_partition : int, optional
        Maximum number of neighbouring small files in a part. Default: 1 for an input of up to 16
        files without `part_bytes`, else no maximum. If it is set without `part_bytes`, files are
        joined up to this number whatever their size. Large files are cut.
    path_field : str, optional
        A column to add with the path or URL of each row's file.
    storage_options : dict, optional
        Options for fsspec, which are in no plan, record or message. A Hub token is kept in memory,
        not in the reader.
    annotations : str or sequence of str, optional
        Annotation sets that `AnnotationWriter` wrote for these files. Their columns follow the
        input's, and are matched to its rows by file and position, without a shuffle.
        ``"notes/quality=q_"`` prefixes the columns of a set with ``q_``. Sets are read with the
        `storage_options`.
    annotations_complete : bool
        Refuse sets that are unfinished, lack files of the input, or have files that are gone. With
        False, missing annotations are null.
    types : mapping of str to str, optional
        Arrow types of columns of JSON lines, such as ``{"price": "double"}`` if samples may hold
        only integers. Default: inferred from samples. ``"json"`` is for columns with values of
        several types, or objects whose fields vary: frames and Parquet files have the JSON text of
        each value, and JSON lines have the value itself again.
    surrogates : {"refuse", "replace"}
        Treatment of escapes for half of a surrogate pair in JSON lines, such as ``\ud83d``, which
        no text can hold: "refuse" makes the line unreadable, "replace" puts U+FFFD there. Columns
        that are not read always get U+FFFD.
    max_line_bytes : int
        Maximum bytes of a line. A longer line is unreadable, and is never in memory as a whole.
        Default: 256 MiB.
    input_digest : bool
        Detect changed files by a SHA-256 of their content instead of size and time, which `touch`
        and ``rsync -t`` can set back; see `gpuclassify.jobs.input.files.with_digests` and
        `check_unchanged`. All files are read once, 16 at a time, whenever a job begins or
        continues, but not for a plan. While it runs, a local file is read again only if its inode,
        ctime or mtime differs, and a file of a web server at the end of the job. Files of object
        stores and the Hub are not read: their tags cannot be set back.

    Raises
    ------
    TypeError
        A path is empty, or `input_digest` or `annotations_complete` is no boolean.
    ValueError
        Arrow has no such type, or a setting has no allowed value.
    """

    file_format: ClassVar[str | None] = None
    # Number and size of samples of JSON lines, to infer columns: few, because stores may answer
    # slowly, and a multiple of three, so that the last sample is from the end of a byte range.
    samples: ClassVar[int] = 30
    sample_bytes: ClassVar[int] = 512 << 10

    paths: Any = setting(kw_only=False, convert=_paths, is_hashed=False)
    fields: str | Sequence[str] | None = setting(default=None, is_tuple=True, convert=_distinct)
    part_bytes: int | None = None
    files_per_partition: int | None = None
    path_field: str | None = None
    storage_options: dict[str, Any] = setting(default=None, is_secret=True, is_hashed=False)
    annotations: str | Sequence[str] = setting(default=(), is_tuple=True)
    annotations_complete: bool = True
    input_digest: bool = False
    types: Mapping[str, str] | None = setting(default=None, convert=_types, is_hashed=False)
    surrogates: Surrogates = "refuse"
    max_line_bytes: int = MOST_LINE_BYTES
    # Names of the only files to read, and columns that the schema has even if those lack them.
    only: frozenset[str] | None = field(default=None, init=False)
    known: pa.Schema | None = field(default=None, init=False)

    def check_together(self) -> None:
        """Keep Hub tokens in this process's memory, so that no token is pickled or shown."""
        self._set("storage_options", keep_tokens(self.paths, self.storage_options or {}))

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, without secrets in URLs of inputs and annotation sets."""
        public = {"paths": [*map(redacted, self.paths)]}
        if self.annotations:
            public["annotations"] = [*map(redacted, self.annotations)]
        return super().settings() | public

    def __repr__(self) -> str:
        return self.code()

    def select_files(self, names: Iterable[str], known: pa.Schema | None) -> FileReader:
        """Return a copy of the reader that reads only the files with these real paths or URLs.

        `names` have no secrets. Columns of `known` are in the schema even if these files lack them.
        """
        narrowed = copy.copy(self)
        narrowed._set("only", frozenset(names))
        narrowed._set("known", known)
        return narrowed

    def with_fields(self, fields: Iterable[str]) -> FileReader:
        """Return a copy of the reader that reads only these columns."""
        projected = copy.copy(self)
        projected._set("fields", _distinct(tuple(fields)))
        return projected

    def find_parts(
        self, on_error: str = "raise", needed: Collection[str] = (), *, is_slow: bool = True
    ) -> InputParts:
        """Find the files, their columns, and their parts (slices that one task reads).

        Parameters
        ----------
        on_error : {"raise", "quarantine", "whole"}
            With "quarantine", an unreadable file becomes a part with a problem. Other values raise,
            with different advice: "whole" is for an earlier corpus, which is never read in part.
            Files, lines and rows that annotations list as left out never raise.
        needed : collection of str
            If any file has one of these columns, each Parquet file with rows must have it.
        is_slow : bool
            Whether stages may be slow. If so, the parts of a small input are small, to balance the
            load of workers.

        Raises
        ------
        UnreadableInputError
            Nothing matches, a column is missing or has types that do not fit together, nothing can
            be read, or a file is broken and `on_error` is not "quarantine".
        AnnotationError
            Annotations are damaged, or do not fit the files.
        FileNotFoundError
            An annotation set does not exist.
        """
        options = self.storage_options
        sets = [AnnotationSet.open(name, options) for name in self.annotations]
        for opened in sets:
            opened.read_records()
        annotated = {name for opened in sets for name in opened.names.values()}
        fields = self.fields
        if fields is not None:
            fields = [name for name in fields if name not in annotated]
        files = find_files(self.paths, options)
        listed = {redacted(file.real) for file in files}
        if self.only is not None:
            files = [file for file in files if redacted(file.real) in self.only]
        for file in files:
            if None not in (kinds := {self.file_format, file_format(file.path)}) and len(kinds) > 1:
                raise UnreadableInputError(
                    f"{type(self).__name__} got {redacted(file.path)}: give it names of "
                    f"{self.file_format} files, or take FileReader, which goes by names"
                )
        needed = [name for name in needed if name not in annotated]
        expected = {
            file.path
            for file in files
            if any(known.has_unread(redacted(file.real)) for known in sets)
        }
        plan = PartFinder(files, self, on_error, needed, fields, expected, is_slow).find()
        if not sets:
            return plan
        complete = self.annotations_complete
        plan = add_annotations(plan, sets, listed, self.paths, options, complete)
        if self.fields is None:
            return plan
        added = () if self.path_field is None else (self.path_field,)
        return replace(plan, schema=plan.schema.projected([*self.fields, *added]))


@declared
class JsonlReader(FileReader):
    """Reader of JSON lines, plain or compressed (.gz, .zst, .bz2, .xz, .lz4).

    Parameters
    ----------
    paths, fields, part_bytes, storage_options, input_digest, files_per_partition, path_field
        See `FileReader`.
    annotations, annotations_complete, types, surrogates, max_line_bytes
        See `FileReader`.
    """

    file_format = JSONL


@declared
class ParquetReader(FileReader):
    """Reader of Parquet files, the input of a `gpuclassify.jobs.pipeline.Pipeline`.

    Its arguments are those of `FileReader`.
    """

    file_format = PARQUET


def read_files(
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    fields: str | Sequence[str] | None = None,
    part_bytes: int | None = None,
    storage_options: dict[str, Any] | None = None,
    files_per_partition: int | None = None,
    path_field: str | None = None,
    annotations: str | Sequence[str] = (),
    annotations_complete: bool = True,
    types: Mapping[str, str] | None = None,
    surrogates: Surrogates = "refuse",
    on_error: OnError = "raise",
) -> dd.DataFrame:
    """Return a lazy frame of files, with one partition for each part.

    Parameters
    ----------
    inputs, fields, part_bytes, files_per_partition, path_field, types, surrogates
        See `FileReader`: `inputs` are its paths.
    annotations, annotations_complete
        See `FileReader`. If ``fields=`` names only annotations and a set has all rows, no input
        file is opened, except that the footers of Parquet files are read to find the parts.
    storage_options : dict, optional
        Options for fsspec. A Hub token goes to the workers of the current Dask client, and not into
        the frame; workers that start without one need HF_TOKEN.
    on_error : {"raise", "quarantine"}
        Raise for the first unreadable file, line or row, or leave it out. Files, lines and rows
        that annotations list as left out never raise.

    Returns
    -------
    dask.dataframe.DataFrame
        Pandas frames: strings are ``str``, int64 is Int64, booleans are boolean, and floats are
        NumPy's. Others, such as int32, dates and nested values, are ArrowDtype.

    Raises
    ------
    UnreadableInputError
        Nothing matches, a file is broken, a column is missing or of types that do not fit together,
        or annotations do not fit the files.
    FileNotFoundError
        An annotation set does not exist.
    """
    reader = FileReader(
        inputs,
        fields=fields,
        part_bytes=part_bytes,
        storage_options=storage_options or {},
        files_per_partition=files_per_partition,
        path_field=path_field,
        annotations=annotations,
        annotations_complete=annotations_complete,
        types=types,
        surrogates=surrogates,
    )
    return frame_of(reader, on_error)


def frame_of(reader: FileReader, on_error: OnError = "raise") -> dd.DataFrame:
    """Return a lazy Dask frame of a reader's files, with one partition for each part.

    Unreadable files, lines and rows raise, or are left out if `on_error` is "quarantine". Tokens of
    the Hub are sent to the workers of the current client.
    """
    import dask.dataframe as dd

    check_choice("on_error", on_error, ON_ERROR)
    plan = reader.find_parts(on_error)
    share_tokens(reader.paths)
    schema = replace(plan.schema, paths=add_link_targets(reader.paths, plan.files))
    options: dict[str, Any] = {"schema": schema, "on_error": on_error}
    return dd.from_map(read_part, plan.parts, meta=schema.meta(), label="read", **options)


def read_columns(dataset: Any, names: Iterable[str | None], on_error: OnError) -> Any:
    """Return a lazy Dask frame of columns of a reader's files, or any other dataset unchanged.

    A None among `names` is ignored. `on_error` is as in `frame_of`.
    """
    check_choice("on_error", on_error, ON_ERROR)
    if not isinstance(dataset, FileReader):
        return dataset
    return frame_of(dataset.with_fields(filter(None, names)), on_error)


def first_rows(reader: FileReader, most: int, on_error: str = "raise") -> pd.DataFrame:
    """Read the first `most` rows of a reader, and little else of its files.

    Columns and dtypes are inferred from these rows. If `on_error` is "quarantine", unreadable files
    and lines among them are left out, so that there may be fewer rows. With annotations, whole
    parts are read, with the columns and dtypes of all files.
    """
    if reader.annotations:
        plan, frames, rows = reader.find_parts(on_error), [], 0
        parts = iter(plan.parts)
        while rows < most and (part := next(parts, None)) is not None:
            frames.append(read_part(part, plan.schema, on_error=on_error))
            rows += len(frames[-1])
        return pd.concat(frames, ignore_index=True).head(most)
    options, files, read, missing = reader.storage_options, [], [], most
    for file in find_files(reader.paths, options):
        if missing <= 0:
            break
        part = Part(file.path, file_bytes=file.size_bytes)
        try:
            if file.problem:
                raise BrokenContentError(file.problem)
            if file_format(file.path) == PARQUET:
                read.append((file.path, first_of_parquet(file, options, missing)))
                missing -= len(read[-1][1])
            else:
                lines = read_lines(part, options, Limit(missing), reader.max_line_bytes)
                read.append((file.path, lines))
                missing -= sum(map(bool, map(bytes.strip, lines.content.split(b"\n"))))
        except BrokenContentError as err:
            problem = Problem(FILE, str(part), str(err))
            if on_error != "quarantine":
                raise unreadable(part, problem, on_error) from err
            report_left_out(part, [problem])
            continue
        files.append(file)
    return rows_of(reader, files, read, on_error)


def rows_of(
    reader: FileReader,
    files: Sequence[InputFile],
    read: Iterable[tuple[str, pa.Table | Lines]],
    on_error: str,
) -> pd.DataFrame:
    """Convert rows that were read from `files` to a pandas frame with the reader's columns.

    `read` has the path and content of each file that was read. Lines that cannot be parsed, and
    files that do not fit the others, raise, or are left out if `on_error` is "quarantine".
    """
    lines = [content for _, content in read if isinstance(content, Lines)]
    finder = PartFinder(files, reader, on_error, (), reader.fields)
    schema = finder.schema(lines)
    tables, misfits = [schema.arrow.empty_table()], finder.misfits(schema)
    for path, content in read:
        if path in misfits:
            report_left_out(path, [misfits[path]])
            continue
        if isinstance(content, Lines):
            table, bad = content.parse(schema)
            name = redacted(path)
            problems = [
                Problem(LINE, f"{name}, line {_line_number(content, line)}", line.reason)
                for line in bad
            ]
            problems += [Problem(FILE, name, content.cut)] if content.cut else []
            if problems and on_error != "quarantine":
                reason = f"{problems[0].source} cannot be read: {problems[0].reason.rstrip('.')}"
                raise BrokenInputError(f"{reason}. {CURES[on_error]}")
            report_left_out(path, problems)
        else:
            table = fitted(content, schema.pathless)
        tables.append(add_path_columns(table, path, schema))
    return to_pandas(pa.concat_tables(tables))


def _line_number(lines: Lines, bad: BadLine) -> int:
    return lines.content[: bad.offset].count(b"\n") + 1


def first_rows_lazily(reader: FileReader, most: int, on_error: str = "raise") -> dd.DataFrame:
    """Return the first `most` rows of a reader as a Dask frame, whose key is a hash of the rows.

    The rows are read now, by `first_rows`. Raises UnreadableInputError if there are none.
    """
    import dask.dataframe as dd

    frame = first_rows(reader, most, on_error)
    if frame.empty:
        raise UnreadableInputError("the input has no rows: its files are empty")
    return dd.from_pandas(frame, npartitions=-(-len(frame) // FIRST_ROWS_A_PART))
