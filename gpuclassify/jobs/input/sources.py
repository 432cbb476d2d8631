"""Sources of a job's parts: files, or partitions of a Dask frame."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import posixpath
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import dask
import pyarrow as pa

from gpuclassify.jobs.input.annotation_reader import ROW_POSITION, AnnotationReader
from gpuclassify.jobs.input.files import (
    InputFile,
    add_link_targets,
    check_all_unchanged,
    check_unchanged,
    with_digests,
)
from gpuclassify.jobs.input.left_out import report_left_out
from gpuclassify.jobs.input.parts import (
    InputParts,
    InputSchema,
    Part,
    RowChoice,
    read_chosen,
    read_part,
    read_table,
)
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.schema import is_textless, meta_frame, to_frame
from gpuclassify.jobs.ledger.encoding import FILE as FILE_FIELD
from gpuclassify.jobs.ledger.encoding import PLACE
from gpuclassify.jobs.ledger.quarantine import Problem
from gpuclassify.jobs.stores.hub import share_tokens
from gpuclassify.jobs.stores.names import file_format, redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import FILES_AT_A_TIME, Store, UnreadableInputError
from gpuclassify.workers.secrets import name_of_options, recall

if TYPE_CHECKING:
    from dask.delayed import Delayed

    from gpuclassify.frames import Frame, LazyFrame

POSITION_FIELDS = pa.schema([(FILE_FIELD, pa.string()), (PLACE, pa.int64())])


@dataclass(frozen=True)
class FileSource:
    """Source of a job that reads files: a reader, and the parts of its files."""

    reader: FileReader
    input: InputParts
    lent: tuple[pa.Field, ...] = ()  # columns of `POSITION_FIELDS` for stages, not for the output
    has_index = False  # the index is only the row's number in its part
    reads_any_backend = True  # whether parts can be read as pandas and as cuDF frames
    knows_input = True  # whether all input files are known

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options for fsspec to read the files, which may hold secrets."""
        return self.reader.storage_options

    @property
    def options_name(self) -> str:
        """Name under which workers keep the storage options in memory; it has no secrets."""
        return name_of_options(f"input {self.reader}", self.storage_options)

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.input.parts)

    @property
    def input_schema(self) -> InputSchema | None:
        """Schema for tasks that read parts, without storage options, which may be secrets."""
        return replace(self.input.schema, storage_options={})

    @property
    def part_sizes(self) -> Sequence[float]:
        """Estimated decompressed bytes of each part, to estimate the work that is left."""
        return self.input.sizes

    @functools.cached_property
    def meta(self) -> Frame:
        """Empty pandas frame with the columns and dtypes of every part."""
        return meta_frame(pa.schema([*self.input.schema.arrow, *self.lent]))

    def refuse_output(self, directory: Store, name: str) -> None:
        """Raise ValueError if the input overlaps the output `directory`; see `refuse_overlap`."""
        files = self.input.files
        paths = add_link_targets(self.reader.paths, files)
        real = (file.real for file in files)
        refuse_overlap(directory, name, real, paths, self.storage_options)

    @functools.cached_property
    def files(self) -> Sequence[InputFile]:
        """Input files, with digests if the reader asks for them, which reads all files once."""
        files = self.input.files
        return with_digests(files, self.storage_options) if self.reader.input_digest else files

    @property
    def size_bytes(self) -> int | None:
        """Number of bytes of all files, as stored; None if a file's size is unknown."""
        sizes = [file.size_bytes for file in self.input.files]
        return None if None in sizes else sum(filter(None, sizes))

    def identity(self) -> dict[str, dict[str, Any]]:
        """Return the input's columns, sizes and file versions, to detect that it has changed.

        The result has a dict of settings for each heading, such as "input" and "input file".
        """
        schema, part_bytes = self.input.schema, self.input.part_bytes
        name = operator.attrgetter("path" if schema.path_field else "real")
        most = self.reader.files_per_partition
        formats = {file_format(file.path) for file in self.files}
        return {
            "input": {
                "format": " and ".join(sorted(filter(None, formats))),
                "columns": ", ".join(f"{field.name} {field.type}" for field in schema.arrow),
                "is_projected": schema.is_projected,
                "part_bytes": part_bytes,
                "parts": self.count,
                **({} if most is None else {"files_per_partition": most}),
            },
            "input file": {redacted(name(file)): file.state for file in self.files},
            **{
                f"annotations {redacted(columns.address)}": {"key": columns.key}
                for columns in schema.annotations
            },
        }

    def frame(self, on_error: str, backend: str) -> LazyFrame:
        """Return a lazy Dask frame of the parts, as frames of `backend`: "pandas" or "cudf".

        Unreadable files, lines and rows raise, or are left out if `on_error` is "quarantine".
        """
        import dask.dataframe as dd

        self.share_tokens()
        return dd.from_map(
            read_frame,
            self.input.parts,
            [files for _, files in self.inputs(range(self.count))],
            schema=self.input_schema,
            options_name=self.options_name,
            on_error=on_error,
            backend=backend,
            meta=self.meta,
            label="read",
        )

    def share_tokens(self) -> None:
        """Send the Hub tokens that reading the files needs to the workers of the current client."""
        share_tokens(self.reader.paths)

    def inputs(self, numbers: Iterable[int]) -> Iterator[tuple[Part, list[InputFile]]]:
        """Yield the parts at these indices, each with the input files that it reads."""
        files = {file.path: file for file in self.files}
        for part in (self.input.parts[number] for number in numbers):
            yield part, [files[piece.path] for piece in part.pieces]

    def check_unchanged(self) -> None:
        """Raise ChangedInputError if any file has changed since the job began."""
        reader = self.reader
        check_all_unchanged(self.files, reader.paths, reader.storage_options)


class FrameSource:
    """Source of a job that reads a Dask frame, whose partitions are the parts.

    The frame is optimised once, because optimising may change its partitions. `identity` is a dict
    that identifies the input; with one, the frame is only simplified, which keeps its partitions.
    Without one, the frame's key identifies the input.
    """

    has_index = True
    reads_any_backend = False
    knows_input = False
    input_schema = None
    part_sizes = None  # unknown before partitions are computed
    options_name = ""
    storage_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, frame: Any, identity: dict[str, dict[str, Any]] | None = None) -> None:
        self._names = frame_names(frame)
        self._frame = frame.optimize() if identity is None else frame.simplify()
        self._identity = identity

    @property
    def count(self) -> int:
        """Number of partitions."""
        return self._frame.npartitions

    @property
    def meta(self) -> Frame:
        """Empty frame with the columns and dtypes of every partition."""
        return self._frame._meta

    @property
    def size_bytes(self) -> None:
        """Always None, because the size of a lazy frame is unknown."""

    def refuse_output(self, directory: Store, name: str) -> None:
        """Raise ValueError if the input, as far as it is known, overlaps the output `directory`."""
        refuse_overlap(directory, name, *self._names, directory.storage_options)

    def identity(self) -> dict[str, dict[str, Any]]:
        """Return settings that identify the input, by heading."""
        if self._identity is not None:
            return self._identity
        return {"input": {"Dask key": self._frame._name, "partitions": self.count}}

    def frame(self, on_error: str, backend: str) -> LazyFrame:
        """Return the Dask frame. The arguments are ignored, because they are about files."""
        return self._frame

    def partitions(self) -> list[Delayed]:
        """Return the partitions as Dask's delayed objects, in order."""
        return self._frame.to_delayed(optimize_graph=False)

    def check_unchanged(self) -> None:
        """Do nothing: a frame's input is not known."""


Source = FileSource | FrameSource


def refuse_overlap(
    directory: Store,
    name: str,
    files: Iterable[str],
    paths: Iterable[str],
    storage_options: dict[str, Any],
) -> None:
    """Raise ValueError if input files lie in the output, or input paths match its files.

    `paths` were given to a reader, and `name` is some file that the job writes to `directory`.
    """
    for folder in sorted({posixpath.dirname(file) for file in files}):
        if directory.holds(open_store(f"{folder}/file")):
            raise ValueError(
                f"the input is read from {redacted(folder)}, which lies in the output directory "
                f"{directory}, and writing over that would remove it first: choose an output "
                "directory outside the input"
            )
    for path in paths:
        with contextlib.suppress(ImportError):  # Dask may read stores that fsspec cannot open.
            if open_store(path, storage_options).would_match(directory, name):
                raise ValueError(
                    f"the output directory {directory} lies in the input, which would grow by it: "
                    "choose an output directory outside the input"
                )


def frame_names(frame: Any) -> tuple[list[str], list[str]]:
    """Return the input files of a Dask frame, and the paths that its readers were given.

    Only frames made by `read_files` or Dask's `read_parquet` have any. For `read_parquet`, only
    paths are known, so the files include an invented name, ``part``, in each of the paths.
    """
    from dask.dataframe.dask_expr.io import FromMap, ReadParquet

    files: list[str] = []
    paths: list[str] = []
    for read in frame.expr.find_operations((FromMap, ReadParquet)):
        if isinstance(read, ReadParquet):
            paths += map(str, read.path if isinstance(read.path, list) else [read.path])
        elif read.func is read_part:
            paths += read.kwargs["schema"].paths
            files += [piece.path for part in read.iterables[0] for piece in part.pieces]
    return [*files, *(posixpath.join(path, "part") for path in paths)], paths


def as_source(
    reader: object,
    on_error: str,
    needed: Collection[str] = (),
    *,
    lends_positions: bool = False,
    keeps_partitions: bool = False,
    is_slow: bool = False,
) -> Source:
    """Return the source of a reader or a Dask frame; `needed` are columns that the job reads.

    `on_error` and `is_slow` are as in `FileReader.find_parts`. With `lends_positions`, rows get the
    columns of `POSITION_FIELDS` that are needed and not in the files. With `keeps_partitions`, a
    frame has the same partitions each time it is read. Raises TypeError for other objects, and
    UnreadableInputError if the input has no columns.
    """
    if isinstance(reader, FileReader):
        plan = reader.find_parts(on_error, needed, is_slow=is_slow)
        missing = {*needed} - {*plan.schema.arrow.names}
        lent = tuple(f for f in POSITION_FIELDS if lends_positions and f.name in missing)
        source = FileSource(reader, plan, lent)
        if not len(source.input.schema.arrow):
            raise UnreadableInputError(
                "the input has neither rows nor columns: its files are empty, or hold no line of "
                "JSON that can be read"
            )
        return source
    if dask.is_dask_collection(reader):
        import dask.dataframe as dd

        if isinstance(reader, dd.DataFrame):
            key = {"Dask key": reader._name, "partitions": reader.npartitions}
            return FrameSource(reader, {"input": key} if keeps_partitions else None)
    raise TypeError(
        f"a job begins with a {type(reader).__qualname__}: its first stage must be a "
        'JsonlReader("books/*.jsonl"), a ParquetReader("books/") or a Dask DataFrame'
    )


def read_frame(
    part: Part,
    files: Sequence[InputFile],
    schema: InputSchema,
    options_name: str,
    on_error: str,
    backend: str,
    columns: Sequence[str] | None = None,
) -> Frame:
    """Read all or some columns of a part's good rows as a frame of `backend`, in a Dask task.

    `files` are the part's input files; if one has changed, raises ChangedInputError. Workers find
    the storage options under `options_name`. Unreadable files, lines and rows raise, or are left
    out and counted by `report_left_out` if `on_error` is "quarantine".
    """
    schema = replace(schema, storage_options=recall(options_name, {}))
    # A bad value in any column drops the row, so that the row numbers depend on all columns.
    if columns is not None and on_error != "quarantine":
        schema = schema.projected(columns)
    table, problems, _ = read_pieces(part, files, schema, on_error)
    report_left_out(part, problems)
    return to_frame(table if columns is None else table.select(list(columns)), backend)


def read_pieces(
    part: Part,
    files: Sequence[InputFile | None],
    schema: InputSchema,
    on_error: str,
    text_fields: Sequence[str] = (),
    select: RowChoice | None = None,
) -> tuple[pa.Table, list[Problem], dict[str, Any]]:
    """Read the pieces of a part; return good rows, problems, and the source for the part's record.

    `files` are the input files of the pieces, in order. A None is not checked for changes, and
    neither is any file if the list is empty. With `select`, only the rows that it chooses are
    returned. With `schema.has_positions`, which needs `files`, the table also has ``_place``, the
    row's position, and ``_file``, the file's name.

    The source is a dict: the path and range of a single piece, or else a list of such dicts under
    ``files``, with numbers of rows. ``textless`` has the number of rows by path, for pieces where a
    column of `text_fields` is null in all rows; other pieces of the file may have texts. ``empty``
    lists the paths of whole files without rows.

    Unreadable files, lines and rows raise unless `on_error` is "quarantine", or annotation sets
    list them as left out. Raises ChangedInputError if one of `files` has changed.
    """
    annotations = AnnotationReader(part, schema)

    def read(piece: Part, file: InputFile | None) -> tuple[pa.Table, list[Problem], int]:
        checked = file if piece.problem is None else None
        with _checking_changes(checked, schema.storage_options):
            if select is not None:
                table, problems, rows = read_chosen(piece, schema, on_error, annotations, select)
            else:
                table, problems, _ = read_table(piece, schema, on_error, annotations=annotations)
                rows = len(table)
        if schema.has_positions and file is not None:
            name = redacted(file.real)
            names = [PLACE if column == ROW_POSITION else column for column in table.column_names]
            table = table.rename_columns(names)
            table = table.append_column(FILE_FIELD, pa.repeat(name, len(table)))
            problems = [replace(p, file=name) if p.place is not None else p for p in problems]
        return table, problems, rows

    pieces = part.pieces
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:  # starts no thread until it is used
        map_pieces = pool.map if part.followers else map
        results = list(map_pieces(read, pieces, files or itertools.repeat(None)))
    tables = [table for table, _, _ in results]
    source = _describe(part)
    if part.followers:
        pairs = zip(pieces, tables, strict=True)
        source = {"files": [{**_describe(piece), "rows": len(table)} for piece, table in pairs]}
    textless = {
        redacted(piece.path): len(table)
        for piece, table in zip(pieces, tables, strict=True)
        if is_textless(table, text_fields)
    }
    if textless:
        source["textless"] = textless
    pairs = zip(pieces, results, strict=True)
    if empty := [
        redacted(piece.path)
        for piece, (_, problems, rows) in pairs
        if piece.is_whole_file and not (rows or problems)
    ]:
        source["empty"] = empty
    return pa.concat_tables(tables), [p for _, problems, _ in results for p in problems], source


@contextlib.contextmanager
def _checking_changes(file: InputFile | None, storage_options: dict[str, Any]) -> Iterator[None]:
    """Raise ChangedInputError at the end of the block if `file` has changed since the job began.

    This error also replaces an error of the block, which the change has probably caused.
    """
    try:
        yield
    except Exception:
        if file is not None:
            with contextlib.suppress(OSError):
                check_unchanged(file, storage_options)
        raise
    if file is not None:
        check_unchanged(file, storage_options)


def _describe(part: Part) -> dict[str, Any]:
    """Return the path and range of a part of one file as a dict of JSON values, for its record."""
    plain = replace(part, rows=None, annotations=(), followers=())
    known = {key: value for key, value in asdict(plain).items() if value is not None}
    known["path"] = redacted(part.path)
    del known["followers"], known["annotations"]
    known.pop("file_bytes", None)
    if part.row_groups is not None or (part.start, part.length) == (0, None):
        del known["start"]
    return known
