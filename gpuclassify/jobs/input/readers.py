"""Parquet and JSON lines files as the input of a job, or as a lazy Dask frame.

A part is a run of row groups of a Parquet file or a byte range of a JSON lines file, so that a
large file is several tasks. All parts have the same dtypes, which are inferred beforehand.
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
from gpuclassify.jobs.input.files import (
    BrokenInputError,
    InputFile,
    add_link_targets,
    find_files,
)
from gpuclassify.jobs.input.jsonl import MOST_LINE_BYTES, parse_good
from gpuclassify.jobs.input.part_finder import PartFinder, sampled_schema
from gpuclassify.jobs.input.parts import (
    InputParts,
    Limit,
    Part,
    first_of_parquet,
    read_lines,
    read_part,
)
from gpuclassify.jobs.input.schema import fitted, named_type, project, to_pandas
from gpuclassify.jobs.stores.hub import keep_tokens, share_tokens
from gpuclassify.jobs.stores.names import JSONL, PARQUET, file_format, redacted
from gpuclassify.jobs.stores.store import BrokenContentError, UnreadableInputError
from gpuclassify.settings.checks import check_ordered, check_text
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
    """Files as the input of a `gpuclassify.jobs.pipeline.Pipeline`, in the format of their names.

    Parameters
    ----------
    paths : str, path or iterable of them
        Files, directories, globs or fsspec URLs (``s3://``, ``gs://``, ``memory://``, and
        ``hf://datasets/OWNER/NAME[@REVISION]/...``, which is read at the commit of the revision
        when the job begins). Folder names such as ``lang=de`` give columns that no file holds, as
        in Dask: integers if all values are integers, else text.
    fields : str or sequence of str, optional
        Columns to read. Default: all but ``__null_dask_index__`` and ``__index_level_0__`` of
        Parquet files, which Dask and pandas call an index that has no name.
    part_bytes : int, optional
        Bytes of a part, without compression: lines of a compressed file are taken for four times
        its size. Default: a two-hundredth of all input, between 8 MiB and 64 MiB. If a neural
        network or a callable is a stage, a small input is some 50 parts of at least 64 KiB (more
        for hundreds of columns).
    files_per_partition : int, optional
        Maximum number of neighbouring small files in a part. Default: no maximum. Without
        `part_bytes`, files are joined up to this number whatever their size. Large files are cut.
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
    """

    file_format: ClassVar[str | None] = None
    # Number and size of samples of JSON lines, to infer columns: few, because stores may answer
    # slowly, and a multiple of three, so that the last sample is from the end of a piece.
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
    # Names of the files of `paths` to read, and columns that the schema has in any case.
    only: frozenset[str] | None = field(default=None, init=False)
    known: pa.Schema | None = field(default=None, init=False)

    def check_together(self) -> None:
        """Move tokens of the Hub from the storage options to this process's memory."""
        self._set("storage_options", keep_tokens(self.paths, self.storage_options or {}))

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, without secrets in URLs."""
        public = {"paths": [*map(redacted, self.paths)]}
        if self.annotations:
            public["annotations"] = [*map(redacted, self.annotations)]
        return super().settings() | public

    def __repr__(self) -> str:
        return self.code()

    def select_files(self, names: Iterable[str], known: pa.Schema | None) -> FileReader:
        """Return a reader of some of the files; its schema has the columns `known` in any case."""
        narrowed = copy.copy(self)
        narrowed._set("only", frozenset(names))
        narrowed._set("known", known)
        return narrowed

    def find_parts(
        self, on_error: str = "refuse", needed: Collection[str] = (), *, is_slow: bool = True
    ) -> InputParts:
        """Find the files, their columns and their parts.

        Parameters
        ----------
        on_error : {"refuse", "raise", "quarantine", "whole"}
            With "quarantine", an unreadable file becomes a part with a problem. Other values raise,
            with different advice: "raise" for jobs, which have ``on_error="quarantine"``, and
            "whole" for an earlier corpus, which is never read in part.
        needed : collection of str
            Columns that all Parquet files must have if any does. Other columns may be null.
        is_slow : bool
            Whether the parts of a small input are small, so that slow workers are balanced.

        Raises
        ------
        UnreadableInputError
            Nothing matches, formats are mixed, a column is missing, nothing can be read, or a file
            is broken and `on_error` is not "quarantine".
        """
        if not self.annotations:
            files = find_files(self.paths, self.storage_options)
            return self._find_parts(files, self.fields, on_error, needed, is_slow)
        options = self.storage_options
        sets = [AnnotationSet.open(name, options) for name in self.annotations]
        for opened in sets:
            opened.read_records()
        annotated = {name for opened in sets for name in opened.names.values()}
        fields = None
        if self.fields is not None:
            fields = [name for name in self.fields if name not in annotated]
        needed = [name for name in needed if name not in annotated]
        files = find_files(self.paths, options)
        plan = self._find_parts(files, fields, on_error, needed, is_slow)
        listed = {redacted(file.real) for file in files}
        complete = self.annotations_complete
        plan = add_annotations(plan, sets, listed, self.paths, options, complete)
        if self.fields is None:
            return plan
        added = () if self.path_field is None else (self.path_field,)
        return replace(plan, schema=plan.schema.projected([*self.fields, *added]))

    def _find_parts(
        self,
        files: Sequence[InputFile],
        fields: Sequence[str] | None,
        on_error: str,
        needed: Collection[str],
        is_slow: bool,
    ) -> InputParts:
        if self.only is not None:
            files = [file for file in files if redacted(file.real) in self.only]
        kind = file_format(files[0].path)  # `find_files` refuses mixed formats
        if self.file_format not in (None, kind):
            raise UnreadableInputError(
                f"{type(self).__name__} got {redacted(files[0].path)}: give it names of "
                f"{self.file_format} files, or take FileReader, which goes by names"
            )
        finder = PartFinder(files, self, on_error, needed, fields, is_slow)
        if kind == PARQUET:
            return finder.parquet()
        return self._find_lines(finder)

    def _find_lines(self, finder: PartFinder) -> InputParts:
        return finder.json_lines({}, self.samples, self.sample_bytes)


@declared
class JsonlReader(FileReader):
    r"""JSON lines, plain or compressed (.gz, .zst, .bz2, .xz, .lz4, which are read whole).

    Parameters
    ----------
    paths, fields, part_bytes, storage_options, input_digest, files_per_partition, path_field
        See `FileReader`.
    annotations, annotations_complete
        See `FileReader`.
    types : mapping of str to str, optional
        Arrow types of columns, such as ``{"price": "double"}`` if samples may hold only integers.
        Default: inferred from samples. ``"json"`` is for columns with values of several types, or
        objects whose fields vary: frames and Parquet files have the JSON text of each value, and
        JSON lines have the value itself again.
    surrogates : {"refuse", "replace"}
        Treatment of escapes for half of a surrogate pair, such as ``\ud83d``, which no text can
        hold: "refuse" makes the line unreadable, "replace" puts U+FFFD there. Columns that are not
        read always get U+FFFD.
    max_line_bytes : int
        Maximum bytes of a line. A longer line is unreadable, and is never in memory as a whole.
        Default: 256 MiB.

    Raises
    ------
    ValueError
        Arrow has no such type, or a setting has no allowed value.
    """

    file_format = JSONL

    types: Mapping[str, str] | None = setting(default=None, convert=_types, is_hashed=False)
    surrogates: Surrogates = "refuse"
    max_line_bytes: int = MOST_LINE_BYTES

    def _find_lines(self, finder: PartFinder) -> InputParts:
        rules = self.surrogates == "replace", self.max_line_bytes
        return finder.json_lines(self.types or {}, self.samples, self.sample_bytes, *rules)


@declared
class ParquetReader(FileReader):
    """Parquet files as the input of a `gpuclassify.jobs.pipeline.Pipeline`."""

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
) -> dd.DataFrame:
    """Return a lazy frame of files, with one partition for each part.

    Parameters
    ----------
    inputs, fields, part_bytes, files_per_partition, path_field
        See `FileReader`: `inputs` are its paths, all of one format.
    annotations, annotations_complete
        See `FileReader`. If ``fields=`` names only annotations, no input file is opened, except
        that the footers of Parquet files are read to find the parts.
    storage_options : dict, optional
        Options for fsspec. A Hub token goes to the workers of the current Dask client, and not into
        the frame; workers that start without one need HF_TOKEN.

    Returns
    -------
    dask.dataframe.DataFrame
        Pandas frames: strings are ``str``, integers Int64, booleans boolean, nested values
        ArrowDtype.

    Raises
    ------
    UnreadableInputError
        Nothing matches, formats are mixed, a file is broken, or a column is missing.
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
    )
    return frame_of(reader)


def frame_of(reader: FileReader) -> dd.DataFrame:
    """Return the lazy frame of a reader; see `read_files`."""
    import dask.dataframe as dd

    plan = reader.find_parts()
    share_tokens(reader.paths)
    schema = replace(plan.schema, paths=add_link_targets(reader.paths, plan.files))
    return dd.from_map(read_part, plan.parts, schema=schema, meta=schema.meta(), label="read")


def first_rows(
    inputs: Sequence[str], most: int, fields: Sequence[str] | None = None
) -> pd.DataFrame:
    """Read all or some columns of the first `most` rows; nothing else of the input is read."""
    files, read, missing = [], [], most
    for file in find_files(inputs, {}):
        if missing <= 0:
            break
        try:
            if file.problem:
                raise BrokenContentError(file.problem)
            if file_format(file.path) == PARQUET:
                read.append(first_of_parquet(file, {}, missing))
                missing -= len(read[-1])
            else:
                part = Part(file.path, file_bytes=file.size_bytes)
                lines = read_lines(part, {}, Limit(missing))
                if lines.cut or lines.long_lines:
                    raise BrokenContentError(lines.cut or lines.long_lines[0].reason)
                read.append(lines.content)
                missing -= sum(map(bool, map(bytes.strip, read[-1].split(b"\n"))))
        except BrokenContentError as err:
            raise BrokenInputError(f"{redacted(file.path)} cannot be read: {err}") from err
        files.append(file)
    if file_format(files[0].path) == PARQUET:
        found = PartFinder(files, FileReader(inputs), "refuse", (), fields).parquet().schema
        schema = project(found.arrow, found.file_fields)
        return to_pandas(pa.concat_tables(fitted(table, schema) for table in read))
    schema = sampled_schema(read)
    names = [redacted(file.path) for file in files]
    table = pa.concat_tables(table_of(*pair, schema) for pair in zip(read, names, strict=True))
    if fields is not None:
        table = table.select(project(table.schema, list(dict.fromkeys(fields))).names)
    return to_pandas(table)


def first_rows_lazily(reader: FileReader, most: int) -> dd.DataFrame:
    """Return the first rows of a reader as a Dask frame, whose key is a hash of their content."""
    import dask.dataframe as dd

    if reader.annotations:
        plan, frames, rows = reader.find_parts(), [], 0
        parts = iter(plan.parts)
        while rows < most and (part := next(parts, None)) is not None:
            frames.append(read_part(part, plan.schema))
            rows += len(frames[-1])
        frame = pd.concat(frames, ignore_index=True).head(most)
    else:
        frame = first_rows(reader.paths, most, reader.fields)
    if frame.empty:
        raise UnreadableInputError("the input has no rows: its files are empty")
    return dd.from_pandas(frame, npartitions=-(-len(frame) // FIRST_ROWS_A_PART))


def table_of(lines: bytes, name: str, schema: pa.Schema | None = None) -> pa.Table:
    """Parse all columns of JSON lines; the error for a bad line begins with `name`."""
    table, bad = parse_good(lines, 0, schema or sampled_schema([lines]), is_projected=False)
    for line in bad:
        number = lines[: line.offset].count(b"\n") + 1
        raise BrokenInputError(f"{name}, line {number}: {line.reason}")
    return table
