"""Classify the safety of content from the answers of the Aegis guard model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gpuclassify.classifiers.questions.lora import (
    BASE_MODEL,
    DEFENSIVE,
    MAX_TOKENS,
    LoraCheckpoint,
    LoraModel,
    LoraOptions,
)
from gpuclassify.classifiers.questions.prompt_tokens import Prompt
from gpuclassify.classifiers.questions.runners import AnswerRunner
from gpuclassify.classifiers.questions.safety_template import (
    CATEGORY_CODES,
    full_digest,
    read_template,
)
from gpuclassify.mapping.heads import Columns, named_columns, named_fields
from gpuclassify.mapping.label_heads import LabelHead
from gpuclassify.mapping.stage_counts import LABELS
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.declared import declared
from gpuclassify.settings.options import StrPath
from gpuclassify.settings.signatures import takes

SAFE, UNSAFE, UNKNOWN = "safe", "unsafe", "unknown"
ANSWER_LABELS = (UNKNOWN, SAFE, *CATEGORY_CODES)


@declared
class AegisOptions(LoraOptions):
    """Settings of the Aegis classifier, in addition to `LoraOptions`.

    Attributes
    ----------
    template : str or path
        The safety prompt: a text (with a line break), or the path of a file. Default: the one in
        the model's README.md.
    template_digest : str
        SHA-256 that the prompt with an empty document must have, 64 hex digits. By default, a
        prompt passed as text may have any, and one from a file must have a published one.
    categories_field : str
        Output column (list of strings) of all the categories in the answer.
    keep_raw : bool
        Write the answer to `raw_field`; answers are then decoded to their end, up to 100 tokens.
    raw_field : str
        Output column of the answer, with `keep_raw`.
    """

    template: StrPath | None = None
    template_digest: str | None = None
    categories_field: str | None = None
    keep_raw: bool = False
    raw_field: str | None = "_aegis_raw_pred"

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        if self.template_digest is not None:
            full_digest("template_digest", self.template_digest)
        if self.long_text != "truncate":
            raise ValueError(
                f'long_text="{self.long_text}" has no meaning for a prompt: a document that is too '
                "long loses its end, and truncated_field= says which ones did"
            )


class AegisModel(LoraModel):
    """Pinned LoRA adapter of Aegis with its decoder, and the safety prompt."""

    def read(self) -> LoraCheckpoint:
        """Read the configurations of adapter and decoder, and the safety prompt; no weights."""
        checkpoint, options = super().read(), self.options
        card = checkpoint.adapter
        assert card is not None, "Aegis is an adapter"
        template = read_template(options.template, options.template_digest, card, options.cache_dir)
        parts = (template.head, template.tail)
        prompt = Prompt(parts, (options.text_field,), has_special_tokens=False)
        return replace(checkpoint, prompts=(prompt,), max_tokens=options.max_seq_length)


class AegisRunner(AnswerRunner):
    """Runner that asks an Aegis model about each text until the output columns are decided."""

    def is_decided(self, answer: str, is_complete: bool) -> bool:
        """Return whether decoding can end: see `AnswerRunner.is_decided`."""
        if self.options.keep_raw:
            return is_complete
        needs_all = self.options.categories_field is not None
        return read_answer(answer, is_complete, needs_all) is not None


@dataclass(frozen=True)
class Verdict:
    """Label and distinct categories ("O1" to "O13") of a model's answer: see `read_answer`."""

    label: str
    categories: tuple[str, ...] = ()


def final_verdict(answer: str) -> Verdict:
    """Return the label and categories of an answer that no tokens follow."""
    verdict = read_answer(answer, is_complete=True)
    assert verdict is not None, "a complete answer is decided"
    return verdict


def read_answer(text: str, is_complete: bool, needs_all_categories: bool = False) -> Verdict | None:
    """Return label and categories of an answer, or None if they are not decided yet.

    `text` is the answer decoded so far, and `is_complete` says whether no tokens follow. A valid
    answer is ``safe``, or ``unsafe`` with a second line of categories, ``O1`` to ``O13``, separated
    by commas; further lines are ignored. Other answers have the label ``unknown``, and so has a
    list of several entries, as in both generations of NeMo Curator (``_parse_response``): a filter
    for one category then drops texts that have another one, too. By default, a list is decided at
    its first comma, so that later categories may be missing; with `needs_all_categories`, at the
    end of its line.
    """
    first, *others = text.split("\n")
    word = first.strip()
    if not others and not is_complete:
        is_open = any(answer.startswith(word) for answer in (SAFE, UNSAFE))
        return None if is_open else Verdict(UNKNOWN)
    if word == SAFE:
        return Verdict(SAFE)
    if word != UNSAFE:
        return Verdict(UNKNOWN)
    is_whole_line = is_complete or len(others) > 1
    code, *codes = (part.strip() for part in (others[0] if others else "").split(","))
    if not is_whole_line and not codes:
        is_open = any(category.startswith(code) for category in CATEGORY_CODES)
        return None if is_open else Verdict(UNKNOWN)
    if code not in CATEGORY_CODES:
        return Verdict(UNKNOWN)
    if needs_all_categories and not is_whole_line:
        return None
    named = [category for category in (code, *codes) if category in CATEGORY_CODES]
    return Verdict(UNKNOWN if codes else code, tuple(dict.fromkeys(named)))


class AegisHead(LabelHead):
    """Head that converts the model's answers to a label and, if set, categories and the answer."""

    @property
    def labels(self) -> list[str]:
        """Labels ``unknown``, ``safe`` and ``O1`` to ``O13``."""
        return list(ANSWER_LABELS)

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of label, categories and raw answer that the settings name."""
        return named_fields(
            (self.label_field, pa.string()),
            (self.options.categories_field, LABELS),
            (self._raw_field, pa.string()),
        )

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns in `fields` by name, from answers, str objects (texts,)."""
        categories = [list(final_verdict(answer).categories) for answer in values]
        return named_columns(
            (self.label_field, _labels(values).tolist()),
            (self.options.categories_field, pa.array(categories, LABELS)),
            (self._raw_field, values.tolist()),
        )

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"label": mask}`` of texts whose label is in `filter_by`; {} if not set."""
        return self.passes_label(_labels(values))

    @property
    def _raw_field(self) -> str | None:
        return self.options.raw_field if self.options.keep_raw else None


def _labels(answers: np.ndarray) -> np.ndarray:
    return np.asarray([final_verdict(answer).label for answer in answers], dtype=object)


class AegisClassifier(TextMapper[AegisOptions]):
    """Classifier of content: ``safe``, or one of 13 categories of unsafe content.

    Asks LlamaGuard-7b with one of NVIDIA's two adapters about each text, with the
    prompt of its training. ``O1`` to ``O13`` are the prompt's categories;
    ``unknown`` is an answer in another form, or with several categories, which
    `categories_field` lists. So ``filter_by="O3"`` drops texts with several
    categories. The constant prefix of the prompt is run once per process, and
    answers are decoded only until the output columns are decided.

    Parameters
    ----------
    model : str
        The adapter; "nvidia/Aegis-AI-Content-Safety-LlamaGuard-Permissive-1.0" is the other.
    max_seq_length : int
        Maximum tokens of the whole prompt. Only the document is cut, at its end.

    Examples
    --------
    >>> classifier = AegisClassifier(filter_by="safe", token="hf_...")  # doctest: +SKIP
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    Options = AegisOptions
    model_type = AegisModel
    runner_type = AegisRunner
    head_type = AegisHead
    family = "aegis"
    purpose = "safety of content, 13 categories"
    is_gated = True
    licence = "Llama 2 Community License"
    published_labels = ANSWER_LABELS
    defaults = {
        "model": DEFENSIVE,
        "base_model": BASE_MODEL,
        "label_field": "aegis_pred",
        "max_chars": 6000,
        "max_seq_length": MAX_TOKENS,
    }

    if TYPE_CHECKING:

        @takes(AegisOptions)
        def __init__(self, **settings: object) -> None: ...
