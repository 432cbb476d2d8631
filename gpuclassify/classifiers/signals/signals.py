"""Signals: the numbers by which Gopher, C4 and FineWeb filter documents, as columns."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify.classifiers.rules import RuleModel, RuleRunner
from gpuclassify.classifiers.signals.characters import STOP_WORDS
from gpuclassify.classifiers.signals.measures import (
    DUPLICATE,
    LONGEST_WORD,
    MEASURES,
    SHORT_LINE,
    TOP,
    Block,
)
from gpuclassify.classifiers.signals.words import LANGUAGES, Splitter
from gpuclassify.frames import Texts
from gpuclassify.hub import Identity
from gpuclassify.mapping.heads import Columns, Head
from gpuclassify.mapping.runners import Outputs
from gpuclassify.mapping.stage_counts import COUNT
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.checks import check_choice, install, label_tuple
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import StrPath, TextOptions
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats, advance

_BLOCK_CHARS = 2_000_000
_FLOAT, _INTEGER = pa.float64(), pa.int64()


@dataclass(frozen=True)
class Signal:
    """Definition, in words, and Arrow type of a number about a text."""

    definition: str
    type: pa.DataType = _FLOAT


@dataclass(frozen=True)
class SignalSet:
    """Signals of a published filter, by name, and the paper and section that define them."""

    source: str
    signals: dict[str, Signal]


_CHARS = "over all characters"
_LINE = "line, split at runs of line feeds"
_PARAGRAPH = "paragraph, split at runs of two line feeds or more"
SETS = {
    "gopher": SignalSet(
        "Rae et al. 2021, arXiv:2112.11446, appendix A.1, quality filtering",
        {
            "gopher_words": Signal("words that are more than punctuation", _INTEGER),
            "gopher_mean_word_length": Signal("mean characters of those words"),
            "gopher_hashes_per_word": Signal('"#" over all words'),
            "gopher_ellipses_per_word": Signal('"..." and "…" over all words'),
            "gopher_lines": Signal("lines, split as `str.splitlines` does", _INTEGER),
            "gopher_bullet_line_share": Signal('lines that begin with "•" or "-", over all lines'),
            "gopher_ellipsis_line_share": Signal('lines that end in "..." or "…", over all lines'),
            "gopher_alphabetic_word_share": Signal("words with a letter, over all words"),
            "gopher_stop_words": Signal(
                f"distinct words among {', '.join(STOP_WORDS)} (case matters)", _INTEGER
            ),
        },
    ),
    "repetition": SignalSet(
        "Rae et al. 2021, arXiv:2112.11446, appendix A.1, repetition removal, table A1",
        {
            "repetition_chars": Signal("characters", _INTEGER),
            **{
                f"repetition_duplicate_{kind}_{name}": Signal(f"{what} of a {unit}, {over}")
                for kind, unit in (("line", _LINE), ("paragraph", _PARAGRAPH))
                for name, what, over in (
                    ("share", "repetitions", f"over all {kind}s"),
                    ("char_share", "characters of repetitions", _CHARS),
                )
            },
            **{
                f"repetition_top_{n}_gram_share": Signal(
                    f"characters in the most frequent {n}-gram of words, {_CHARS}"
                )
                for n in TOP
            },
            **{
                f"repetition_duplicate_{n}_gram_share": Signal(
                    f"characters in {n}-grams of words that occur earlier, none twice, {_CHARS}"
                )
                for n in DUPLICATE
            },
        },
    ),
    "c4": SignalSet(
        "Raffel et al. 2020, JMLR 21(140), section 2.2",
        {
            "c4_sentences": Signal(
                "sentences in kept lines: with 3 words or more, none longer than "
                f"{LONGEST_WORD:,} characters; with . ? ! \" or ' at the end, but no ellipsis; "
                'without "javascript", "lorem ipsum", "{" and phrases about cookies, privacy or '
                "terms of use",
                _INTEGER,
            ),
            "c4_lorem_ipsum_lines": Signal(
                'lines with such words and ends, and "lorem ipsum"', _INTEGER
            ),
            "c4_curly_bracket_lines": Signal(
                'the same with "{", and without "lorem ipsum" and "javascript"', _INTEGER
            ),
        },
    ),
    "fineweb": SignalSet(
        "Penedo et al. 2024, arXiv:2406.17557, section 3, additional heuristic filters",
        {
            "fineweb_punctuated_line_share": Signal(
                "lines that end in terminal punctuation of any script, over lines with text"
            ),
            "fineweb_short_line_share": Signal(
                f"lines of at most {SHORT_LINE} characters, over lines with text"
            ),
            "fineweb_duplicate_line_char_share": Signal(
                "characters in repetitions of lines, over characters but line feeds"
            ),
            "fineweb_newlines_per_word": Signal("line feeds over all words"),
        },
    ),
}


@declared
class SignalOptions(TextOptions):
    """Settings of `Signals`, in addition to `TextOptions`.

    Attributes
    ----------
    signals : list of str
        Sets of signals: "gopher", "repetition", "c4" or "fineweb". Default: all.
    language : str
        Language whose rules split words and sentences, by spaCy's code, such as "de" or "nb"; "xx"
        for any other that has spaces between words.
    prefix : str
        Text before the names of all output columns.
    """

    model: StrPath = field(default="", init=False)
    revision: str | None = field(default=None, init=False)
    cache_dir: StrPath | None = field(default=None, init=False)
    signals: str | Sequence[str] = setting(
        default=(*SETS,), convert=functools.partial(label_tuple, "signals", keep_order=True)
    )
    language: str = "en"
    prefix: str | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        for name in self.signals:
            check_choice("signals", name, tuple(SETS))
        if self.language not in LANGUAGES:
            raise ValueError(
                f"language={self.language!r} is not supported: pass one of {', '.join(LANGUAGES)}; "
                '"xx" is for other languages with spaces between words'
            )

    @property
    def columns(self) -> dict[str, Signal]:
        """Definitions of the selected signals, by column name without `prefix`, in order."""
        sets = dict.fromkeys(self.signals)
        return {name: own for key in sets for name, own in SETS[key].signals.items()}


class SignalModel(RuleModel):
    """Stand-in for a model, because signals (statistics of texts) are computed by rules."""

    identity = checkpoint = Identity("signals", "1", is_directory=False)  # type: ignore[assignment]


class SignalRunner(RuleRunner):
    """Runner that computes the selected signals (statistics) of texts, on the CPU."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Name of the package that splits words, whose version may change numbers, in a tuple."""
        return ("spacy",)

    def check_tokenizer(self) -> None:
        """Raise ModuleNotFoundError if spaCy is not installed."""
        if importlib.util.find_spec("spacy") is None:
            raise ModuleNotFoundError(
                f"Signals needs spacy, which is not here: {install('signals')}", name="spacy"
            )

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Compute the selected signals of distinct texts; outputs are float64 (texts, signals)."""
        from gpuclassify.tokenizing.prefetch import text_blocks

        columns = (*self.options.columns,)
        values = np.zeros((len(texts), len(columns)))
        with self.lease(*self.device_and_dtype()) as splitter:
            for start, stop in text_blocks(texts.char_counts, _BLOCK_CHARS, _BLOCK_CHARS):
                block = Block(texts[start:stop], splitter)
                for name in dict.fromkeys(self.options.signals):
                    for column, numbers in MEASURES[name](block).items():
                        values[start:stop, columns.index(column)] = numbers
                advance(stop - start)
        stats.windows += len(texts)
        ones, all_read = np.ones(len(texts), np.int64), np.ones(len(texts), np.float32)
        return Outputs(values, ones, all_read)

    def lease(self, device: object, dtype: object) -> contextlib.AbstractContextManager[Splitter]:
        """Return a context manager that yields a `Splitter`, which stays in memory afterwards."""
        from gpuclassify.inference.residency import MODELS

        self.check_tokenizer()
        language = self.options.language
        return MODELS.lease((self.resident_key, language), lambda: Splitter(language))


class SignalHead(Head):
    """Head that writes a column for each signal, a statistic of the text."""

    def fields(self) -> list[pa.Field]:
        """Return an Arrow field for each signal, named with the prefix in the settings."""
        prefix, columns = self.options.prefix or "", self.options.columns
        return [
            pa.field(
                prefix + name,
                signal.type,
                metadata=COUNT if pa.types.is_integer(signal.type) else None,
            )
            for name, signal in columns.items()
        ]

    def columns(self, values: np.ndarray) -> Columns:
        """Return each signal's values, float64 (texts,), by column name with the prefix."""
        return {field.name: values[:, index] for index, field in enumerate(self.fields())}


class Signals(TextMapper[SignalOptions]):
    """Mapper that adds the signals of published filters: numbers about a text, not decisions.

    To keep or drop rows, compare the columns in a `Select`. With the published
    thresholds, it decides like datatrove's filter: `GopherQualityFilter` for
    "gopher", `GopherRepetitionFilter` for "repetition", `C4QualityFilter` for
    "c4" and `FineWebQualityFilter` for "fineweb". Numbers are float64 or
    integers, so that thresholds hold exactly. spaCy splits words and
    sentences; no GPU is used.

    Examples
    --------
    >>> signals = Signals(["gopher", "fineweb"])
    >>> ddf = ddf.pipe(signals)  # doctest: +SKIP
    >>> ddf = ddf.pipe(Select("gopher_words >= 50"))  # doctest: +SKIP
    """

    Options = SignalOptions
    model_type = SignalModel
    runner_type = SignalRunner
    head_type = SignalHead
    first_setting = "signals"
    family = "signals"
    purpose = "numbers by which Gopher, C4 and FineWeb filter"
    licence = "none: there is no model"

    if TYPE_CHECKING:

        @takes(SignalOptions)
        def __init__(self, **settings: Any) -> None: ...
