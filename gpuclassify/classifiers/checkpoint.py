"""Run any text classification checkpoint by name, or your own torch module and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from gpuclassify.mapping.heads import Head
from gpuclassify.mapping.label_heads import HEADS, CategoryHead
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.options import SINGLE_LABEL, ClassifierOptions, PairOptions
from gpuclassify.settings.signatures import takes


class DistributedDataClassifier(TextMapper[ClassifierOptions]):
    """Classifier that runs any checkpoint of the Hub or of a directory.

    Reads the layouts of the published classifiers, and the architectures of
    transformers' ``AutoModelForSequenceClassification``, including GTE as it
    was published (``model_type`` "new"). No code of a repository is run. Columns
    depend on `problem_type`, by default the checkpoint's:

    ===========================  =================  =======================
    problem_type                 ``label_field``    ``score_field``
    ===========================  =================  =======================
    single_label_classification  the most probable  softmax, list<float32>
    multi_label_classification   the most probable  sigmoids, list<float32>
    regression, one output       none               the output, float32
    regression, more outputs     none               outputs, list<float32>
    ===========================  =================  =======================

    If neither names a type, one output is a regression (for pairs of texts,
    CrossEncoder's score), and more outputs are the scores of a single label.

    Parameters
    ----------
    score_field : str
        Column of scores: by default none, or "score" for regression.
    labels : list of str
        Labels in id order, for a client without the checkpoint, or instead of LABEL_0 and so on.
        With them, the checkpoint must be single-label, unless `problem_type` is set.

    Examples
    --------
    >>> ddf.pipe(DistributedDataClassifier(model="my/model"))  # doctest: +SKIP
    """

    Options = ClassifierOptions
    purpose = "any text classification checkpoint"
    licence = "the checkpoint's"
    defaults: ClassVar[dict[str, Any]] = {"label_field": "preds"}

    if TYPE_CHECKING:

        @takes(ClassifierOptions)
        def __init__(self, **settings: object) -> None: ...

    def make_heads(self) -> tuple[Head, ...]:
        """Return a tuple with the head for the problem type."""
        problem_type: str | None = self.options.problem_type
        if problem_type is None:
            is_given = self.options.labels is not None
            problem_type = SINGLE_LABEL if is_given else self.model.checkpoint.problem_type
        head_type = HEADS.get(problem_type, CategoryHead)
        return (head_type(type(self).__qualname__, self.options, self.model),)


class ModelMapper(TextMapper[PairOptions]):
    """Base class for your own torch module, or your own columns from a model's outputs.

    A subclass declares three things; the first is optional for a network that
    transformers knows:

    ``build_module(self, config)``
        Makes the torch module, with random weights, from the parsed
        ``config.json`` (a dict, empty without that file). The weights in
        ``model.safetensors`` are loaded into it by name. Its
        ``forward(input_ids, attention_mask)`` takes int64 (rows, width)
        tensors, the mask with 1 for a token and 0 for padding, and returns
        (rows, outputs).
    ``new_columns``
        Dict from the names of the new columns to their types: "str", "float32",
        "int64", "bool", "list<float32>" or "list<float16>".
    ``columns(self, outputs)``
        Converts the outputs, float32 (texts, outputs), to a dict of arrays or
        lists, one value per text.

    `DistributedDataClassifier` takes the same declarations. There,
    ``new_columns`` and ``columns`` may be left out if the outputs are logits of
    labels.

    Raises
    ------
    TypeError
        When a dataset is passed: the subclass does not declare ``new_columns``.

    Examples
    --------
    >>> class Readability(ModelMapper):
    ...     new_columns = {"readability": "float32"}
    ...
    ...     def build_module(self, config):
    ...         return ReadabilityNet(config["vocabulary"])
    ...
    ...     def columns(self, outputs):
    ...         return {"readability": outputs[:, 0]}
    """

    Options = PairOptions

    def make_heads(self) -> tuple[Head, ...]:
        """Raise TypeError: it is only called if the subclass does not declare `new_columns`."""
        raise TypeError(
            f"{type(self).__qualname__} declares no new_columns: declare them and write "
            "columns(outputs), or use DistributedDataClassifier, which makes labels of its outputs"
        )
