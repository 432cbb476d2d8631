"""Parquet and JSONL files, in parts that are planned here: for a job, or as a lazy Dask frame.

A part is a run of row groups of one Parquet file or a byte range of one JSONL file, so that a large
file is several tasks. All parts have the same dtypes, which are read from the files beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gpuclassify.checks import check_count
from gpuclassify.hub import share_tokens_with_workers
from gpuclassify.jobs.files import JSONL, PARQUET, UnreadableInputError, file_format, redacted
from gpuclassify.jobs.hub.files import keep_tokens, token_names
from gpuclassify.jobs.parts import Source, read_part
from gpuclassify.jobs.planning import plan_source

if TYPE_CHECKING:
    import dask.dataframe as dd


class FileReader:
    """Files as the input of a `gpuclassify.jobs.pipeline.Pipeline`; the format is told by names.

    Parameters
    ----------
    paths : str or iterable of str
        Files, directories, globs or fsspec URLs (``s3://``, ``gs://``, ``memory://``, and
        ``hf://datasets/OWNER/NAME[@REVISION]/...``, which is read at the commit that the revision
        stands for when the job is planned).
    fields : sequence of str, optional
        Columns to read. Default: all.
    part_bytes : int, optional
        Bytes of a part. Default: a two-hundredth of all input, between 256 KiB and 64 MiB.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message. A Hub token is kept in memory
        alone, and not in the reader.
    """

    file_format: ClassVar[str | None] = None

    def __init__(
        self,
        paths: str | Iterable[str],
        *,
        fields: Sequence[str] | None = None,
        part_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        check_count("part_bytes", part_bytes)
        self.paths = [paths] if isinstance(paths, str) else [str(path) for path in paths]
        self.fields = None if fields is None else tuple(dict.fromkeys(fields))
        self.part_bytes = part_bytes
        self.storage_options = keep_tokens(self.paths, storage_options or {})

    def __repr__(self) -> str:
        shown = [f"{[redacted(path) for path in self.paths]}"]
        for name in ("fields", "part_bytes"):
            if getattr(self, name) is not None:
                shown.append(f"{name}={getattr(self, name)!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def plan(self, on_error: str = "raise") -> Source:
        """Find the files, their columns and their parts.

        Raises
        ------
        UnreadableInputError
            Nothing matches, formats are mixed, a column is not there, or, unless `on_error` is
            "quarantine", a file is broken.
        """
        source = plan_source(
            self.paths,
            fields=self.fields,
            part_bytes=self.part_bytes,
            storage_options=self.storage_options,
            on_error=on_error,
        )
        wrong = [f.path for f in source.files if file_format(f.path) != self.file_format]
        if self.file_format is not None and wrong:
            raise UnreadableInputError(
                f"{type(self).__name__} got {redacted(wrong[0])}: give it names of "
                f"{self.file_format} files, or take FileReader, which goes by names"
            )
        return source


class JsonlReader(FileReader):
    """JSON lines, plain or compressed (.gz, .zst, .bz2; a compressed file is one part)."""

    file_format = JSONL


class ParquetReader(FileReader):
    """Parquet files."""

    file_format = PARQUET


def read_files(
    inputs: Iterable[str],
    *,
    fields: Sequence[str] | None = None,
    part_bytes: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dd.DataFrame:
    """A lazy frame of all `inputs`, one partition a part.

    Parameters
    ----------
    inputs : iterable of str
        Files, directories, globs or fsspec URLs; Parquet or JSON lines (also .gz, .zst, .bz2),
        not both.
    fields : sequence of str, optional
        Columns to read. Default: all.
    part_bytes : int, optional
        Bytes of a part. Default: a two-hundredth of all input, between 256 KiB and 64 MiB.
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

    inputs = [str(path) for path in inputs]
    options = keep_tokens(inputs, storage_options or {})
    source = plan_source(inputs, fields=fields, part_bytes=part_bytes, storage_options=options)
    share_tokens_with_workers(token_names(inputs))
    return dd.from_map(
        read_part, source.parts, form=source.form, meta=source.form.meta(), label="read"
    )
