"""SpanClassifier: find spans with any token classifier of the Hub or of a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuclassify.classifiers.spans.columns import SpanOptions
from gpuclassify.classifiers.spans.tags import Aggregation, Scheme
from gpuclassify.classifiers.spans.token_runner import TokenClassifier, TokenHead, TokenRunner
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.declared import declared
from gpuclassify.settings.options import LongText, ModelOptions
from gpuclassify.settings.signatures import takes


@declared
class TokenClassifierOptions(SpanOptions, ModelOptions):
    """Settings of `SpanClassifier`, in addition to `SpanOptions` and `ModelOptions`.

    Attributes
    ----------
    long_text : {"windows", "truncate"}
        Read a long text whole, in overlapping windows, or only its beginning.
    aggregation : {"simple", "first", "average", "max", "none"}
        As in transformers' pipeline: "simple" joins neighbouring tokens of a label. "first",
        "average" and "max" join words, labelled by their first token, by the mean of their tokens,
        or by their most certain token. "none" keeps each token, with the model's own label.
    scheme : {"iob1", "iob2", "bioes", "bilou", "plain"}
        Meaning of prefixes such as the B in B-PER. Default: derived from the model's labels.
    """

    long_text: LongText = "windows"
    aggregation: Aggregation = "simple"
    scheme: Scheme | None = None

    @property
    def keeps_all_scores(self) -> bool:
        """Whether outputs have all labels' probabilities for each token, as "average" needs."""
        return self.aggregation == "average"

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        if self.long_text not in ("windows", "truncate"):
            raise ValueError(
                f'long_text="{self.long_text}" is for scores of texts: spans are found in '
                '"windows", or in the beginning of a text ("truncate")'
            )
        for name, usual in {"base_model": None, "window_aggregation": "mean"}.items():
            if (value := getattr(self, name)) != usual:
                raise ValueError(f"{name}={value!r} has no meaning for spans: leave it out")


class SpanClassifier(TextMapper[TokenClassifierOptions]):
    """Classifier that finds spans, such as names or personal data, with a token classifier.

    Runs any checkpoint of transformers' ``AutoModelForTokenClassification``. Texts
    are read whole, in overlapping windows if they are long: for a token in two
    windows, the prediction with more context counts, and a span may cross the edge
    of a window. ``text[start:end]`` is the span, in characters of the text in the
    column, without white space at its ends.

    Examples
    --------
    >>> people = SpanClassifier(
    ...     model="dslim/bert-base-NER", labels=["PER"], redact="[{label}]"
    ... )
    >>> ddf = ddf.pipe(people)  # doctest: +SKIP
    """

    Options = TokenClassifierOptions
    model_type = TokenClassifier
    runner_type = TokenRunner
    head_type = TokenHead
    family = "spans"
    purpose = "spans that any token classification checkpoint finds"
    licence = "the checkpoint's"

    if TYPE_CHECKING:

        @takes(TokenClassifierOptions)
        def __init__(self, **settings: Any) -> None: ...
