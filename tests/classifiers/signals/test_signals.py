"""Signals against datatrove's filters, words and n-grams, on the same texts."""

import importlib.util
import random

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters import gopher_repetition_filter as datatrove_repetition
from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION, split_into_words
from datatrove.utils.word_tokenizers import SpaCyTokenizer

from examples.demo.corpus import collect_documents
from gpuclassify import Signals
from gpuclassify.classifiers.signals import words
from gpuclassify.classifiers.signals.characters import PUNCTUATION, TERMINAL
from gpuclassify.classifiers.signals.measures import DUPLICATE, TOP
from gpuclassify.classifiers.signals.signals import SETS
from gpuclassify.classifiers.signals.words import LANGUAGES, Splitter
from gpuclassify.commands.cli import main
from tests.classifiers.signals.conditions import conditions
from tests.dirty_crawl import SENTENCES

FILTERS = {
    "gopher": GopherQualityFilter,
    "repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}
SLOW = pytest.mark.slow
# Parts of lines that the filters look for, with the white space that ends lines and words.
PIECES = [
    *(
        "lorem ipsum",
        "JavaScript",
        "{",
        "uses cookies",
        "[12]",
        "[edit]",
        "#",
        "...",
        "…",
        "• ",
        "- ",
    ),
    *("x" * 1001, "e.g.", "don't", ": )", ":-)", "12:30", "I said 'no.'", '"Why?"', "。", "naïve"),
    *("a b a b a b", "IS_ALPHA", "\x1c", "\x85", "\u2028", "\u3000", "\t", "…", "ß", "１", "🙂"),
]
GAPS = [" ", " ", " ", "\n", "\n\n", "\n\n\n", "  ", ".\n", ". ", "! "]


def made_texts(count, language, seed=0):
    """Texts of a few sentences, with repetitions and odd pieces, near every threshold."""
    rng = random.Random(seed)
    lines = [line.replace("{n}", "40") for kind in SENTENCES[language] for line in kind]
    texts = []
    for _ in range(count):
        sentences, odd = rng.sample(lines, rng.randint(1, 9)), rng.random() ** 3
        parts = [
            rng.choice(PIECES if rng.random() < odd else sentences) + rng.choice(GAPS)
            for _ in range(rng.randint(1, 30))
        ]
        texts.append("".join(parts))
    return texts


TEXTS = [
    *(document.text for document in collect_documents(max_documents=900)),
    *made_texts(900, "en"),
    *("", " ", "\n", "\n\n \n", "word", "a " * 49, "the of " * 25, "# " * 10 + "the of word " * 30),
    *("the of words " * 30 + "\n- a" * n for n in (8, 9, 10)),
    *("x" * 10_000, "( " * 300, "same line here.\n" * 40, "One. " * 5, "One two three. " * 5),
]


@pytest.fixture(scope="module")
def frame():
    split_into_words("x IS_ALPHA", "en")  # datatrove keeps the word in the first text alone
    return pd.DataFrame({"text": TEXTS})


@pytest.fixture(scope="module")
def signals(frame):
    return Signals()(frame)


@pytest.mark.contract
@pytest.mark.parametrize("name", FILTERS)
def test_decisions_are_datatroves(frame, signals, name):
    kept = signals.index.isin(conditions()[name](signals).index)
    decide = FILTERS[name]().filter
    expected = [decide(Document(text=text, id="")) for text in TEXTS]
    expected = [made if isinstance(made, bool) else made[0] for made in expected]
    assert [text for text, a, b in zip(TEXTS, kept, expected, strict=True) if a != b] == []
    assert 50 < sum(expected) < len(TEXTS) - 50


@pytest.mark.parametrize("language", ["de", "fr", "es", "it"])
def test_decisions_are_datatroves_in_other_languages(language):
    texts = made_texts(150, language, seed=1)
    signals = Signals(language=language)(pd.DataFrame({"text": texts}))
    split_into_words("x IS_ALPHA", language)
    for name, condition in conditions().items():
        decide = FILTERS[name](language=language).filter
        made = [decide(Document(text=text, id="")) for text in texts]
        expected = [one if isinstance(one, bool) else one[0] for one in made]
        assert signals.index.isin(condition(signals).index).tolist() == expected


def test_repetitions_are_datatroves_numbers(signals):
    for text, row in zip(TEXTS, signals.to_dict("records"), strict=True):
        split, chars = split_into_words(text, "en"), max(1, len(text))
        for n in TOP:
            grams = datatrove_repetition.get_n_grams(split, n)
            top = datatrove_repetition.find_top_duplicate(grams) if grams else 0
            assert row[f"repetition_top_{n}_gram_share"] == top / chars
        for n in DUPLICATE:
            repeated = datatrove_repetition.find_all_duplicate(split, n)
            assert row[f"repetition_duplicate_{n}_gram_share"] == repeated / chars


def test_characters_are_datatroves():
    assert set(TERMINAL) == TERMINAL_PUNCTUATION
    assert PUNCTUATION == PUNCTUATION_SET


def pieces_of(language, tokenizer):
    """Abbreviations and emoticons of a language, halves of them, and signs around them."""
    rules = sorted(tokenizer.tokenizer.tokenizer.rules)
    spaced = [rule for rule in rules if len(rule.split()) > 1]
    chosen = random.Random(language).sample(rules, min(200, len(rules)))
    halves = [half for rule in chosen for half in (rule[: len(rule) // 2], rule[len(rule) // 2 :])]
    signs = [*":;)(-.,'!?a3#=]><*_OD\"", "don't", "e.g.", ":-", "x/y", "http://a.b/c"]
    return [piece for piece in [*chosen, *3 * spaced, *halves, *3 * signs] if piece.strip()]


@pytest.mark.parametrize(
    "language",
    [one if one in ("en", "ru", "xx") else pytest.param(one, marks=SLOW) for one in LANGUAGES],
)
def test_words_and_sentences_are_spacys(language):
    """Of texts that are split chunk by chunk, as of whole texts."""
    tokenizer, rng = SpaCyTokenizer(language), random.Random(language)
    pieces = pieces_of(language, tokenizer)
    gaps = ["", "", " ", " ", " ", "  ", "\n", "\t", "\u3000"]
    texts = [
        "".join(rng.choice(pieces) + rng.choice(gaps) for _ in range(rng.randint(1, 25)))
        for _ in range(400)
    ]
    splitter = Splitter(language)
    found = splitter.words(texts)
    for index, text in enumerate(texts):
        ids = found.ids[found.starts[index] : found.starts[index + 1]]
        assert [found.names[token] for token in ids] == tokenizer.word_tokenize(text), text
    lines = [line.strip() for line in texts if line.strip()]
    expected = [len(tokenizer.span_tokenize(line)) for line in lines]
    assert splitter.count_sentences(lines).tolist() == expected
    assert len(set(expected)) > 1


def test_known_words_change_nothing(monkeypatch, signals):
    """Neither forgotten words nor small blocks."""
    monkeypatch.setattr(words, "_MOST_CHARS", 1000)
    monkeypatch.setattr("gpuclassify.classifiers.signals.signals._BLOCK_CHARS", 5000)
    mapper = Signals()
    mapper.teardown()
    found = mapper(pd.DataFrame({"text": TEXTS[::-1]}))
    pd.testing.assert_frame_equal(found[::-1].reset_index(drop=True), signals)


def test_columns_are_the_sets_with_their_prefix():
    found = Signals(["c4", "gopher", "c4"], prefix="body_", text_field="body")(
        pd.DataFrame({"body": ["One two three.", None]})
    )
    names = [f"body_{name}" for key in ("c4", "gopher") for name in SETS[key].signals]
    assert found.columns.tolist() == ["body", *names]
    assert found["body_c4_sentences"].tolist() == [1, pd.NA]
    assert np.isnan(found["body_gopher_mean_word_length"][1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"signals": ["gopher", "dolma"]}, "signals='dolma' is not one of 'gopher', 'repetition'"),
        ({"signals": []}, "signals=\\[\\] names no"),
        ({"language": "th"}, "language='th' is not supported: pass one of af, am"),
        ({"language": "zh"}, "language='zh' is not supported"),
        ({"prefix": ""}, "prefix=''"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Signals(**settings)


def test_without_spacy_the_call_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpuclassify\[signals\]'"):
        Signals()(pd.DataFrame({"text": ["a text"]}))


def test_the_command_writes_signals(tmp_path):
    pd.DataFrame({"text": TEXTS[:5]}).to_parquet(tmp_path / "in.parquet")
    done = CliRunner().invoke(main, [
        *("classify", str(tmp_path / "in.parquet"), str(tmp_path / "out")),
        *("--classifier", "signals", "--set", "signals=c4"),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    found = pd.read_parquet(tmp_path / "out")
    assert found["c4_sentences"].tolist() == Signals("c4")(TEXTS[:5])["c4_sentences"].tolist()
