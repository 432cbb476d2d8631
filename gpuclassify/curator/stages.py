"""Models of one's own: how a mapper runs the user's code, and NeMo Curator 1.x's base class."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.curator.documents import OfDatasets
from gpuclassify.mapping.code_digest import code_digest, value_digest
from gpuclassify.mapping.columns import check_column_types
from gpuclassify.mapping.heads import Columns, Head, OwnColumns
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import EncoderRunner, OwnModule, Runner
from gpuclassify.mapping.text_mapper import TextMapper

if TYPE_CHECKING:
    from torch import nn

WorkerMetadata = Any  # which scripts import for annotations


class UserCode:
    """An object of a user's class, which is known by the code and by the settings that it holds."""

    def _definition(self) -> tuple[Any, ...]:
        owner = type(self)
        settings = sorted((name, value_digest(value)) for name, value in vars(self).items())
        return (owner.__module__, owner.__qualname__, code_digest(owner), *settings)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return self._definition()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({vars(self)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._definition() == other._definition()

    def __hash__(self) -> int:
        return hash(self._definition())

    def _unwritten(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__qualname__} has no {method}(): write it")


class _Model(PinnedModel):
    """A model of which only the name and the tokenizer are certain."""

    def __init__(self, options: Any, **_kinds: bool) -> None:
        super().__init__(options, has_own_module=True, has_own_columns=True)


class LoadedByUser(OfDatasets, TextMapper):
    """Runs the torch module that the user's own code, `source`, loads with its weights."""

    model_type = _Model
    new_tokenizer: Callable[[], Any] | None = None  # if it is not that of the model's files

    def __init__(self, source: Any, **options: Any) -> None:
        super().__init__(**options)
        self.source = source

    @property
    def __name__(self) -> str:
        """That of the user's class, on Dask's dashboard and in messages."""
        return type(self.source).__qualname__

    @abstractmethod
    def load(self) -> nn.Module:
        """The module with its weights, on any device."""

    @functools.cached_property
    def runner(self) -> Runner:
        """Texts to outputs, by the user's module and tokenizer."""
        own = OwnModule(lambda _config: self.load(), self._definition, True, self.new_tokenizer)
        return EncoderRunner(self.options, self.model, own)


@dataclass(frozen=True)
class TokenizerStage:
    """How texts are cut for the `ModelStage` that follows; tokens never become columns.

    `sort_by_length` and `unk_token` have no effect on results; a TypeError is raised for
    `transformers_init_kwargs`.
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


@dataclass(eq=False, repr=False)
class ModelStage(UserCode):
    """Base class for a model of one's own, in the form of NeMo Curator 1.x.

    A subclass's ``setup`` (or ``_setup``) loads ``self.model``, whose outputs are (texts, outputs)
    or have such ``logits``. ``process_model_output``, ``collect_outputs`` and
    ``create_output_dataframe`` make the columns that ``outputs`` names, of all texts at once.
    Batches are sized by memory, and `model_inference_batch_size` is their upper bound.

    Which kinds the columns are is seen from what those methods make of zeros, or is declared as
    ``new_columns``; see `gpuclassify.ModelMapper`, the shorter way to write the same.

    Parameters
    ----------
    model_identifier : str
        Hub name or directory. While ``setup`` runs, the directory with the model's files.
    cache_dir, hf_token : str, optional
    model_inference_batch_size : int
    has_seq_order : bool
        Sort by length; rows keep their order.
    padding_side : {"left", "right"}
    max_seq_length : int, optional
    unpack_inference_batch : bool
        Whether the model takes tensors as keyword arguments, rather than in one dict.
    autocast : bool
    """

    new_columns: ClassVar[Mapping[str, str]] = {}

    model_identifier: str
    cache_dir: str | None = None
    hf_token: str | None = None
    model_inference_batch_size: int = 256
    has_seq_order: bool = True
    padding_side: str = "right"
    max_seq_length: int | None = None
    unpack_inference_batch: bool = False
    autocast: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_column_types(cls.__qualname__, cls.new_columns)

    def __post_init__(self) -> None:
        if self.hf_token is not None:
            hub.remember_token(self.model_identifier, self.hf_token)
        self.hf_token = None  # a token is never part of what travels

    def outputs(self) -> tuple[list[str], list[str]]:
        """``["data"]`` and the names of the new columns."""
        raise self._unwritten("outputs")

    def setup(self, _worker: WorkerMetadata | None = None) -> None:
        """Load ``self.model``."""
        self._setup(local_files_only=True)

    def _setup(self, local_files_only: bool = True) -> None:
        raise self._unwritten("setup")

    def process_model_output(self, outputs: Any, model_input_batch: Any = None) -> dict[str, Any]:
        """Arrays by name, one value a text, of the model's outputs."""
        raise self._unwritten("process_model_output")

    def collect_outputs(self, processed_outputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The arrays of all batches together."""
        names = processed_outputs[0]
        return {name: np.concatenate([part[name] for part in processed_outputs]) for name in names}

    def create_output_dataframe(self, df_cpu: Any, collected_output: dict[str, Any]) -> Any:
        """The frame with the new columns."""
        raise self._unwritten("create_output_dataframe")

    def as_mapper(self, tokenizer: TokenizerStage | None = None) -> StageMapper:
        """The mapper that runs this stage, on texts cut as `tokenizer` says.

        Raises
        ------
        ValueError
            The tokenizer is that of another model.
        """
        tokenizer = tokenizer or TokenizerStage(self.model_identifier)
        if tokenizer.model_identifier != self.model_identifier:
            raise ValueError(
                f"{type(self).__qualname__} of {self.model_identifier} follows the TokenizerStage "
                f"of {tokenizer.model_identifier}: save model and tokenizer in one directory"
            )
        lengths = (tokenizer.max_seq_length, self.max_seq_length)
        return StageMapper(
            self,
            model=self.model_identifier,
            cache_dir=self.cache_dir,
            text_field=tokenizer.text_field,
            max_chars=tokenizer.max_chars,
            max_seq_length=min((n for n in lengths if n is not None), default=None),
            batch_size=self.model_inference_batch_size,
            sort_by_length=self.has_seq_order,
            padding_side=self.padding_side,
            unpack_inference_batch=self.unpack_inference_batch,
            autocast=self.autocast,
        )


class StageMapper(LoadedByUser):
    """Runs a `ModelStage`."""

    def load(self) -> nn.Module:
        """The model that the stage's ``setup`` loads, from the revision that is pinned."""
        stage = copy.copy(self.source)  # which keeps no model
        directory = hub.download(self.model.checkpoint.identity, cache_dir=self.options.cache_dir)
        stage.model_identifier = str(directory)
        stage.setup()
        return stage.model

    def make_heads(self) -> tuple[Head, ...]:
        """The stage's columns, of declared kinds or those that they turn out to be."""
        declared = self.source.new_columns or self._kinds()
        parts = (self.__name__, self.options, self.model)
        return (OwnColumns(*parts, declared=declared, compute=self._columns),)

    def _kinds(self) -> dict[str, str]:
        labels = self.model.checkpoint.config.get("id2label")
        try:
            made = self._columns(np.zeros((2, len(labels or ()) or 2), dtype=np.float32))
            return {name: _kind_of(pa.array(values).type) for name, values in made.items()}
        except Exception as err:
            raise TypeError(
                f"{self.__name__} does not show which kinds of columns it makes ({err}): declare "
                f'them, such as new_columns = {{"label": "str"}}'
            ) from err

    def _columns(self, values: np.ndarray) -> Columns:
        """The stage's columns for outputs, float32 (texts, outputs)."""
        import pandas as pd
        import torch

        outputs: Any = torch.from_numpy(values)
        outputs.logits = outputs  # what it would be called in an output of transformers
        stage = self.source
        collected = stage.collect_outputs([stage.process_model_output(outputs, None)])
        tokens = ("input_ids", "attention_mask")  # which stages drop; here they hold nothing
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
    for kind, is_kind in kinds.items():
        if is_kind(values):
            return kind
    raise TypeError(f"no kind of column holds {values}")
