"""What a job's parts are: those of files, or the partitions of a Dask frame."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import dask

from gpuclassify.hub.dataset_files import token_names
from gpuclassify.jobs.execution import compute_tasks, run_tasks
from gpuclassify.jobs.files import (
    InputFile,
    UnreadableInputError,
    check_all_unchanged,
    file_format,
    with_digests,
)
from gpuclassify.jobs.input.parts import InputParts, InputSchema
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.output.records import Record
from gpuclassify.jobs.storage import Directory, open_directory, redacted
from gpuclassify.jobs.task import TaskSpec, read_frame, run_part, run_partition
from gpuclassify.workers.secrets import share_tokens_with_workers


@dataclass(frozen=True)
class FileSource:
    """The parts of files that a reader found."""

    reader: FileReader
    found: InputParts
    has_index = False  # a row's position within its part is no data

    @property
    def storage_options(self) -> dict[str, Any]:
        """For fsspec; `gpuclassify.workers.secrets` knows them as `options_name`."""
        return self.reader.storage_options

    @property
    def options_name(self) -> str:
        """Itself no secret."""
        return f"input {self.reader}"

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.found.parts)

    @property
    def input_schema(self) -> InputSchema | None:
        """What tasks must know to read, without storage options."""
        return replace(self.found.schema, storage_options={})

    def meta(self) -> Any:
        """The empty frame with the dtypes of every part."""
        return self.found.schema.meta()

    def refuse_output(self, directory: Directory, name: str) -> None:
        """Raise ValueError if this job or its next run would read what it writes as `name`."""
        for folder in sorted({posixpath.dirname(file.path) for file in self.found.files}):
            if directory.holds(f"{folder}/file"):
                raise ValueError(
                    f"the input in {redacted(folder)} lies in the output directory {directory}: "
                    "choose an output directory outside the input"
                )
        if any(self._matches(path, directory, name) for path in self.reader.paths):
            raise ValueError(
                f"the output directory {directory} lies in the input, which would grow by it: "
                "choose an output directory outside the input"
            )

    def _matches(self, path: str, directory: Directory, name: str) -> bool:
        """Whether one of the reader's paths matches the file `name` of a directory."""
        from fsspec.utils import glob_translate

        place = open_directory(path, self.storage_options)
        are_local = place.is_local and directory.is_local
        if not are_local and place.filesystem != directory.filesystem:
            return False
        for resolve in (str, os.path.realpath) if are_local else (str,):
            root, written = resolve(place.root), f"{resolve(directory.root)}/{name}"
            if written.startswith(f"{root}/") or re.match(glob_translate(root), written):
                return True
        return False

    @functools.cached_property
    def files(self) -> Sequence[InputFile]:
        """The files, with digests of what they hold if the reader wants them; a plan does not."""
        found = self.found.files
        return with_digests(found, self.storage_options) if self.reader.input_digest else found

    def identity(self) -> dict[str, dict[str, Any]]:
        """What the input is; a job whose input differs is another job."""
        found = self.found
        return {
            "input": {
                "format": file_format(found.files[0].path),
                "columns": ", ".join(f"{field.name} {field.type}" for field in found.schema.arrow),
                "is_projected": found.schema.is_projected,
                "part_bytes": found.part_bytes,
                "parts": self.count,
            },
            "input file": {
                redacted(file.path): f"{file.size_bytes} bytes, {file.version}"
                for file in self.files
            },
        }

    def frame(self, spec: TaskSpec) -> Any:
        """A lazy frame whose partitions are the parts, read as tasks with this spec read them."""
        import dask.dataframe as dd

        share_tokens_with_workers(token_names(self.reader.paths))
        files = {file.path: file for file in self.files}
        parts = self.found.parts
        return dd.from_map(
            read_frame,
            parts,
            [files[part.path] for part in parts],
            packed=spec.pack(),
            meta=self.meta(),
            label="read",
        )

    def check_unchanged(self) -> None:
        """Raise ChangedInputError unless all files are what they were when the job began."""
        reader = self.reader
        check_all_unchanged(self.files, reader.paths, reader.storage_options)

    def run(
        self, client: Any, todo: Sequence[int], names: Sequence[str], spec: TaskSpec
    ) -> Iterator[Record]:
        """Records of the parts with the numbers `todo`, as they are done."""
        share_tokens_with_workers(token_names(self.reader.paths))
        packed = spec.pack()
        files = {file.path: file for file in self.files}
        parts = self.found.parts
        calls = ((parts[n], names[n], packed, files[parts[n].path]) for n in todo)
        return run_tasks(client, run_part, calls)


class FrameSource:
    """The partitions of a Dask frame.

    Optimised once, because optimising moves partitions; with an `identity`, where its key may be
    another one the next time, it is not: its partitions stay as many as they are.
    """

    has_index = True
    input_schema = None
    options_name = ""
    storage_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, frame: Any, identity: dict[str, dict[str, Any]] | None = None) -> None:
        self._frame = frame.optimize() if identity is None else frame.simplify()
        self._identity = identity

    @property
    def count(self) -> int:
        """Number of partitions."""
        return self._frame.npartitions

    def meta(self) -> Any:
        """The frame's meta."""
        return self._frame._meta

    def refuse_output(self, directory: Directory, name: str) -> None:
        """Nothing: what a frame was made from is not known here."""

    def identity(self) -> dict[str, dict[str, Any]]:
        """As given, or the frame's key, which Dask makes of all that the frame consists of."""
        if self._identity is not None:
            return self._identity
        return {"input": {"Dask key": self._frame._name, "partitions": self.count}}

    def frame(self, spec: TaskSpec) -> Any:
        """The frame."""
        return self._frame

    def check_unchanged(self) -> None:
        """Nothing: what a frame was made from is not known here."""

    def run(
        self, client: Any, todo: Sequence[int], names: Sequence[str], spec: TaskSpec
    ) -> Iterator[Record]:
        """Records of the partitions with the numbers `todo`, as they are done."""
        partitions = self._frame.to_delayed(optimize_graph=False)
        run = dask.delayed(run_partition, pure=False)
        packed = spec.pack()
        tasks = [run(partitions[number], number, names[number], packed) for number in todo]
        return compute_tasks(client, tasks)


Source = FileSource | FrameSource


def as_source(reader: Any, on_error: str, needed: Collection[str] = ()) -> Source:
    """The source that a pipeline's first stage stands for; `needed` are columns that it reads.

    Raises TypeError if it is neither a reader nor a Dask frame, and UnreadableInputError as
    `FileReader.find_parts` does, or if nothing is in the files.
    """
    if isinstance(reader, FileReader):
        source = FileSource(reader, reader.find_parts(on_error, needed))
        if not len(source.meta().columns):
            raise UnreadableInputError(
                "the input has neither rows nor columns: its files are empty, or hold no line of "
                "JSON that can be read"
            )
        return source
    if dask.is_dask_collection(reader):
        import dask.dataframe as dd

        if isinstance(reader, dd.DataFrame):
            return FrameSource(reader)
    raise TypeError(
        f"a job begins with a {type(reader).__qualname__}: its first stage must be a "
        'JsonlReader("books/*.jsonl"), a ParquetReader("books/") or a Dask DataFrame'
    )
