"""Parquet and JSONL files as the input of a job, or as a lazy Dask frame.

A part is a run of row groups of one Parquet file or a byte range of one JSONL file, so that a large
file is several tasks. All parts have the same dtypes, which are read from the files beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import pyarrow as pa

from gpuclassify.hub.dataset_files import keep_tokens, token_names
from gpuclassify.jobs.files import (
    JSONL,
    PARQUET,
    BrokenContentError,
    BrokenInputError,
    UnreadableInputError,
    file_format,
    find_files,
    local_problem,
)
from gpuclassify.jobs.input.jsonl import parse_good
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
from gpuclassify.jobs.input.schema import named_type, project, to_pandas
from gpuclassify.jobs.storage import redacted
from gpuclassify.settings.checks import check_count, check_flag, check_text, with_plain_values
from gpuclassify.workers.secrets import share_tokens_with_workers

if TYPE_CHECKING:
    import dask.dataframe as dd

FIRST_ROWS_A_PART = 1_000


class FileReader:
    """Files as the input of a `gpuclassify.jobs.pipeline.Pipeline`; the format goes by their names.

    Parameters
    ----------
    paths : str, path or iterable of them
        Files, directories, globs or fsspec URLs (``s3://``, ``gs://``, ``memory://``, and
        ``hf://datasets/OWNER/NAME[@REVISION]/...``, which is read at the commit that the revision
        stands for when the job begins). Columns that no file holds and names of folders give,
        such as ``lang=de``, are read from there, as Dask does: text, or integers where all of them
        are.
    fields : str or sequence of str, optional
        Columns to read. Default: all.
    part_bytes : int, optional
        Bytes of a part. Default: a two-hundredth of all input, between 256 KiB (more for hundreds
        of columns) and 64 MiB.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message. A Hub token is kept in memory
        alone, and not in the reader.
    input_digest : bool
        Tell whether files are what they were by a SHA-256 of their content, instead of size and
        time, which `touch` and ``rsync -t`` set as they like; see
        `gpuclassify.jobs.files.with_digests` and `check_unchanged`. Whenever a job begins or
        continues, and not for a plan, all files are read once for it, 16 at a time. While it runs,
        a file of a file system is read again only if its inode or the system's own time of its
        last change is another, and one of a web server at the end of the job. Object stores and the
        Hub have tags that no writer can set back: nothing is read there.

    Raises
    ------
    TypeError
        A path is empty, or `input_digest` no boolean.
    """

    file_format: ClassVar[str | None] = None
    types: Mapping[str, str] | None = None
    # How many samples of JSON lines columns are read from, and how large each is: few enough for
    # stores that answer slowly, and a multiple of three, as the last is from a file's end.
    samples: ClassVar[int] = 30
    sample_bytes: ClassVar[int] = 512 << 10

    @with_plain_values
    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        fields: str | Sequence[str] | None = None,
        part_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
        input_digest: bool = False,
    ) -> None:
        check_count("part_bytes", part_bytes, may_be_none=True)
        check_flag("input_digest", input_digest)
        self.paths = _names(paths)
        for path in self.paths:
            check_text("path", path, "a path: '.' is the current directory")
        self.fields = None if fields is None else tuple(dict.fromkeys(_names(fields)))
        self.part_bytes = part_bytes
        self.storage_options = keep_tokens(self.paths, storage_options or {})
        self.input_digest = input_digest

    def __repr__(self) -> str:
        shown = [f"{[redacted(path) for path in self.paths]}"]
        for name in ("fields", "part_bytes", "types"):
            if getattr(self, name) is not None:
                shown.append(f"{name}={getattr(self, name)!r}")
        shown += ["input_digest=True"] * self.input_digest
        return f"{type(self).__name__}({', '.join(shown)})"

    def find_parts(self, on_error: str = "raise", needed: Collection[str] = ()) -> InputParts:
        """Find the files, their columns and their parts.

        Parameters
        ----------
        on_error : {"raise", "quarantine", "whole"}
            With "quarantine", files that cannot be read become parts that say so. "whole" raises
            as well, in an earlier corpus, which no job leaves anything out of.
        needed : collection of str
            Columns that no Parquet file may lack which another one has. Others are null there.

        Raises
        ------
        UnreadableInputError
            Nothing matches, formats are mixed, a column is not there, nothing can be read, or,
            unless `on_error` is "quarantine", a file is broken.
        """
        files = find_files(self.paths, self.storage_options)
        found = file_format(files[0].path)  # all are of one
        if self.file_format not in (None, found):
            raise UnreadableInputError(
                f"{type(self).__name__} got {redacted(files[0].path)}: give it names of "
                f"{self.file_format} files, or take FileReader, which goes by names"
            )
        options = self.storage_options
        finder = PartFinder(files, self.fields, self.part_bytes, options, on_error, needed)
        if found == PARQUET:
            return finder.parquet()
        return finder.json_lines(self.types or {}, self.samples, self.sample_bytes)


class JsonlReader(FileReader):
    """JSON lines, plain or compressed (.gz, .zst, .bz2; a compressed file is one part).

    Parameters
    ----------
    paths, fields, part_bytes, storage_options, input_digest
        As of `FileReader`.
    types : mapping of str to str, optional
        Arrow types of columns that samples of the files may not show, such as
        ``{"price": "double"}`` where the first 3.5 comes after many a 3. Default: what the samples
        hold.

    Raises
    ------
    ValueError
        Arrow has no such type.
    """

    file_format = JSONL

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        fields: str | Sequence[str] | None = None,
        part_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
        types: Mapping[str, str] | None = None,
        input_digest: bool = False,
    ) -> None:
        super().__init__(
            paths,
            fields=fields,
            part_bytes=part_bytes,
            storage_options=storage_options,
            input_digest=input_digest,
        )
        for name, kind in (types or {}).items():
            named_type(name, kind)
        self.types = None if types is None else dict(types)


class ParquetReader(FileReader):
    """Parquet files."""

    file_format = PARQUET


def read_files(
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    fields: str | Sequence[str] | None = None,
    part_bytes: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dd.DataFrame:
    """A lazy frame of all `inputs`, one partition a part.

    Parameters
    ----------
    inputs, fields, part_bytes
        As of `FileReader`: `inputs` are its paths, all of one format.
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
    import dask.dataframe as dd

    reader = FileReader(
        inputs, fields=fields, part_bytes=part_bytes, storage_options=storage_options
    )
    found = reader.find_parts()
    share_tokens_with_workers(token_names(reader.paths))
    return dd.from_map(
        read_part, found.parts, schema=found.schema, meta=found.schema.meta(), label="read"
    )


def first_rows(
    inputs: Sequence[str], most: int, fields: Sequence[str] | None = None
) -> pd.DataFrame:
    """So many rows of the first files, or these columns of them, without a look at the rest."""
    tables: list[pa.Table] = []
    for file in find_files(inputs, {}):
        missing, name = most - sum(map(len, tables)), redacted(file.path)
        if not missing:
            break
        try:
            if problem := local_problem(file.path):
                raise BrokenContentError(problem)
            if file_format(file.path) == PARQUET:
                tables.append(first_of_parquet(file, {}, missing))
            else:
                part = Part(file.path, file_bytes=file.size_bytes)
                tables.append(table_of(read_lines(part, {}, Limit(missing)).content, name))
        except BrokenContentError as err:
            raise BrokenInputError(f"{name} cannot be read: {err}") from err
    table = pa.concat_tables(tables, promote_options="permissive")
    if fields is not None:
        table = table.select(project(table.schema, list(dict.fromkeys(fields))).names)
    return to_pandas(table)


def first_rows_lazily(
    inputs: Sequence[str], most: int, fields: Sequence[str] | None = None
) -> dd.DataFrame:
    """The `first_rows` as a Dask frame, whose key follows from what they hold."""
    import dask.dataframe as dd

    frame = first_rows(inputs, most, fields)
    if frame.empty:
        raise UnreadableInputError("the input has no rows: its files are empty")
    return dd.from_pandas(frame, npartitions=-(-len(frame) // FIRST_ROWS_A_PART))


def table_of(lines: bytes, name: str) -> pa.Table:
    """Lines of JSON with all of their columns; the error for a bad line begins with `name`."""
    table, bad = parse_good(lines, 0, sampled_schema([lines]), is_projected=False)
    for line in bad:
        number = lines[: line.offset].count(b"\n") + 1
        raise BrokenInputError(f"{name}, line {number}: {line.reason}")
    return table


def _names(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """One name, or several; a string is no list of letters."""
    return [str(name) for name in ([given] if isinstance(given, (str, os.PathLike)) else given)]
