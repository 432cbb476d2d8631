"""Pipelines by the arguments of NeMo Curator 1.x, and the executors that its scripts make."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from gpuclassify import jobs
from gpuclassify.curator.stages import ModelStage, TokenizerStage
from gpuclassify.jobs.input import readers
from gpuclassify.jobs.output import writers
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.settings.old_spellings import modern_spellings


class Executor:
    """What runs a pipeline in NeMo Curator; here its settings have no effect.

    Raises
    ------
    TypeError
        ``ignore_failures``, which would change the result.
    """

    def __init__(
        self, config: dict[str, Any] | None = None, ignore_head_node: bool = False
    ) -> None:
        self.config = dict(config or {})
        if self.config.get("ignore_failures"):
            raise TypeError(
                f"{type(self).__qualname__}: ignore_failures=True is Pipeline(name, "
                'on_error="quarantine"), which keeps what fails with its reason'
            )


class XennaExecutor(Executor):
    """Stands for Curator's executor on Cosmos-Xenna."""


class RayDataExecutor(Executor):
    """Stands for Curator's executor on Ray Data."""


class RayActorPoolExecutor(Executor):
    """Stands for Curator's executor on Ray actors."""


class Pipeline(jobs.pipeline.Pipeline):
    """A `gpuclassify.Pipeline` that has a name.

    Parameters
    ----------
    name : str
    description : str, optional
    stages : iterable, optional
        As of `gpuclassify.Pipeline`, and `TokenizerStage` with the `ModelStage` that follows it.
    config : dict, optional
        Settings of executors, without effect.
    **options
        ``backend`` and ``on_error`` of `gpuclassify.Pipeline`.
    """

    def __init__(
        self,
        name: str,
        description: str | None = None,
        stages: Iterable[Any] | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.name = name
        self.description = description
        self.config = dict(config or {})
        for stage in stages or ():
            self.add_stage(stage)

    def add_stage(self, stage: Any) -> Pipeline:
        """Append a stage, and return the pipeline."""
        if isinstance(stage, ModelStage):
            has_tokenizer = bool(self.stages) and isinstance(self.stages[-1], TokenizerStage)
            stage = stage.as_mapper(self.stages.pop() if has_tokenizer else None)
        super().add_stage(stage)
        return self

    def run(  # type: ignore[override]  # Curator's arguments come first
        self,
        executor: Any = None,
        initial_tasks: None = None,
        checkpoint_path: Any = None,
        **options: Any,
    ) -> JobSummary:
        """Run the job, or continue it, by the `options` of `gpuclassify.Pipeline.run`.

        It runs on a cluster where `executor` is its client, and else in this process.
        """
        if initial_tasks is not None:
            raise TypeError("a Pipeline begins with its reader: pass no initial_tasks")
        if checkpoint_path is not None:
            _warn(f"checkpoint_path={str(checkpoint_path)!r}", "the output knows what is done")
        if isinstance(executor, Executor):
            settings = self.config | executor.config
            if settings:
                cure = "run(get_client()) runs the job on a cluster, and run() in this process"
                _warn(f"{type(executor).__qualname__}'s {settings}", cure)
            executor = None
        return super().run(executor, **options)


def _warn(given: str, reason: str) -> None:
    warnings.warn(f"Pipeline: {given} has no effect: {reason}", UserWarning, stacklevel=3)


class JsonlReader(readers.JsonlReader):
    """`gpuclassify.JsonlReader` by its own arguments or Curator's.

    These are ``fields``, ``blocksize`` and ``read_kwargs={"storage_options": ...}``;
    ``files_per_partition`` has no effect, and what would change the result is a TypeError.
    """

    def __init__(self, file_paths: str | list[str], **arguments: Any) -> None:
        super().__init__(**_modern(self, "reader", file_paths=file_paths, **arguments))


class ParquetReader(readers.ParquetReader):
    """`gpuclassify.ParquetReader` by its own arguments or Curator's; see `JsonlReader`."""

    def __init__(self, file_paths: str | list[str], **arguments: Any) -> None:
        super().__init__(**_modern(self, "reader", file_paths=file_paths, **arguments))


class JsonlWriter(writers.JsonlWriter):
    """`gpuclassify.JsonlWriter` by its own arguments or Curator's.

    These are ``write_kwargs={"storage_options": ...}``; what would change the result is a
    TypeError.
    """

    def __init__(self, path: str, **arguments: Any) -> None:
        super().__init__(**_modern(self, "writer", path=path, **arguments))


class ParquetWriter(writers.ParquetWriter):
    """`gpuclassify.ParquetWriter` by its own arguments or Curator's; see `JsonlWriter`."""

    def __init__(self, path: str, **arguments: Any) -> None:
        super().__init__(**_modern(self, "writer", path=path, **arguments))


def _modern(owner: Any, family: str, **arguments: Any) -> dict[str, Any]:
    return modern_spellings(type(owner).__qualname__, family, arguments)
