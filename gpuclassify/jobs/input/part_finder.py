"""Cut input files into parts (slices that one task reads), and infer their common columns."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.input.files import BrokenInputError, InputFile
from gpuclassify.jobs.input.jsonl import (
    MOST_LINE_BYTES,
    exact_integers,
    frequent_columns,
    json_columns,
    line_schemas,
    line_types,
)
from gpuclassify.jobs.input.parts import (
    InputParts,
    InputSchema,
    Limit,
    Lines,
    Part,
    read_lines,
    unreadable,
)
from gpuclassify.jobs.input.schema import (
    NO_VALUES,
    common_schema,
    declared_types,
    folder_schema,
    json_schema,
    maps_as_json,
    merged_schema,
    misfits,
    missing_column,
    named_type,
    nulls_untyped,
    project,
    set_types,
)
from gpuclassify.jobs.ledger.arrow_types import changed_schema, restored, union
from gpuclassify.jobs.ledger.quarantine import FILE, LINE, Problem
from gpuclassify.jobs.stores.names import PARQUET, compression, file_format, redacted
from gpuclassify.jobs.stores.opening import open_store, store_type
from gpuclassify.jobs.stores.store import FILES_AT_A_TIME, BrokenContentError, UnreadableInputError

# Some 200 parts are enough to show progress and to balance workers. Each part costs a task, a file
# and a record.
PARTS_AIMED_AT = 200
FAST_PART_BYTES, LARGEST_PART_BYTES = 8 << 20, 64 << 20
# A small input of a slow stage is some 50 parts, because few workers may take minutes for 1 MiB.
FEW_PARTS, SMALLEST_PART_BYTES, SLOW_PART_BYTES = 50, 64 << 10, 1 << 20
FEW_FILES = 16  # up to this number, small files are not joined, so that each worker has a file
# Parts of a compressed file or row group are read from the beginning of the file or group, so
# cutting costs time. Parts are small at first. In local files they grow to 1/MOST_SHARES of the
# input, or to the usual size if that is larger. In an input of at most SHARED_BYTES, the fraction
# is of the file or row group.
MOST_SHARES, SHARED_BYTES = 16, 32 << 20
COMPRESSION_RATIO = 4  # assumed ratio of decompressed to compressed bytes
COLUMN_BYTES = 1 << 10  # minimum bytes of a part per column, because columns cost time per part
FOOTER_BYTES = 64 << 10  # size of pyarrow's first read at the end of a file
# Columns that pandas and Dask write to Parquet for an index without a name.
_NAMELESS_INDEX = re.compile(r"__null_dask_index__|__index_level_\d+__")


@dataclass(frozen=True)
class Footer:
    """Columns and row groups of a Parquet file, or the reason why it cannot be read."""

    schema: pa.Schema  # empty if there is a problem
    group_bytes: tuple[int, ...] = ()  # uncompressed bytes of each row group
    group_rows: tuple[int, ...] = ()  # rows of each row group
    problem: str | None = None  # reason why the file cannot be read


def read_footers(
    files: Sequence[InputFile],
    storage_options: dict[str, Any],
    change: Callable[[pa.Schema, pq.FileMetaData], pa.Schema] | None = None,
) -> list[Footer]:
    """Return the footer of each Parquet file, in order; broken files get one with a `problem`.

    ``change(schema, metadata)``, if given, returns the schema to use in place of a file's own.
    """
    schemas: dict[pa.Schema, pa.Schema] = {}  # interned, because there may be very many files

    def read(file: InputFile) -> Footer:
        if file.problem:
            return Footer(pa.schema([]), problem=file.problem)
        try:
            store = open_store(file.path, storage_options)
            with store.reading(file.size_bytes, FOOTER_BYTES) as opened:
                metadata = pq.read_metadata(opened)
                schema = metadata.schema.to_arrow_schema().remove_metadata()
                schema = change(schema, metadata) if change else schema
        except BrokenContentError as err:
            return Footer(pa.schema([]), problem=str(err))
        schema = changed_schema(schema, restored)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return Footer(
            schemas.setdefault(schema, schema),
            tuple(group.total_byte_size for group in groups),
            tuple(group.num_rows for group in groups),
        )

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        return list(pool.map(read, files))


@dataclass(frozen=True)
class PartSizes:
    """Sizes in bytes of the parts of an input, which are slices that one task reads.

    Parts are small at the input's beginning, to show results early. A part has as many bytes as all
    parts before it together, at least `first` and at most `usual`.
    """

    first: int  # minimum bytes of a part
    usual: int  # maximum bytes of a part
    total: int  # bytes of the whole input

    def at(self, offset: int) -> int:
        """Return the bytes of the part that begins at this byte offset of the input."""
        return min(max(self.first, offset), self.usual)

    def ends(self, offset: int, size: int, usual: int) -> list[int]:
        """Cut a range of `size` bytes into parts; return their end offsets, relative to the range.

        The range begins at the byte `offset` of the input. Parts have at most `usual` bytes, except
        the last one, which has less than twice as many.
        """
        ends, end = [], 0
        while size - end >= 2 * (step := min(max(self.first, offset + end), usual)):
            ends.append(end := end + step)
        return [*ends, size]


@dataclass(frozen=True)
class PartFinder:
    """Finder of an input's columns and parts (slices that one task reads).

    `needed` are columns that the job reads: if any file has one, each Parquet file with rows must
    have it. If `on_error` is "quarantine", an unreadable file becomes a part with a `problem`.
    Otherwise it raises UnreadableInputError, unless the file is in `expected`. With `is_slow`, the
    parts of a small input are small, to balance workers.
    """

    files: Sequence[InputFile]
    reader: Any  # the `FileReader`, for its settings
    on_error: str
    needed: Collection[str] = ()
    fields: Sequence[str] | None = None  # columns to keep of the files; None for all
    # Paths of files with lines or rows that annotation sets list as unreadable.
    expected: Collection[str] = ()
    is_slow: bool = True

    def find(self) -> InputParts:
        """Find the parts and columns, from footers of Parquet files and samples of JSON lines.

        Raises UnreadableInputError if nothing can be read, if a column is missing, or if columns of
        the files do not fit together.
        """
        problems: list[tuple[Part, Problem]] = []
        samples: list[Lines] = []
        for sample in self._samples():
            if isinstance(sample, Lines):
                samples.append(sample)
            else:
                problems.append(sample)
                self._check(problems)
        schema = self.schema(samples, problems)
        for sample in samples:
            # Lines are parsed only if folder names give a column that other files hold.
            if missing_column(sample.part.path, (), schema.file_fields):
                names = sampled_schema([sample.content]).names
                reason = missing_column(sample.part.path, names, schema.file_fields)
                if reason is not None:
                    raise UnreadableInputError(f"{sample.part} does not fit other files: {reason}")
        self._check(_bad_lines(samples, schema))
        sizes = {file.path: _line_bytes(file) for file in self.files}
        sizes |= {path: sum(footer.group_bytes) for path, footer in self._footers.items()}
        part_sizes = self._part_sizes(schema, sum(size or 0 for size in sizes.values()))
        damaged = {part.path for part, _ in problems}
        parts: list[Part] = []
        offsets: dict[str, int] = {}  # offset of each file in the input
        offset = 0
        for file in self.files:
            offsets[file.path] = offset
            if file.path in self._footers:
                parts += self._row_groups(file, schema, part_sizes, offset)
            elif self._is_cut_inside(file.path) and not (file.problem or file.path in damaged):
                parts += self._split_compressed(file, part_sizes, offset)
            else:
                parts += self._byte_ranges(file, part_sizes, offset)
            offset += sizes[file.path] or 0
        self._check(_problems(parts))
        return self._join_small(parts, sizes, offsets, schema, part_sizes)

    def schema(
        self, samples: Sequence[Lines], problems: Sequence[tuple[Part, Problem]] = ()
    ) -> InputSchema:
        """Merge the columns of the Parquet files, of `samples` of JSON lines, and of folder names.

        `problems` are files and byte ranges that could not be sampled: they raise only if no column
        can be read. Raises UnreadableInputError if a column is missing, or if its types have no
        common type.
        """
        in_tables = self._in_tables
        types = dict(self.reader.types or {})
        texts = [name for name, kind in types.items() if kind == "json"]
        texts += json_columns(self.reader.known or ())
        kept = types if self.fields is None else None
        contents = [sample.content for sample in samples]
        in_lines = sampled_schema(contents, texts, self.reader.known, kept)
        if not in_tables.names and not in_lines.names and (self._reads_lines or self._footers):
            broken = [Part(path, problem=f.problem) for path, f in self._footers.items()]
            bad = _bad_lines(samples, InputSchema(in_lines, {}, False))
            self._check([*_problems(broken), *bad, *problems], is_all=True)
        if not self._lines:
            if types and self.reader.only is None:
                raise UnreadableInputError(
                    f"types={types} are of JSON lines, and the input has Parquet files alone: "
                    "leave out types="
                )
            return self._input_schema(in_tables)
        by_folders = {*folder_schema(file.path for file in self.files).names}
        by_folders -= {*in_tables.names, *in_lines.names}
        if self._reads_lines:
            in_lines = set_types(in_lines, {n: t for n, t in types.items() if n not in by_folders})
        if not self._footers:
            return self._input_schema(in_lines)
        schema = self._input_schema(self._merge_formats(in_tables, in_lines, samples))
        return replace(schema, line_types=line_types(schema.arrow, in_lines))

    def _merge_formats(
        self, in_tables: pa.Schema, in_lines: pa.Schema, samples: Sequence[Lines]
    ) -> pa.Schema:
        """Merge the columns of Parquet files, `in_tables`, and of JSON lines, `in_lines`."""
        columns = {field.name: field for field in in_tables}
        for field in in_lines:
            known = columns.get(field.name, field)
            if isinstance(field.type, pa.JsonType):  # holds values of Parquet files, too
                columns[field.name] = known.with_type(field.type)
                continue
            if known.metadata == NO_VALUES or field.metadata == NO_VALUES:
                columns[field.name] = field if known.metadata == NO_VALUES else known
                continue
            try:
                columns[field.name] = known.with_type(union(known.type, field.type))
            except pa.ArrowException as err:
                columns[field.name] = known
                if self.fields is not None and field.name not in self.fields:
                    continue
                table = next(p for p, f in self._footers.items() if field.name in f.schema.names)
                lines = [s for s in samples if field.name in sampled_schema([s.content]).names]
                name = redacted(lines[0].part.path) if lines else "JSON lines"
                raise UnreadableInputError(
                    f"the inputs' columns do not fit together: {field.name} is {known.type} in "
                    f"{redacted(table)}, and {field.type} in {name}: read them separately, name "
                    f"the columns to keep without it (fields=), or read values of both as JSON "
                    f"(types={{{field.name!r}: 'json'}})"
                ) from err
        return pa.schema(columns.values())

    @functools.cached_property
    def _footers(self) -> dict[str, Footer]:
        """Footers (columns and row groups) of the Parquet files by path."""
        files = [file for file in self.files if file_format(file.path) == PARQUET]
        footers = read_footers(files, self.reader.storage_options)
        columns, schemas = self._merge_schemas(footers)
        if wrong := {name for schema in schemas for name in misfits(schema, columns)}:
            change = functools.partial(nulls_untyped, names=wrong)
            footers = read_footers(files, self.reader.storage_options, change)
        return {file.path: footer for file, footer in zip(files, footers, strict=True)}

    @functools.cached_property
    def _in_tables(self) -> pa.Schema:
        """Merged columns of the Parquet files, in contrast to columns of JSON lines."""
        if not self._footers:
            return pa.schema([])
        columns, _ = self._merge_schemas([*self._footers.values()])
        if self.fields is not None:
            return columns
        kept = [field for field in columns if not _NAMELESS_INDEX.fullmatch(field.name)]
        return pa.schema(kept or columns)

    @functools.cached_property
    def _lines(self) -> list[InputFile]:
        # These include folders that could not be listed.
        return [file for file in self.files if file.path not in self._footers]

    @property
    def _reads_lines(self) -> bool:
        # If `fields` is empty, only annotation sets are read.
        return bool(self._lines) and (self.fields is None or bool(self.fields))

    def misfits(self, schema: InputSchema) -> dict[str, Problem]:
        """Return the problem of each Parquet file that is broken or does not fit `schema`, by path.

        Raises UnreadableInputError for the first problem, unless `on_error` is "quarantine" or the
        file is in `expected`.
        """
        parts = []
        for file in self.files:
            if footer := self._footers.get(file.path):
                problem = footer.problem or _misfit(file, footer, schema, self.needed)
                parts += [Part(file.path, problem=problem)] if problem else []
        problems = _problems(parts)
        self._check(problems)
        return {part.path: problem for part, problem in problems}

    def _row_groups(
        self, file: InputFile, schema: InputSchema, sizes: PartSizes, offset: int
    ) -> list[Part]:
        """Return the parts of a Parquet file: runs of row groups, or shares of a run's rows.

        `offset` is the estimated number of decompressed bytes of all files before it.
        """
        footer = self._footers[file.path]
        problem = footer.problem or _misfit(file, footer, schema, self.needed)
        if problem is not None:
            return [Part(file.path, problem=problem)]
        parts: list[Part] = []
        # Each share fetches the whole run, which is too slow from remote stores.
        is_cut = self._is_cut_inside(file.path) and store_type(file.path).is_near
        for run in _group_runs(footer, sizes, offset):
            first = sum(footer.group_rows[: run[0]]) if run else 0
            count = sum(footer.group_rows[number] for number in run)
            rows = first, first + count
            part = Part(file.path, row_groups=run, file_bytes=file.size_bytes, rows=rows)
            size = sum(footer.group_bytes[number] for number in run)
            ends = self._ends_inside(file.path, sizes, offset, size) if is_cut else []
            row_ends = sorted({0, *(count * end // size for end in ends[:-1]), count})
            if len(row_ends) > 2:
                parts += [replace(part, share=(*pair, count)) for pair in pairwise(row_ends)]
            else:
                parts.append(part)
            offset += size
        return parts

    def _merge_schemas(self, footers: Sequence[Footer]) -> tuple[pa.Schema, Collection[pa.Schema]]:
        """Merge the columns of Parquet files; return them, and the schemas of files with rows."""
        counts = Counter(footer.schema for footer in footers if any(footer.group_rows))
        columns = common_schema(counts, self.reader.known)
        known = {*columns.names}
        if counts:
            known |= {*folder_schema(file.path for file in self.files).names}
        empty = common_schema(Counter(f.schema for f in footers if not any(f.group_rows)))
        return pa.schema([*columns, *(f for f in empty if f.name not in known)]), counts.keys()

    def _join_small(
        self,
        parts: Sequence[Part],
        sizes: Mapping[str, int | None],
        offsets: Mapping[str, int],
        schema: InputSchema,
        part_sizes: PartSizes,
    ) -> InputParts:
        """Join neighbouring whole files into parts, and return all parts of the input.

        `sizes` (decompressed bytes; None if unknown) and `offsets` in the input are by path.
        """
        most, room_sizes = self.reader.files_per_partition, part_sizes
        if self.reader.part_bytes is None and (most or len(self.files) <= FEW_FILES):
            most = most or 1
            room_sizes = replace(part_sizes, first=sys.maxsize, usual=sys.maxsize)
        pieces = Counter(part.path for part in parts)
        groups: list[list[Part]] = []
        room = -1.0
        for part in parts:
            size = sizes[part.path] if pieces[part.path] == 1 else None
            needed = math.inf if size is None else size
            if needed > room or len(groups[-1]) == most:
                groups.append([])
                room = room_sizes.at(offsets[part.path])
            groups[-1].append(part)
            room -= needed
        joined = tuple(replace(first, followers=tuple(rest)) for first, *rest in groups)
        rows = {path: sum(footer.group_rows) for path, footer in self._footers.items()}

        def estimate_bytes(piece: Part) -> float:
            size = sizes[piece.path] or 0
            first, end = piece.position_range or piece.bounds(size)
            if piece.path in rows:
                return size * (end - first) / (rows[piece.path] or 1) if piece.rows else 0.0
            return max(0.0, min(end, size) - first)

        return InputParts(
            joined,
            tuple(sum(map(estimate_bytes, group)) for group in groups),
            schema,
            tuple(self.files),
            part_sizes.usual,
        )

    def _samples(self) -> Iterator[Lines | tuple[Part, Problem]]:
        """Yield samples of JSON lines from all over the input, and problems of bad byte ranges."""
        most, sample_bytes = self.reader.samples, self.reader.sample_bytes
        lines_bytes = sum(file.size_bytes or 0 for file in self._lines)
        range_bytes = max(sample_bytes, -(-lines_bytes // most))
        sizes = PartSizes(range_bytes, range_bytes, lines_bytes)
        pieces = [part for file in self._lines for part in self._byte_ranges(file, sizes)]
        yield from _problems(pieces)
        pieces = [piece for piece in pieces if piece.problem is None and piece.length != 0]
        pieces = pieces if self._reads_lines else []
        last, steps = len(pieces) - 1, max(1, most - 1)
        spread = [round(step * last / steps) for step in range(most)] if pieces else []
        count = total_bytes = 0
        # All other pieces follow, in case those are blank.
        for number in dict.fromkeys([*spread, *range(len(pieces))]):
            piece = pieces[number]
            limit = Limit(line_bytes=sample_bytes) if piece.length is None else None
            if piece.length is not None:
                # The beginning, middle and end of pieces are read in turn.
                start = piece.start + max(0, piece.length - sample_bytes) * (count % 3) // 2
                piece = replace(piece, start=start, length=sample_bytes)
            try:
                options, max_line_bytes = self.reader.storage_options, self.reader.max_line_bytes
                lines = read_lines(piece, options, limit, max_line_bytes)
            except BrokenContentError as err:
                yield pieces[number], Problem(FILE, str(pieces[number]), str(err))
                continue
            if lines.cut:
                yield pieces[number], Problem(FILE, str(pieces[number]), lines.cut)
            if lines.content.strip():
                yield lines
                count += 1
                total_bytes += len(lines.content)
            if count == most or total_bytes > MOST_LINE_BYTES:  # Lines may be very long.
                return

    @functools.cached_property
    def _total_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)

    def _part_sizes(self, schema: InputSchema, total: int) -> PartSizes:
        """Return part sizes, which do not depend on the cluster: a job may continue on another."""
        least = few = FAST_PART_BYTES
        if self.is_slow:
            least = max(SMALLEST_PART_BYTES, COLUMN_BYTES * len(schema.arrow))
            few = min(total // FEW_PARTS, SLOW_PART_BYTES)
        aim = max(total // PARTS_AIMED_AT, least, few)
        usual = self.reader.part_bytes or min(aim, LARGEST_PART_BYTES)
        return PartSizes(usual if self._is_cut_by_user else min(least, usual), usual, total)

    @property
    def _is_cut_by_user(self) -> bool:
        return bool(self.reader.part_bytes or self.reader.files_per_partition)

    def _is_cut_inside(self, path: str) -> bool:
        # Cutting is worth its cost only if a slow stage reads columns.
        is_cut = self.is_slow and bool(self.needed) and not self._is_cut_by_user
        return is_cut and (path in self._footers or compression(path) is not None)

    def _ends_inside(self, path: str, sizes: PartSizes, offset: int, size: int) -> list[int]:
        """Cut row groups or a compressed file of `size` bytes, as `PartSizes.ends` does."""
        usual = size
        if store_type(path).is_near:  # see MOST_SHARES
            whole = size if self._total_bytes <= SHARED_BYTES else sizes.total
            usual = max(sizes.usual, whole // MOST_SHARES)
        return sizes.ends(offset, size, usual)

    @functools.cached_property
    def _indivisible(self) -> set[str]:
        """Paths of JSON lines files that are compressed, or whose store sends no byte ranges."""
        options = self.reader.storage_options
        return {
            file.path
            for file in self._lines
            if compression(file.path)
            or not open_store(file.path, options).delivers_ranges(file.size_bytes)
        }

    def _split_compressed(self, file: InputFile, sizes: PartSizes, offset: int) -> list[Part]:
        part, size = Part(file.path, file_bytes=file.size_bytes), _line_bytes(file) or 0
        bounds = [*pairwise([0, *self._ends_inside(file.path, sizes, offset, size)])]
        if len(bounds) == 1:
            return [part]
        if self._total_bytes <= SHARED_BYTES and store_type(file.path).is_near:
            return [replace(part, share=(*bound, size)) for bound in bounds]
        ranges = [replace(part, start=start, length=end - start) for start, end in bounds]
        # The last range has no end, because the decompressed size is only an estimate.
        return [*ranges[:-1], replace(ranges[-1], length=None)]

    def _byte_ranges(self, file: InputFile, sizes: PartSizes, offset: int = 0) -> list[Part]:
        path, end = file.path, file.size_bytes
        if file.problem:
            return [Part(path, problem=file.problem, file_bytes=end)]
        if end is None or path in self._indivisible:
            return [Part(path, file_bytes=end)]
        parts: list[Part] = []
        start = 0
        while start < end or not parts:
            length = min(sizes.at(offset + start), end - start)
            parts.append(Part(path, start=start, length=length, file_bytes=end))
            start += length
        return parts

    def _input_schema(self, columns: pa.Schema) -> InputSchema:
        paths, reader = [file.path for file in self.files], self.reader
        types = declared_types(paths, reader.storage_options) | dict(reader.types or {})
        by_folders = [
            field.with_type(named_type(field.name, types.get(field.name, str(field.type))))
            for field in folder_schema(paths)
            if field.name not in columns.names
        ]
        schema = pa.schema([*columns, *by_folders])
        if reader.path_field in schema.names:
            raise UnreadableInputError(
                f"path_field={reader.path_field!r} is a column of the input: name another one"
            )
        if self.fields is not None:
            schema = project(schema, self.fields)
        folder_fields = tuple(field.name for field in by_folders if field.name in schema.names)
        if reader.path_field is not None:
            schema = schema.append(pa.field(reader.path_field, pa.string()))
        return InputSchema(
            schema,
            reader.storage_options,
            self.fields is not None,
            folder_fields,
            replaces_surrogates=reader.surrogates == "replace",
            max_line_bytes=reader.max_line_bytes,
            path_field=reader.path_field,
        )

    def _check(self, problems: Iterable[tuple[Part, Problem]], is_all: bool = False) -> None:
        """Raise UnreadableInputError for the first of `problems`, unless tasks will report it.

        If `is_all`, nothing of the input can be read, and the first problem raises in any case.
        """
        if self.on_error == "quarantine" and not is_all:
            return
        for part, problem in problems:
            # Problems of expected files are checked when the files are read.
            if part.path in self.expected and not is_all:
                continue
            if self.on_error != "quarantine":
                raise unreadable(part, problem, self.on_error)
            raise BrokenInputError(f"nothing of the input can be read; {part}: {problem.reason}")


def sampled_schema(
    samples: Sequence[bytes],
    texts: Collection[str] = (),
    known: pa.Schema | None = None,
    kept: Collection[str] | None = None,
) -> pa.Schema:
    """Infer the columns of JSON lines from `samples` of whole lines.

    Columns named in `texts` may hold any JSON, and are text here. Columns of `known` are always in
    the result. If `kept` is given and there are more than 500 columns, columns in less than 1% of
    the lines are left out, unless `kept` or `known` names them.
    """
    counts: Counter[pa.Schema] = Counter()
    for sample in samples:
        for schema, count in line_schemas(sample, texts).items():
            counts[json_schema(schema)] += count
    columns = exact_integers(merged_schema(counts), samples)
    if kept is not None:
        columns = frequent_columns(columns, samples, kept)
    return maps_as_json(common_schema({columns: 1}, known))


def _bad_lines(samples: Iterable[Lines], schema: InputSchema) -> Iterator[tuple[Part, Problem]]:
    for sample in samples:
        for line in sample.parse(schema)[1]:
            yield sample.part, Problem(LINE, str(sample.part), line.reason, line.offset)


def _line_bytes(file: InputFile) -> int | None:
    ratio = COMPRESSION_RATIO if compression(file.path) else 1
    return file.size_bytes and ratio * file.size_bytes


def _problems(parts: Iterable[Part]) -> list[tuple[Part, Problem]]:
    return [(p, Problem(FILE, str(p), p.problem)) for p in parts if p.problem is not None]


def _group_runs(footer: Footer, sizes: PartSizes, offset: int) -> list[tuple[int, ...]]:
    """Join adjacent row groups into runs at least as large as a part; only the last may be smaller.

    Returns the indices of each run's row groups; a file without row groups has one empty run.
    """
    runs: list[tuple[int, ...]] = []
    run: list[int] = []
    size = 0
    for number, group_bytes in enumerate(footer.group_bytes):
        run.append(number)
        size += group_bytes
        if size >= sizes.at(offset):
            runs.append(tuple(run))
            offset += size
            run, size = [], 0
    return [*runs, tuple(run)] if run or not runs else runs


def _misfit(
    file: InputFile, footer: Footer, common: InputSchema, needed: Collection[str]
) -> str | None:
    """Return the reason why a Parquet file does not fit the columns of `common`, or None.

    If it has rows, it must have the columns in `needed` that other files have; it may lack others.
    """
    schema = common.arrow
    known = set(schema.names)
    names = [name for name in footer.schema.names if name in known]
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        return (
            f"several columns are called {', '.join(map(repr, duplicates))}: rename them, or read "
            "others alone (fields=)"
        )
    if not any(footer.group_rows):
        return None
    reason = missing_column(file.path, names, common.file_fields)
    if reason is not None:
        return reason
    absent = [name for name in needed if name in common.file_fields and name not in names]
    if absent:
        return f"it has no column {absent[0]!r}, which is read and which other files have"
    wrong = "; ".join(misfits(footer.schema, schema).values())
    return f"the inputs' columns do not fit together: {wrong}" if wrong else None
