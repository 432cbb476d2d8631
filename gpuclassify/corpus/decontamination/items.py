"""Read test items from files or a frame, as a table that an index is built from."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpuclassify.frames import backend_of, to_pandas
from gpuclassify.jobs.input.files import InputFile, find_files
from gpuclassify.jobs.input.parts import read_part
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.partition_map import is_dask_frame
from gpuclassify.settings.checks import nearest
from gpuclassify.settings.signatures import short

ITEM = pa.schema([(name, pa.large_string()) for name in ("source", "id", "text")])
ROW_ID = "id"  # default id column, used if it exists


@dataclass(frozen=True)
class Fields:
    """Names of the columns with texts and ids of test items.

    With `are_joined`, the texts of a row make one item; else each text is an item. If `row_id` is
    None, the column of ids is ``id``, or rows are numbered if there is no such column.
    """

    texts: tuple[str, ...]
    are_joined: bool
    row_id: str | None

    def find_columns(self, columns: Sequence[str], source: str) -> tuple[list[str], str | None]:
        """Return the text columns among `columns`, and the id column, or None without ids.

        Raises ValueError if all text columns, or the column `row_id`, are missing. `source` names
        the file or frame in the message.
        """
        texts = [name for name in self.texts if name in columns]
        if not texts:
            raise ValueError(
                f"{source} has none of the columns {list(self.texts)}; its columns are "
                f"{list(columns)}.{nearest(self.texts[0], map(str, columns))} Pass against_field="
            )
        if self.row_id is not None and self.row_id not in columns:
            near = nearest(self.row_id, map(str, columns))
            raise ValueError(f"{source} has no column of ids {self.row_id!r}.{near}")
        row_id = self.row_id or (ROW_ID if ROW_ID in columns and ROW_ID not in texts else None)
        return texts, row_id

    def items(self, frame: Any, source: str, first_row: int = 0) -> pa.Table:
        """Return the test items in a pandas frame: one per row if joined, else one per text.

        The table has ``source`` (the same for all), ``id`` and ``text``, null for a null text.
        Joined texts are separated by newlines. Without an id column, the id is the row's number,
        counted from `first_row`. With several items per row, the id is followed by "/" and the
        column's name.
        """
        names, row_id = self.find_columns([*frame.columns], source)
        backend = backend_of(frame)
        for name in names:
            backend.check_text_column(frame, name)
        texts = [backend.text_array(frame, name).to_pylist() for name in names]
        rows = (
            [str(first_row + row) for row in range(len(frame))]
            if row_id is None
            else [str(value) for value in frame[row_id].tolist()]
        )
        if self.are_joined:
            texts = [["\n".join(filter(None, row)) or None for row in zip(*texts, strict=True)]]
        suffixes = [f"/{name}" for name in names] if len(texts) > 1 else [""]
        ids = [f"{row}{suffix}" for row in rows for suffix in suffixes]
        row_wise = [text for row in zip(*texts, strict=True) for text in row]
        return pa.table([[source] * len(ids), ids, row_wise], schema=ITEM)


@dataclass(frozen=True)
class ItemFiles:
    """Files of test items, Parquet or JSON lines; each file is a benchmark.

    `paths` are paths, URLs or glob patterns.
    """

    paths: tuple[str, ...]

    def __repr__(self) -> str:
        return repr([redacted(path) for path in self.paths])

    def identity(self) -> dict[str, str]:
        """Return each file's size and version as text, by path, used to detect changed items."""
        return {
            redacted(file.path): f"{file.size_bytes} bytes, {file.version}"
            for file in self._files()
        }

    def _files(self) -> list[InputFile]:
        files = {file.path: file for path in self.paths for file in find_files([path], {})}
        return [*files.values()]

    def tables(self, fields: Fields) -> Iterator[pa.Table]:
        """Yield tables of the test items in the files, with ``source``, ``id`` and ``text``.

        The source is the file's name, or its path if several files have the same name.
        """
        for path, source, texts, row_id in self._columns(fields):
            columns = [*texts, *([] if row_id is None else [row_id])]
            plan, row = FileReader([path], fields=columns).find_parts("whole"), 0
            for part in plan.parts:
                frame = read_part(part, plan.schema)
                yield fields.items(frame, source, row)
                row += len(frame)

    def check(self, fields: Fields) -> None:
        """Raise an error unless all files exist, and have the columns that `fields` needs."""
        for _ in self._columns(fields):
            pass

    def _columns(self, fields: Fields) -> Iterator[tuple[str, str, list[str], str | None]]:
        """Yield each file's path, benchmark name, text columns, and id column or None."""
        paths = [file.path for file in self._files()]
        names = [posixpath.basename(redacted(path)) for path in paths]
        for path, name in zip(paths, names, strict=True):
            columns = FileReader([path]).find_parts("whole").schema.arrow.names
            source = name if names.count(name) == 1 else redacted(path)
            yield (path, source, *fields.find_columns(columns, redacted(path)))


@dataclass(frozen=True, eq=False)
class ItemFrame:
    """Test items in a pandas frame, with its SHA-256 and number of rows.

    Objects with equal digests are equal. `frame` is None in a copy sent to workers, which read the
    items from a saved index instead.
    """

    digest: str
    rows: int
    frame: Any

    @classmethod
    def of(cls, frame: Any) -> ItemFrame:
        """Make an `ItemFrame` from a pandas or cudf frame; raise TypeError for a Dask frame."""
        import pandas as pd

        if is_dask_frame(frame):
            raise TypeError("against= got a Dask frame: pass ddf.compute(), or the files of items")
        plain = to_pandas(frame)
        hashes = pd.util.hash_pandas_object(plain.astype(str), index=False).to_numpy()
        content = repr([*map(str, plain.columns)]).encode() + hashes.tobytes()
        return cls(hashlib.sha256(content).hexdigest(), len(plain), plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ItemFrame) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<frame of {self.rows:,} items>"

    def check(self, fields: Fields) -> None:
        """Raise ValueError unless the frame has the columns that `fields` needs."""
        fields.find_columns([*self.frame.columns], "the frame of items")

    def identity(self) -> dict[str, str]:
        """Return the SHA-256 of columns and rows as ``{"frame": digest}``, to detect changes."""
        return {"frame": self.digest}

    def tables(self, fields: Fields) -> Iterator[pa.Table]:
        """Yield a single table of the frame's test items, whose ``source`` is "frame"."""
        yield fields.items(self.frame, "frame")


def read_items(against: ItemFiles | ItemFrame, fields: Fields) -> pa.Table:
    """Return all test items, at least one, in one table with ``source``, ``id`` and ``text``."""
    table = pa.concat_tables([ITEM.empty_table(), *against.tables(fields)])
    if not len(table):
        raise UnreadableInputError(f"against={against!r} has no items: its files are empty")
    return table


def as_items(against: Any) -> ItemFiles | ItemFrame:
    """Convert the setting `against` (paths or a frame) to files or a frame of test items.

    The folder of a saved index also becomes `ItemFiles`. Files are not opened.
    """
    if isinstance(against, ItemFiles | ItemFrame):
        return against
    if hasattr(against, "columns"):
        return ItemFrame.of(against)
    paths = [against] if isinstance(against, str | os.PathLike) else against
    if not isinstance(paths, list | tuple) or not paths:
        raise TypeError(
            f"against={short(against)} is a {type(against).__name__}: pass files of test items, "
            "such as 'evals/*.jsonl', a frame, or the folder of an index"
        )
    if not all(isinstance(path, str | os.PathLike) and os.fspath(path) for path in paths):
        raise TypeError(f"against={short(against)} holds what is no path: pass texts, such as 'a'")
    return ItemFiles(tuple(os.fspath(path) for path in paths))
