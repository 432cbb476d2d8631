"""Counterparts of NeMo Curator 1.x: pipelines, executors, readers, writers and custom stages."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.frames import Frame
from gpuclassify.jobs import pipeline
from gpuclassify.jobs.input import readers
from gpuclassify.jobs.output import writers
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.mapping.columns import DeclaredColumns, check_column_types
from gpuclassify.mapping.heads import Columns, Head
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import EncoderRunner, Runner
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import OwnModule
from gpuclassify.settings.checks import check_choice, check_ordered, warn_once
from gpuclassify.settings.old_spellings import modern_spellings
from gpuclassify.settings.options import ModelOptions

if TYPE_CHECKING:
    from torch import nn

    from gpuclassify.jobs.stores.store import Store

WorkerMetadata = Any  # imported by scripts for annotations


class XennaExecutor:
    """Stand-in for each of Curator's executors, whose settings are ignored.

    `Pipeline.run` warns about settings in `config`. Only a true ``ignore_failures`` in it raises
    TypeError, with a message that names its counterpart.
    """

    def __init__(self, config: dict[str, Any] | None = None, **_options: object) -> None:
        self.config = dict(config or {})
        if self.config.get("ignore_failures"):
            raise TypeError(
                'ignore_failures=True is Pipeline(name, on_error="quarantine"), which keeps what '
                "fails with its reason"
            )


RayDataExecutor = RayActorPoolExecutor = XennaExecutor


class Pipeline(pipeline.Pipeline):
    """`gpuclassify.Pipeline` with a name and Curator's arguments.

    Parameters
    ----------
    name : str
    description : str, optional
        Like `name`, kept as an attribute, without effect on the job.
    stages : iterable, optional
        Stages of a `gpuclassify.Pipeline`. There may also be a `ModelStage`, alone or directly
        after a `TokenizerStage`.
    config : dict, optional
        Settings of executors; ignored.
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
        vars(self).update(name=name, description=description, config=dict(config or {}))
        check_ordered("stages", stages)
        for stage in stages or ():
            self.add_stage(stage)

    name: str
    description: str | None
    config: dict[str, Any]

    def add_stage(self, stage: object) -> Pipeline:
        """Append a stage of this package or a custom `ModelStage`, and return this pipeline.

        A `TokenizerStage` directly before a `ModelStage` is replaced by one stage that does both.
        Raises ValueError, and leaves the stages unchanged, if the two do not fit each other.
        """
        if isinstance(stage, ModelStage):
            has_tokenizer = bool(self.stages) and isinstance(self.stages[-1], TokenizerStage)
            stage = stage.as_mapper(self.stages[-1] if has_tokenizer else None)
            if has_tokenizer:
                self.stages.pop()
        super().add_stage(stage)
        return self

    def run(  # type: ignore[override]  # Curator's arguments come first
        self,
        executor: object = None,
        initial_tasks: None = None,
        checkpoint_path: object = None,
        **options: Any,
    ) -> Results:
        """Run the job, or continue it, with the `options` of `gpuclassify.Pipeline.run`.

        The job runs on `executor` if it is a Dask client. For None or an executor of Curator, it
        runs on the current client, or in this process if there is no client. A last stage that is
        a writer with ``mode="overwrite"`` starts the job over. `checkpoint_path` is ignored with a
        warning, because the output records the parts that are done; `initial_tasks` other than None
        raises TypeError.
        """
        if initial_tasks is not None:
            raise TypeError("a Pipeline begins with its reader: pass no initial_tasks")
        if checkpoint_path is not None:
            argument = f"checkpoint_path={str(checkpoint_path)!r}"
            warn_once(f"Pipeline: {argument} has no effect: the output records what is done")
        if isinstance(executor, XennaExecutor):
            settings = self.config | executor.config
            if settings:
                warn_once(f"Pipeline: the executor's {settings} has no effect: use get_client()")
            executor = None
        if self.stages and getattr(self.stages[-1], "mode", None) == "overwrite":
            options = {"restart": True} | options
        summary = super().run(current_client() if executor is None else executor, **options)
        return Results(**vars(summary))


class Results(JobSummary):
    """Summary of a finished job, also a sequence of its output files.

    ``results[n].data`` is a list with the name of file number n, from 0, as its only element.
    """

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(data=[self.files[index]])


def current_client() -> Any:
    """Return Dask's default client, the latest one of this process, or None without a client."""
    distributed = sys.modules.get("distributed")
    with contextlib.suppress(ValueError):  # no client
        return distributed and distributed.default_client()
    return None


class _CuratorArguments:
    family = "reader"  # family of older spellings

    def __init__(self, *path: Any, **arguments: Any) -> None:
        settings = modern_spellings(type(self).__qualname__, self.family, arguments)
        super().__init__(*path, **settings)


class JsonlReader(_CuratorArguments, readers.JsonlReader):
    """Counterpart of `gpuclassify.JsonlReader` that also accepts Curator's arguments.

    These are ``file_paths``, ``fields``, ``blocksize``, ``files_per_partition`` and
    ``read_kwargs={"storage_options": ...}``. Others that would change the result raise TypeError.
    """


class ParquetReader(_CuratorArguments, readers.ParquetReader):
    """Counterpart of `gpuclassify.ParquetReader`; for arguments see `JsonlReader`."""


class _CuratorWriter(_CuratorArguments):
    family = "writer"
    if TYPE_CHECKING:
        directory: Store

    def __init__(self, *path: Any, mode: str = "ignore", **arguments: Any) -> None:
        check_choice("mode", mode, ("ignore", "overwrite", "error"))
        super().__init__(*path, **{"output_bytes": 0} | arguments)  # a file for each partition
        self.mode = mode
        if mode == "error" and self.directory.has(""):
            raise FileExistsError(
                f'{self.directory} exists, and mode="error" refuses it: name another directory, or '
                'pass mode="ignore" to continue its job or mode="overwrite" to start over'
            )


class JsonlWriter(_CuratorWriter, writers.JsonlWriter):
    """`gpuclassify.JsonlWriter` that also accepts Curator's arguments.

    It writes a file for each partition. Curator's arguments are ``path``, ``mode`` and
    ``write_kwargs={"storage_options": ...}``. Mode "ignore", the default, continues a job;
    "overwrite" starts over in every run of the pipeline: when the run begins, the files that
    earlier jobs wrote are removed, and no others; "error" raises FileExistsError if the directory
    exists when the writer is made.
    """


class ParquetWriter(_CuratorWriter, writers.ParquetWriter):
    """`gpuclassify.ParquetWriter` that also accepts Curator's arguments, as `JsonlWriter` does."""


class LoadedByUser(TextMapper[ModelOptions]):
    """Mapper that runs a torch module loaded by code of the user's object `source`."""

    new_tokenizer: Callable[[], Any] | None = None  # None for the tokenizer in the model's files

    def __init__(self, source: Any, **options: Any) -> None:
        super().__init__(**options)
        self.source = source

    @property
    def __name__(self) -> str:
        """Name of the user's class, on Dask's dashboard and in messages."""
        return type(self.source).__qualname__

    @abstractmethod
    def load(self, config: dict[str, Any]) -> nn.Module:
        """Return the torch module with its weights, on any device; `config` is ``config.json``."""

    @functools.cached_property
    def model(self) -> PinnedModel:
        """Model named by the option ``model``, pinned; network and columns come from user code."""
        return PinnedModel(self.options, has_own_module=True, has_own_columns=True)

    def make_runner(self) -> Runner:
        """Return the object that tokenizes texts, and runs the user's module on batches of them."""
        module = OwnModule(self.load, self._definition, True, self.new_tokenizer)
        return EncoderRunner(self.options, self.model, module)


@dataclass(frozen=True)
class TokenizerStage:
    """Settings of the tokenizer for the `ModelStage` after it; tokens never become columns.

    `model_identifier` is a Hub name or directory, with `hf_token` as the Hub's token for it. Texts
    are in the column `text_field`, and cut to `max_chars` and `max_seq_length`. `padding_side` must
    be the same as that of the `ModelStage`, which also has its own `cache_dir`; the one here is
    ignored. `sort_by_length` and `unk_token` do not change results. `transformers_init_kwargs`
    raises TypeError.
    """

    model_identifier: str
    cache_dir: str | None = None
    hf_token: InitVar[str | None] = None
    text_field: str = "text"
    max_chars: int | None = None
    max_seq_length: int | None = None
    padding_side: str = "right"
    sort_by_length: bool = True
    unk_token: bool = False
    transformers_init_kwargs: dict[str, Any] | None = None

    def __post_init__(self, hf_token: str | None) -> None:
        if self.transformers_init_kwargs:
            raise TypeError(
                f"TokenizerStage: transformers_init_kwargs={self.transformers_init_kwargs} are not "
                "supported: save the tokenizer as it shall be, and name its directory"
            )
        if hf_token is not None:
            hub.remember_token(self.model_identifier, hf_token)


@dataclass(eq=False)
class ModelStage(ABC):
    """Base class for a custom model, in the form of NeMo Curator 1.x.

    A subclass's ``setup`` (or ``_setup``) loads ``self.model``, whose result is, or has as
    ``logits``, outputs (texts, outputs). ``process_model_output``, ``collect_outputs`` and
    ``create_output_dataframe`` make the columns named by ``outputs``, for all texts at once.
    Batches are sized by memory, up to `model_inference_batch_size`.

    Types of the columns are declared as ``new_columns``, or found by calling these methods with
    zeros. `gpuclassify.ModelMapper` is a shorter way to write the same.

    Parameters
    ----------
    model_identifier : str
        Hub name or directory. During ``setup``, the directory of the downloaded files.
    cache_dir, hf_token : str, optional
        Folder of the Hub's cache, and the Hub's token for this model.
    model_inference_batch_size : int
        Maximum number of texts in a batch.
    has_seq_order : bool
        Sort by length; rows keep their order.
    padding_side : {"left", "right"}
        Side of a text where tokens of padding are added.
    max_seq_length : int, optional
        Maximum number of tokens of a text. The tokenizer stage's counts if it is smaller.
    unpack_inference_batch : bool
        Pass tensors to the model as keyword arguments instead of in one dict.
    autocast : bool
        Use float16 or bfloat16 on GPUs; False: float32.
    """

    new_columns: ClassVar[Mapping[str, str]] = {}

    model_identifier: str
    cache_dir: str | None = None
    hf_token: InitVar[str | None] = None
    model_inference_batch_size: int = 256
    has_seq_order: bool = True
    padding_side: str = "right"
    max_seq_length: int | None = None
    unpack_inference_batch: bool = False
    autocast: bool = True

    def __post_init__(self, hf_token: str | None) -> None:
        if hf_token is not None:
            hub.remember_token(self.model_identifier, hf_token)

    @abstractmethod
    def outputs(self) -> tuple[list[str], list[str]]:
        """Return the list ``["data"]``, and a list of the names of the new columns."""

    def setup(self, _worker: WorkerMetadata | None = None) -> None:
        """Load the torch module, and set ``self.model`` to it; `_worker` is not used."""
        self._setup(local_files_only=True)

    def _setup(self, local_files_only: bool = True) -> None:
        raise NotImplementedError(f"{type(self).__qualname__} has no setup(): write it")

    @abstractmethod
    def process_model_output(
        self, outputs: Any, model_input_batch: object = None
    ) -> dict[str, Any]:
        """Convert the model's outputs to arrays by name, with one value per text.

        `outputs` is a float32 tensor (texts, outputs), which is also its own attribute ``logits``.
        `model_input_batch` is None.
        """

    def collect_outputs(self, processed_outputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the arrays of all batches, concatenated by name.

        `processed_outputs` has a dict of arrays by name for each batch.
        """
        names = processed_outputs[0]
        return {name: np.concatenate([part[name] for part in processed_outputs]) for name in names}

    @abstractmethod
    def create_output_dataframe(self, df_cpu: Frame, collected_output: dict[str, Any]) -> Any:
        """Return the pandas frame `df_cpu` with the new columns added.

        They are made from `collected_output`, the arrays of all batches by name. `df_cpu` has a row
        per text, but not the input's columns: only ``input_ids`` and ``attention_mask``, with None
        in all rows.
        """

    def as_mapper(self, tokenizer: TokenizerStage | None = None) -> StageMapper:
        """Return a mapper that runs this stage with the settings of the tokenizer stage, if any.

        Raises ValueError if the tokenizer is another model's, or pads the other side.
        """
        tokenizer = tokenizer or TokenizerStage(
            self.model_identifier, padding_side=self.padding_side
        )
        if tokenizer.model_identifier != self.model_identifier:
            raise ValueError(
                f"{type(self).__qualname__} of {self.model_identifier} follows the TokenizerStage "
                f"of {tokenizer.model_identifier}: save model and tokenizer in one directory"
            )
        if tokenizer.padding_side != self.padding_side:
            raise ValueError(
                f"{type(self).__qualname__} has padding_side={self.padding_side!r}, and its "
                f"TokenizerStage {tokenizer.padding_side!r}: pass the same side to both"
            )
        lengths = [n for n in (tokenizer.max_seq_length, self.max_seq_length) if n is not None]
        settings = {field.name: getattr(self, field.name) for field in fields(ModelStage)}
        settings["max_seq_length"] = min(lengths, default=None)
        texts = {"text_field": tokenizer.text_field, "max_chars": tokenizer.max_chars}
        return StageMapper(self, **settings, **texts)


class StageMapper(LoadedByUser):
    """Mapper that runs a custom `ModelStage`, its `source`."""

    def load(self, config: dict[str, Any]) -> nn.Module:
        """Call ``setup`` of a copy of the stage, and return the torch module that it has loaded."""
        stage = copy.copy(self.source)  # the stage itself keeps no model
        directory = hub.download(self.model.checkpoint.identity, cache_dir=self.options.cache_dir)
        stage.model_identifier = str(directory)
        stage.setup()
        return stage.model

    def make_heads(self) -> tuple[Head, ...]:
        """Return a tuple with one head, which makes the stage's columns from the outputs."""
        declared = self.source.new_columns or self._kinds()
        check_column_types(self.__name__, declared)
        parts = (self.__name__, self.options, self.model)
        return (DeclaredColumns(*parts, declared=declared, compute=self._columns),)

    def _kinds(self) -> dict[str, str]:
        """Return type names by column, found by calling the stage's methods with zeros."""
        labels = self.model.checkpoint.config.get("id2label")
        try:
            columns = self._columns(np.zeros((2, len(labels or ()) or 2), dtype=np.float32))
            return {name: _kind_of(pa.array(values).type) for name, values in columns.items()}
        except Exception as err:
            raise TypeError(
                f"{self.__name__} does not show which kinds of columns it makes ({err}): declare "
                f'them, such as new_columns = {{"label": "str"}}'
            ) from err

    def _columns(self, values: np.ndarray) -> Columns:
        """Return the stage's columns by name, from outputs, float32 (texts, outputs)."""
        import pandas as pd
        import torch

        outputs: Any = torch.from_numpy(values)
        outputs.logits = outputs  # an attribute of transformers' outputs
        stage = self.source
        collected = stage.collect_outputs([stage.process_model_output(outputs, None)])
        tokens = ("input_ids", "attention_mask")  # empty columns, because stages drop them
        frame = pd.DataFrame(dict.fromkeys(tokens), index=range(len(values)))
        frame = stage.create_output_dataframe(frame, collected)
        return {name: frame[name].tolist() for name in stage.outputs()[1]}


def _kind_of(values: pa.DataType) -> str:
    kinds = {
        "bool": pa.types.is_boolean,
        "int64": pa.types.is_integer,
        "float32": pa.types.is_floating,
        "str": pa.types.is_string,
        "list<float32>": pa.types.is_list,
    }
    return next((kind for kind, is_kind in kinds.items() if is_kind(values)), str(values))
