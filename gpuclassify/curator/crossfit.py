"""Counterparts of CrossFit's custom models, and of the Dask generation's classifier for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuclassify import hub
from gpuclassify.curator.documents import DocumentDataset
from gpuclassify.curator.pipeline import LoadedByUser
from gpuclassify.frames import Frame
from gpuclassify.mapping.heads import Columns
from gpuclassify.mapping.label_heads import CategoryHead
from gpuclassify.models.checkpoint import Checkpoint
from gpuclassify.settings.options import ClassifierOptions

if TYPE_CHECKING:
    from torch import nn


class HFModel(ABC):
    """Base class for a custom model: subclasses write ``load_model``, perhaps ``load_tokenizer``.

    The torch module takes a dict of ``input_ids`` and ``attention_mask``, both (texts, width), and
    returns (texts, outputs). The subclass's code chooses the source of the weights.

    Parameters
    ----------
    path_or_name : str
        Hub name or directory; its ``config.json`` has the maximum length of texts.
    max_mem_gb : int, optional
        Ignored, because batches are sized by free memory.
    model_output_type : {"numeric"}
        Kind of outputs; any other raises TypeError.
    **trial_runs
        CrossFit's sizes of trial runs; ignored, because batches are sized by free memory.
    """

    def __init__(
        self,
        path_or_name: str,
        max_mem_gb: int | None = None,
        model_output_type: object = "numeric",
        **trial_runs: object,
    ) -> None:
        if model_output_type != "numeric":
            raise TypeError(
                f"{type(self).__qualname__}: model_output_type={model_output_type!r}, and outputs "
                'are numbers, (texts, outputs): leave it at "numeric"'
            )
        self.path_or_name = path_or_name

    @abstractmethod
    def load_model(self, device: str = "cuda") -> nn.Module:
        """Return the torch module with its weights, to be run on `device`, such as "cuda:0"."""

    def load_tokenizer(self) -> Any:
        """Return a new tokenizer of transformers, loaded from the model's files."""
        from gpuclassify.models.tokenizer_files import read_tokenizer

        name = self.path_or_name
        return read_tokenizer(name, hub.download(hub.resolve(name), has_weights=False))

    def max_seq_length(self) -> int | None:
        """Return the maximum number of tokens of a text; None takes it from the model's files."""
        return None


class HFHead(CategoryHead):
    """Head that writes the label with the largest output, and optionally the outputs as scores."""

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Return the outputs unchanged, because the module applies its own softmax."""
        return outputs

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Accept any model: never raises, because `columns` checks the number of outputs."""

    def columns(self, values: np.ndarray) -> Columns:
        """Return columns of labels and outputs by name, from outputs, float32 (texts, labels)."""
        if values.shape[1] != len(self.labels):
            raise ValueError(
                f"the model gives {values.shape[1]} outputs a text, and {len(self.labels)} labels "
                f"were passed, {self.labels}: out_dim must be the number of labels"
            )
        return super().columns(values)


class HFClassifier(LoadedByUser):
    """Mapper that runs `source`, an `HFModel`, and writes the label with the largest output."""

    Options = ClassifierOptions
    head_type = HFHead

    def load(self, config: dict[str, Any]) -> nn.Module:
        """Return the torch module, loaded by the user's ``load_model``; `config` is not used."""
        device, _dtype = self.runner.device_and_dtype()
        return self.source.load_model(device=str(device))

    def new_tokenizer(self) -> Any:
        """Return a tokenizer, loaded by the user's ``load_tokenizer``, which may choose any."""
        return self.source.load_tokenizer()


@dataclass(eq=False, repr=False)
class DistributedDataClassifier:
    """Base class for a classifier that runs an `HFModel`, in the form of NeMo Curator 0.x.

    A subclass may set the names of the text column, ``text_field``, and of the column of outputs,
    ``prob_column`` (None for no such column). It may also replace ``_run_classifier``, the method
    that adds the columns.

    Parameters
    ----------
    model : HFModel
        Model to run, which loads its own torch module.
    labels : list of str
        Labels, in the order of the model's outputs.
    filter_by : str or list of str, optional
        Labels whose rows are kept. Default: all rows are kept.
    batch_size : int
        Maximum number of texts in a batch.
    out_dim : int, optional
        Number of outputs; must be the number of labels.
    pred_column : str
        Name of the column of labels.
    max_chars : int, optional
        Number of characters that texts are cut to for the model. Default: they are not cut.
    device_type, autocast : optional
        Ignored: a GPU is used if there is one, and the module's code chooses dtypes.
    """

    text_field: ClassVar[str] = "text"
    prob_column: ClassVar[str | None] = None

    model: HFModel
    labels: list[str]
    filter_by: str | list[str] | None = None
    batch_size: int = 256
    out_dim: int | None = None
    pred_column: str = "pred"
    max_chars: int | None = None
    device_type: str = "cuda"
    autocast: bool = True

    def __post_init__(self) -> None:
        if self.out_dim not in (None, len(self.labels)):
            raise ValueError(
                f"out_dim={self.out_dim}, and there are {len(self.labels)} labels, {self.labels}: "
                "the label is that of the largest output, so they must be as many"
            )

    def __call__(self, dataset: DocumentDataset) -> DocumentDataset:
        """Return the dataset with the new columns.

        If `filter_by` is set, only rows with one of these labels are kept.
        """
        result = self._run_classifier(dataset)
        if self.filter_by is None:
            return result
        wanted = [self.filter_by] if isinstance(self.filter_by, str) else list(self.filter_by)
        return result[result[self.pred_column].isin(wanted)]

    def _run_classifier(self, dataset: DocumentDataset) -> DocumentDataset:
        labelled = _run_classifier_helper(
            df=dataset.df,
            model=self.model,
            labels=self.labels,
            max_chars=self.max_chars,
            batch_size=self.batch_size,
            label_col=self.pred_column,
            text_field=self.text_field,
            prob_col=self.prob_column,
        )
        return DocumentDataset(labelled)


def _run_classifier_helper(
    df: Frame, model: HFModel, *, label_col: str, prob_col: str | None = None, **options: Any
) -> Any:
    """Return the frame `df` with labels in column `label_col` and, if set, outputs in `prob_col`.

    `df` is a frame of Dask, pandas or cudf, and the result is of the same library. `options` are
    further settings of the mapper, such as ``labels`` and ``text_field``.
    """
    classifier = HFClassifier(
        model,
        model=model.path_or_name,
        max_seq_length=model.max_seq_length(),
        label_field=label_col,
        score_field=prob_col,
        unpack_inference_batch=False,
        autocast=False,  # chosen by the module's code
        **options,
    )
    return classifier(df)
