"""Classify texts into any labels, without training, by a model of natural language inference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.mapping.label_heads import MultiLabelHead
from gpuclassify.mapping.runners import Outputs
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.activations import sigmoid, softmax
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, some_of
from gpuclassify.settings.checks import check_ordered, check_text
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import MODEL, TEMPLATE, TEXTS, ClassifierOptions
from gpuclassify.settings.signatures import takes

BLANK = "{}"  # placeholder of a label's description in the hypothesis
# Settings of other classifiers that must be None here, with advice for the error.
_NO_SETTINGS = {
    "problem_type": "pass multi_label=True if several labels may be true of a text",
    "query": "write it into hypothesis=",
    "pair_truncation": "the text is cut, and the hypothesis never",
}


def _described_labels(value: Any) -> tuple[tuple[str, str], ...] | None:
    """Convert a list of labels, or a dict of label to description, to (label, description) pairs.

    A label without a description is its own description.
    """
    if value is None:
        return None
    check_ordered("labels", value)
    items: Iterable[Any] = value.items() if isinstance(value, Mapping) else value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(
            f"labels={value!r}: pass a list of labels, or a dict of label to description"
        )
    pairs = tuple(
        item if isinstance(item, tuple) and len(item) == 2 else (item, item) for item in items
    )
    if not pairs:
        raise ValueError("labels=[] names no label: pass at least one")
    for name, description in pairs:
        check_text("a label in labels", name, "a text: name each label")
        check_text(f"labels[{name!r}]", description, "a description: pass a text")
    names = [name for name, _ in pairs]
    if several := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"labels has {several[0]!r} twice: labels must differ")
    return pairs


@declared
class ZeroShotOptions(ClassifierOptions):
    """Settings of `ZeroShotClassifier`, in addition to `ClassifierOptions`.

    Attributes
    ----------
    model : str
        Any natural language inference (NLI) model, by Hub name or directory.
    labels : list of str, or dict of str to str
        Labels, or descriptions by label, which are put into the hypothesis. Each label is one more
        pass over the texts.
    hypothesis : str
        Sentence with ``{}`` for the label's description.
    multi_label : bool
        Score labels independently, because several may be true of a text. Default: labels compete,
        and their scores add up to 1. A single label is always scored by itself.
    """

    no_pairs = "the second text of each pair is the hypothesis; name both in text_template="

    labels: Mapping[str, str] | Sequence[str] = setting(  # type: ignore[assignment]
        convert=_described_labels,
        group=MODEL,
        metavar=TEXTS,
        form="NAME=DESCRIPTION, such as News='reports current events'",
    )
    hypothesis: str = setting(
        default="This text is about {}.",
        group=MODEL,
        metavar=TEMPLATE,
        help="Sentence about the text for a zero-shot model, with {} for a label's description. "
        "Default: 'This text is about {}.'",
    )
    multi_label: bool = setting(default=False, group=MODEL)

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        for name, cure in _NO_SETTINGS.items():
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value!r} has no meaning for zero-shot labels: {cure}")
        if self.hypothesis.count(BLANK) != 1:
            raise ValueError(
                f"hypothesis={self.hypothesis!r} needs {BLANK} once, for the description of a "
                f"label: pass a sentence such as 'This text is about {BLANK}.'"
            )
        self.check_text_field()  # first, because its advice is better than that of later checks
        if self.window_aggregation != "mean":
            raise ValueError(
                f"window_aggregation={self.window_aggregation!r} is for windows of long texts, "
                "which zero-shot labels do not have: leave it out"
            )
        super().check_together()
        if self.labels_field is not None and not self.is_independent:
            raise ValueError(
                f"labels_field={self.labels_field!r} would hold several labels of a text, and "
                "these compete: pass multi_label=True with it"
            )

    @property
    def is_independent(self) -> bool:
        """Whether labels are scored independently: if `multi_label`, or with a single label."""
        return self.multi_label or self.passes_per_text == 1

    @property
    def pairing(self) -> tuple[tuple[str, ...], str]:
        """Hypotheses, one per label, and "only_first", because only the text of a pair is cut."""
        labels: Any = self.labels
        return tuple(self.hypothesis.replace(BLANK, text) for _, text in labels), "only_first"

    @property
    def passes_per_text(self) -> int:
        """Number of labels, because the model reads each text once per label."""
        return len(self.labels)

    @property
    def has_windows(self) -> bool:
        """Whether a text may be read as several windows: True, because each label is one."""
        return True


class EntailmentHead(MultiLabelHead):
    """Head that scores labels by how strongly a text entails their hypotheses.

    Scores equal those of transformers' zero-shot classification pipeline: the softmax over all
    labels' entailment logits or, for independent labels, the softmax over each label's logits of
    entailment and contradiction.
    """

    @property
    def labels(self) -> list[str]:
        """Labels in the settings, in order, without their descriptions."""
        return [name for name, _ in self.options.labels]

    def values(self, outputs: Outputs) -> np.ndarray:
        """Return scores, float32 (texts, labels), from a row of logits for each text and label."""
        entailment, contradiction = self._find_outputs(self.model.checkpoint)
        logits = outputs.values.reshape(-1, len(self.labels), outputs.values.shape[1])
        if not self.options.is_independent:
            return softmax(logits[..., entailment])
        return sigmoid(logits[..., entailment] - logits[..., contradiction])

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the model has the outputs that the scores need."""
        self._find_outputs(checkpoint)

    def _find_outputs(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """Return the indices of the outputs for entailment and contradiction, found by their names.

        If labels compete, contradiction is not needed, and its index is 0 if unknown.
        """
        labels, name = [label.lower() for label in checkpoint.labels], checkpoint.identity.name
        entailment = [n for n, label in enumerate(labels) if label.startswith("entail")]
        if not entailment or checkpoint.heads:
            raise CheckpointError(
                f"{name} has no label of entailment; its labels are "
                f"{some_of(checkpoint.labels) or 'unknown'}: {self.owner} takes a model of natural "
                f"language inference, such as {ZeroShotClassifier.defaults['model']}. Run a model "
                "with labels of its own by DistributedDataClassifier"
            )
        opposite = [n for n, label in enumerate(labels) if label.startswith(("contra", "not_ent"))]
        if len(labels) == 2:
            opposite = [1 - entailment[0]]
        if self.options.is_independent and not opposite:
            raise CheckpointError(
                f"{name} has no label of contradiction; its labels are "
                f"{some_of(checkpoint.labels)}: labels that are scored independently need one, so "
                "pass several labels and multi_label=False, or another model"
            )
        return entailment[0], (opposite or [0])[0]


class ZeroShotClassifier(TextMapper[ZeroShotOptions]):
    """Classifier of texts into labels of your own, without training, by an NLI model.

    The model tells whether a text entails a hypothesis, such as "This text is about
    sports.". It reads each text once per label, so time grows with the labels.
    Scores equal those of transformers' zero-shot classification pipeline, but the
    output for contradiction is found by its name, not its index. Long texts are cut.

    Parameters
    ----------
    labels : list of str, or dict of str to str
        Labels, or descriptions by label.
    multi_label : bool
        Score labels independently; False: scores add up to 1.

    Examples
    --------
    >>> topic = ZeroShotClassifier(labels={"News": "current events", "Ads": "a product for sale"})
    >>> ddf = ddf.pipe(topic)  # doctest: +SKIP
    """

    Options = ZeroShotOptions
    head_type = EntailmentHead
    purpose = "labels of your own, by an NLI model"
    licence = "MIT"
    defaults = {
        "model": "MoritzLaurer/deberta-v3-base-zeroshot-v2.0",
        "label_field": "zero_shot_pred",
    }

    if TYPE_CHECKING:

        @takes(ZeroShotOptions)
        def __init__(self, **settings: Any) -> None: ...
