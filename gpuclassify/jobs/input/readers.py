"""Parquet and JSONL files as the input of a job, or as a lazy Dask frame.

A part is a run of row groups of one Parquet file or a byte range of one JSONL file, so that a large
file is several tasks. All parts have the same dtypes, which are read from the files beforehand.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import pyarrow as pa

from gpuclassify.jobs.input.annotations import AnnotationSet, with_annotations
from gpuclassify.jobs.input.files import BrokenInputError, InputFile, find_files, with_linked
from gpuclassify.jobs.input.jsonl import MOST_LINE_BYTES, parse_good
from gpuclassify.jobs.input.parts import (
    InputParts,
    Limit,
    Part,
    PartFinder,
    first_of_parquet,
    read_lines,
    read_part,
    sampled_schema,
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
    """Files as the input of a `gpuclassify.jobs.pipeline.Pipeline`; their names tell the format.

    Parameters
    ----------
    paths : str, path or iterable of them
        Files, directories, globs or fsspec URLs (``s3://``, ``gs://``, ``memory://``, and
        ``hf://datasets/OWNER/NAME[@REVISION]/...``, which is read at the commit that the revision
        stands for when the job begins). Columns that no file holds and names of folders give,
        such as ``lang=de``, are read from there, as Dask does: text, or integers where all of them
        are.
    fields : str or sequence of str, optional
        Columns to read. Default: all but ``__null_dask_index__`` and ``__index_level_0__`` of
        Parquet files, which Dask and pandas call an index that has no name.
    part_bytes : int, optional
        Bytes of a part. Default: a two-hundredth of all input, between 64 KiB (more for hundreds
        of columns) and 64 MiB.
    files_per_partition : int, optional
        At most so many neighbouring small files are one part. Default: as many as `part_bytes`
        hold; with this and without that, so many whatever they hold. Large files are cut.
    path_field : str, optional
        A column to add with the path or URL of each row's file.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message. A Hub token is kept in memory
        alone, and not in the reader.
    annotations : str or sequence of str, optional
        Sets that `AnnotationWriter` wrote of these files, whose columns stand behind the input's
        own, beside the very rows that they are of, without a shuffle. ``"notes/quality=q_"`` gives
        the columns of a set the prefix ``q_``. They are read with the `storage_options`.
    annotations_complete : bool
        Refuse sets that are not finished, that lack files of the input, or that have files which
        are gone. False takes what is there, with null for the rest.
    input_digest : bool
        Tell whether files are what they were by a SHA-256 of their content, instead of size and
        time, which `touch` and ``rsync -t`` set as they like; see
        `gpuclassify.jobs.input.files.with_digests` and `check_unchanged`. Whenever a job begins or
        continues, and not for a plan, all files are read once for it, 16 at a time. While it runs,
        a file of a file system is read again only if its inode or the system's time of its
        last change is another, and one of a web server at the end of the job. Object stores and the
        Hub have tags that no writer can set back: nothing is read there.

    Raises
    ------
    TypeError
        A path is empty, or `input_digest` or `annotations_complete` no boolean.
    """

    file_format: ClassVar[str | None] = None
    # Number and size of the samples that columns of JSON lines are read from: few enough for
    # stores that answer slowly, and a multiple of three, as the last is from a file's end.
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
    # Names of files among those of `paths`, and columns that these have in any case.
    only: frozenset[str] | None = field(default=None, init=False)
    known: pa.Schema | None = field(default=None, init=False)

    def check_together(self) -> None:
        """Keep tokens of the Hub in memory alone, out of the storage options."""
        self._set("storage_options", keep_tokens(self.paths, self.storage_options or {}))

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, without secrets in URLs."""
        shown = {"paths": [*map(redacted, self.paths)]}
        if self.annotations:
            shown["annotations"] = [*map(redacted, self.annotations)]
        return super().settings() | shown

    def __repr__(self) -> str:
        return self.code()

    def of_files(self, names: Iterable[str], known: pa.Schema | None) -> FileReader:
        """Return the reader of some of its files, which have the columns `known` in any case."""
        narrowed = copy.copy(self)
        narrowed._set("only", frozenset(names))
        narrowed._set("known", known)
        return narrowed

    def find_parts(self, on_error: str = "refuse", needed: Collection[str] = ()) -> InputParts:
        """Find the files, their columns and their parts.

        Parameters
        ----------
        on_error : {"refuse", "raise", "quarantine", "whole"}
            With "quarantine", files that cannot be read become parts that say so. The others raise,
            and differ in the advice: "raise" is for jobs, which have ``on_error="quarantine"``,
            and "whole" for an earlier corpus, of which no job leaves anything out.
        needed : collection of str
            Columns that no Parquet file may lack which another one has. Others are null there.

        Raises
        ------
        UnreadableInputError
            Nothing matches, formats are mixed, a column is not there, nothing can be read, or,
            unless `on_error` is "quarantine", a file is broken.
        """
        if not self.annotations:
            files = find_files(self.paths, self.storage_options)
            return self._parts_of(files, self.fields, on_error, needed)
        options = self.storage_options
        sets = [AnnotationSet.open(name, options) for name in self.annotations]
        for known in sets:
            known.read_records()
        written = {name for known in sets for name in known.names.values()}
        fields = [name for name in self.fields or () if name not in written]
        asked = [name for name in needed if name not in written]
        files = find_files(self.paths, options)
        plan = self._parts_of(files, None if self.fields is None else fields, on_error, asked)
        listed = {redacted(file.real) for file in files}
        complete = self.annotations_complete
        plan = with_annotations(plan, sets, listed, self.paths, options, complete)
        if self.fields is None:
            return plan
        beside = () if self.path_field is None else (self.path_field,)
        return replace(plan, schema=plan.schema.projected([*self.fields, *beside]))

    def _parts_of(
        self,
        files: Sequence[InputFile],
        fields: Sequence[str] | None,
        on_error: str,
        needed: Collection[str],
    ) -> InputParts:
        if self.only is not None:
            files = [file for file in files if redacted(file.real) in self.only]
        kind = file_format(files[0].path)  # all are of one
        if self.file_format not in (None, kind):
            raise UnreadableInputError(
                f"{type(self).__name__} got {redacted(files[0].path)}: give it names of "
                f"{self.file_format} files, or take FileReader, which goes by names"
            )
        finder = PartFinder(files, self, on_error, needed, fields)
        if kind == PARQUET:
            return finder.parquet()
        return self._lines_of(finder)

    def _lines_of(self, finder: PartFinder) -> InputParts:
        """Return the parts of JSON lines."""
        rules = False, MOST_LINE_BYTES
        return finder.json_lines({}, self.samples, self.sample_bytes, *rules)


@declared
class JsonlReader(FileReader):
    r"""JSON lines, plain or compressed (.gz, .zst, .bz2, .xz, .lz4; such a file is read whole).

    Parameters
    ----------
    paths, fields, part_bytes, storage_options, input_digest, files_per_partition, path_field
        As of `FileReader`.
    annotations, annotations_complete
        As of `FileReader`.
    types : mapping of str to str, optional
        Arrow types of columns that samples of the files may not show, such as
        ``{"price": "double"}`` where the first 3.5 comes after many a 3. Default: what the samples
        hold. ``"json"`` is for columns whose values are of several kinds, or objects with ever
        other fields: frames and Parquet files have the text of each value, and JSON lines get
        the value again.
    surrogates : {"refuse", "replace"}
        What becomes of escapes that stand for half of a surrogate pair, such as ``\ud83d``, which
        no text can hold: a line with one cannot be read, or has U+FFFD in its place, as always in
        columns that are not read.
    max_line_bytes : int
        Bytes that a line may have: one with more cannot be read, and is never in memory as a
        whole. Default: 256 MiB.

    Raises
    ------
    ValueError
        Arrow has no such type, or a setting is none of those above.
    """

    file_format = JSONL

    types: Mapping[str, str] | None = setting(default=None, convert=_types, is_hashed=False)
    surrogates: Surrogates = "refuse"
    max_line_bytes: int = MOST_LINE_BYTES

    def _lines_of(self, finder: PartFinder) -> InputParts:
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
    """Return a lazy frame of all `inputs`, one partition a part.

    Parameters
    ----------
    inputs, fields, part_bytes, files_per_partition, path_field
        As of `FileReader`: `inputs` are its paths, all of one format.
    annotations, annotations_complete
        As of `FileReader`. Partitions of annotations alone open no file of the input. With
        ``fields=`` that name annotations alone, finding the parts does not open JSON lines either;
        the footers of Parquet files are read.
    storage_options : dict, optional
        For fsspec. A Hub token goes to the workers of the current Dask client, and not into the
        frame; workers that start without one need HF_TOKEN.

    Returns
    -------
    dask.dataframe.DataFrame
        On pandas; strings are ``str``, integers Int64, booleans boolean, nested values ArrowDtype.

    Raises
    ------
    UnreadableInputError
        Nothing matches, formats are mixed, a file is broken, or a column is not there.
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
    schema = replace(plan.schema, paths=with_linked(reader.paths, plan.files))
    return dd.from_map(read_part, plan.parts, schema=schema, meta=schema.meta(), label="read")


def first_rows(
    inputs: Sequence[str], most: int, fields: Sequence[str] | None = None
) -> pd.DataFrame:
    """Read the first `most` rows, or these columns of them, without a look at the rest."""
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
                if lines.cut or lines.long:
                    raise BrokenContentError(lines.cut or lines.long[0].reason)
                read.append(lines.content)
                missing -= sum(map(bool, map(bytes.strip, read[-1].split(b"\n"))))
        except BrokenContentError as err:
            raise BrokenInputError(f"{redacted(file.path)} cannot be read: {err}") from err
        files.append(file)
    if file_format(files[0].path) == PARQUET:
        held = PartFinder(files, FileReader(inputs), "refuse", (), fields).parquet().schema
        schema = project(held.arrow, held.file_fields)
        return to_pandas(pa.concat_tables(fitted(table, schema) for table in read))
    schema = sampled_schema(read)
    names = [redacted(file.path) for file in files]
    table = pa.concat_tables(table_of(*pair, schema) for pair in zip(read, names, strict=True))
    if fields is not None:
        table = table.select(project(table.schema, list(dict.fromkeys(fields))).names)
    return to_pandas(table)


def first_rows_lazily(reader: FileReader, most: int) -> dd.DataFrame:
    """Return the first rows of a reader as a Dask frame, whose key follows from their content."""
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
    """Parse lines of JSON with all of their columns; the error for a bad one begins with `name`."""
    table, bad = parse_good(lines, 0, schema or sampled_schema([lines]), is_projected=False)
    for line in bad:
        number = lines[: line.offset].count(b"\n") + 1
        raise BrokenInputError(f"{name}, line {number}: {line.reason}")
    return table
