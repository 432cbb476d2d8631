"""Frames as Arrow tables, and tables as the bytes of files that every reader takes."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.files import COMPRESSIONS, PARQUET

JSON_ROWS_AT_A_TIME = 1_000
BLOCK_BYTES = 1 << 20  # of lines that are counted at a time


@dataclass(frozen=True)
class Encoding:
    """How a part's rows become the bytes of a file.

    Attributes
    ----------
    file_format : {"parquet", "jsonl"}
    compression : str, optional
    partition_by : tuple of str
        Columns whose values become names of folders; see `gpuclassify.jobs.output.folders`.
    """

    file_format: str
    compression: str | None
    partition_by: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """What names of part files end with."""
        if self.file_format == PARQUET or self.compression is None:
            return f".{self.file_format}"
        shown = next(key for key, value in COMPRESSIONS.items() if value == self.compression)
        return f".{self.file_format}{shown}"

    def encode(self, table: pa.Table) -> bytes:
        """The content of a file."""
        sink = pa.BufferOutputStream()
        if self.file_format == PARQUET:
            pq.write_table(table, sink, compression=self.compression)
        elif self.compression is None:
            _write_json_lines(table, sink)
        else:
            with pa.CompressedOutputStream(sink, self.compression) as stream:
                _write_json_lines(table, stream)
        return sink.getvalue().to_pybytes()

    def check_rows(self, files: Iterable[bytes], rows: int) -> None:
        """Raise RuntimeError unless files with these contents have so many rows together."""
        held = sum(map(self._count_rows, files))
        if held != rows:
            raise RuntimeError(
                f"{rows:,} rows became files of {held:,} rows: nothing is published. This is a "
                "defect of gpuclassify or of Arrow; please report it with the columns' types"
            )

    def _count_rows(self, content: bytes) -> int:
        source = pa.BufferReader(content)
        if self.file_format == PARQUET:
            return pq.read_metadata(source).num_rows
        stream = (
            source
            if self.compression is None
            else pa.CompressedInputStream(source, self.compression)
        )
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(BLOCK_BYTES), b""))


def arrow_table(frame: Any, keep_index: bool | None = None) -> pa.Table:
    """An Arrow table of a plain pandas or cudf frame, with metadata that plain readers take."""
    import pandas as pd

    if isinstance(frame, pd.DataFrame):
        table = pa.Table.from_pandas(frame, preserve_index=keep_index)
    else:
        table = frame.to_arrow(preserve_index=keep_index)
    return table.replace_schema_metadata(_plain_metadata(table.schema.metadata))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the column types that all parts have.

    A type that is unknown beforehand, of object columns without rows, stays as it is.

    Raises
    ------
    TypeError
        Columns have other names, or values that the types of `schema` cannot hold.
    """
    if table.column_names != schema.names:
        raise TypeError(
            f"the stages returned columns {table.column_names}, and {schema.names} for a frame "
            "without rows: they must be the same for every part"
        )
    wanted = [
        found if pa.types.is_null(field.type) else field.with_nullable(True)
        for field, found in zip(schema, table.schema, strict=True)
    ]
    try:
        return table.cast(pa.schema(wanted, metadata=table.schema.metadata))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
        raise TypeError(f"a column has another type than a frame without rows has: {err}") from err


def _plain_metadata(metadata: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Metadata without dtypes such as ``list<item: float>[pyarrow]``, which pandas cannot parse."""
    declared = json.loads(metadata[b"pandas"])
    for column in declared["columns"]:
        if "<" in str(column["numpy_type"]):
            column["numpy_type"] = "object"
    return {**metadata, b"pandas": json.dumps(declared).encode()}


def _write_json_lines(table: pa.Table, file: Any) -> None:
    """One JSON object a row; null for NaN and infinities, base64 for bytes."""
    for batch in table.to_batches(max_chunksize=JSON_ROWS_AT_A_TIME):
        for record in batch.to_pylist():
            try:
                line = _dump(record)
            except ValueError:
                line = _dump(_finite(record))
            file.write(line.encode("utf-8", "replace") + b"\n")


def _dump(record: dict[str, Any]) -> str:
    """One line of JSON; ValueError if a number is not finite, which JSON cannot express."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_text_of)


def _text_of(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    """The value with null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
