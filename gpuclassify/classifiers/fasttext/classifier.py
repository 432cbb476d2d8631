"""Classifiers that run fastText models, and language identification."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gpuclassify.classifiers.fasttext.model_file import FastTextModel
from gpuclassify.classifiers.fasttext.runner import FastTextHead, FastTextRunner, LanguageHead
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.checks import warn_once
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import LabelOptions, ordered_labels
from gpuclassify.settings.signatures import takes

Preprocess = Literal["dclm", "lower", "openlid", "ultra-fineweb"]


@declared
class FastTextOptions(LabelOptions):
    """Settings of classifiers that run fastText models, in addition to `LabelOptions`.

    Attributes
    ----------
    model : str
        A ``.bin`` or ``.ftz`` file, a directory with one, or a Hub name.
    file : str
        File name, if a directory or repository has several.
    confidence_field : str
        Output column (float32) of the label's probability.
    min_confidence : float
        Keep only rows whose label has at least this probability, 0 to 1.
    score_label : str
        Label whose probability is written to `score_field`.
    score_field : str
        Output column (float32) of the probability of `score_label`.
    min_score : float
        Keep only rows with at least this probability of `score_label`.
    top_k : int
        Also write the `top_k` most probable labels, and their probabilities, as lists.
    top_labels_field, top_scores_field : str
        Output columns of these lists.
    labels : list of str
        Labels in the file's order, for a client without the file; workers verify them.
    preprocess : {"dclm", "lower", "openlid", "ultra-fineweb"}
        Preparation of texts as in training: lower case, or as DCLM, OpenLID-v3 or Ultra-FineWeb
        prepares them. "ultra-fineweb" needs a tokenizer in the model's repository. Default:
        newlines become spaces.
    long_text : {"whole", "lines"}
        Classify each text as a whole, or line by line. With "lines", a text gets the label with
        the most characters. Its probability is the mean over the lines with this label, and the
        probability of `score_label` the mean over all lines with a label, weighted by characters.
    line_labels_field : str
        Output column (list of strings) of each line's label, with ``long_text="lines"``; null for
        blank lines, and for lines of unknown words.
    label_shares_field : str
        Output column (list of struct) of each `label` of the lines, and its `share` (float32) of
        the characters of lines that are not blank, largest first, with ``long_text="lines"``.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_confidence", "min_score")
    window_aggregation: ClassVar[str] = "mean"

    file: str | None = None
    confidence_field: str | None = None
    min_confidence: float | None = setting(default=None, is_share=True)
    score_label: str | None = None
    score_field: str | None = None
    min_score: float | None = None
    top_k: int | None = None
    top_labels_field: str = "top_labels"
    top_scores_field: str = "top_scores"
    labels: Sequence[str] | None = setting(default=None, convert=ordered_labels)
    preprocess: Preprocess | None = None
    long_text: Literal["whole", "lines"] = "whole"
    line_labels_field: str | None = None
    label_shares_field: str | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        if self.score_label is None and self.needs_score:
            raise ValueError(
                "score_field and min_score are about the probability of one label: pass "
                'score_label= with them, such as score_label="__label__hq"'
            )
        if self.score_label is not None and not self.needs_score:
            raise ValueError(
                f"score_label={self.score_label!r} has no column to fill and no filter: pass "
                "score_field= or min_score= with it"
            )
        for name in ("line_labels_field", "label_shares_field"):
            if getattr(self, name) is not None and not self.runs_lines:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is about the lines of a text: pass "
                    'long_text="lines" with it'
                )
        if self.top_k is not None and self.runs_lines:
            raise ValueError(
                f'top_k={self.top_k} has no meaning with long_text="lines": pass '
                "label_shares_field= for all labels of a text's lines"
            )
        names = [
            PurePath(name).name.lower().replace("_", "-") for name in (self.model, self.file or "")
        ]
        if self.preprocess is None and any(name.startswith("ultra-fineweb") for name in names):
            warn_once(
                f"{self.file or self.model} was trained on the tokens of prepared texts, and gives "
                'plain ones wrong scores: pass preprocess="ultra-fineweb"'
            )

    @property
    def runs_lines(self) -> bool:
        """Whether the model runs on each line of a text, instead of the whole text."""
        return self.long_text == "lines"

    @property
    def plans_without_model(self) -> bool:
        """Whether `labels` are passed, so that a run can be planned without the model's file."""
        return self.labels is not None

    @property
    def needs_score(self) -> bool:
        """Whether a column or a filter needs the probability of `score_label`."""
        return self.score_field is not None or self.min_score is not None


class FastTextClassifier(TextMapper[FastTextOptions]):
    """Classifier that runs any model trained by fastText, including quantized ones.

    The most probable label is written to ``fasttext_pred`` by default. Labels are
    the library's, with their prefix. With ``score_label="__label__hq"``,
    `score_field` has the probability of this label, even if another one is more
    probable. The library adds 1e-5 to each probability, so that numbers may
    exceed 1 by 1e-5.

    Newlines become spaces, as the library requires, unless `preprocess` selects
    another preparation of texts. An empty text gets the library's result. If the
    model knows no word of a text, label and numbers are null, and the text passes
    no filter.

    Models run on the CPU, in a process that all workers of a machine share, and
    that forks a process per thread, so that the file is in memory once.

    Parameters
    ----------
    top_k : int
        Also write the `top_k` most probable labels to ``top_labels``, list<str>, and their
        probabilities to ``top_scores``, list<float32>.

    Examples
    --------
    >>> quality = FastTextClassifier(
    ...     model="mlfoundations/fasttext-oh-eli5",
    ...     score_label="__label__hq",
    ...     score_field="hq_score",
    ...     min_score=0.018,
    ...     preprocess="dclm",
    ... )
    >>> ddf = ddf.pipe(quality)  # doctest: +SKIP
    """

    Options = FastTextOptions
    model_type = FastTextModel
    runner_type = FastTextRunner
    head_type = FastTextHead
    family = "fasttext"
    purpose = "any classifier of fastText"
    licence = "the model's"
    defaults: ClassVar[dict[str, Any]] = {"label_field": "fasttext_pred"}

    if TYPE_CHECKING:

        @takes(FastTextOptions)
        def __init__(self, **settings: object) -> None: ...


class LanguageIdentifier(FastTextClassifier):
    """Classifier of the language of text, with its probability, by a fastText model.

    Writes the columns ``language`` and ``language_confidence`` by default.
    The default model is the latest GlotLID, a file of about 1.7 GB, with some
    2,100 labels. ``file="model_v3.bin"`` fixes version 3.
    Languages are the model's labels without ``__label__``, also in `filter_by`.
    GlotLID's are codes of ISO 639-3 with a script, ``deu_Latn``, and ``und_...``
    and ``zxx_...`` for text in no language. ``lid.176.bin`` and ``lid.176.ftz``
    are much smaller, with two letters, ``de``; they are not on the Hub: download
    one, and pass its path. Texts in capitals get wrong languages without
    ``preprocess="lower"``. ``long_text="lines"`` finds the language of each line;
    `line_labels_field` and `label_shares_field` name columns for the lines'
    languages and their shares.

    Examples
    --------
    >>> ddf = LanguageIdentifier()(ddf)  # doctest: +SKIP
    >>> german = LanguageIdentifier(filter_by="deu_Latn")
    >>> by_line = LanguageIdentifier(
    ...     long_text="lines", line_labels_field="line_languages", label_shares_field="languages"
    ... )
    >>> german_or_french = LanguageIdentifier(model="lid.176.ftz", filter_by=["de", "fr"])
    """

    head_type = LanguageHead
    family = "language"
    purpose = "language of text, 2,102 labels"
    licence = "Apache-2.0"
    defaults: ClassVar[dict[str, Any]] = {
        "model": "cis-lmu/glotlid",
        "label_field": "language",
        "confidence_field": "language_confidence",
    }
