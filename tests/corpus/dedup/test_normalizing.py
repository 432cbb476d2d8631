"""What is compared of texts: against values of datatrove and data-juicer, and plain Python."""

import itertools
import re
import string
import sys
import time
import unicodedata
from collections import defaultdict

import cloudpickle
import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from dask.tokenize import tokenize
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify import ExactDuplicates, FuzzyDuplicates, SemanticDuplicates
from gpuclassify.corpus.dedup.normalizing import PRESETS, STEPS, as_steps, normalized

# Of datatrove 0.10.1: texts, and what its ``simplify_text`` makes of them.
DATATROVE = [
    ("|$17.56||1|\n|$15.37||2599|", "0 0 0 0"),
    (
        "Copies\r\n\r\ndiffer\tin  Line\u2028Breaks, CASE and Punctuation!",
        "copies differ in line breaks case and punctuation",
    ),
    ("  Ünïcödé naïve Straße ﬁ ÅNGSTRÖM \u212b  ", "unicode naive straße ﬁ angstrom a"),
    ("ΟΔΟΣ ΣΟΦΟΣ, Σ. ς", "οδος σοφος σ ς"),
    ("İstanbul DİYARBAKIR ıI", "istanbul diyarbakir ıi"),
    ("1,5 1.5.5 ٣٫١٤ १२ 12,345,678 ２０２６ ½ ²", "0 0 0 0 0 0 0 0 ½ ²"),
    ("\u0301 a \u0301 b", "a  b"),
    ("0\u03000 \u2260 e\u0301 é", "00 = e e"),
    ("«quoted» „so“ ‘or’ — en–dash… ︙ ·", "quoted so ‘or en dash ︙ ·"),
    ("你好，请问你是谁。１：２", "你好 请问你是谁 0 0"),
    ("第九届会议\n2003年7月28日至8月8日\n1.", "第九届会议 0年0月0日至0月0日 0"),
    (
        "a\0b\x1cc\x85d\x7fe\xa0f\u200bg\u3000h\u2009i\ufeffj",
        "a b c d e f\u200bg h i\ufeffj",
    ),
    ("𝐁𝐨𝐥𝐝 🦄 हिन्दी עִבְרִית", "𝐁𝐨𝐥𝐝 🦄 \u0939\u093f\u0928\u0926\u0940 עברית"),
    ("ǅ ǈ ẞ \u212a \u2126", "ǆ ǉ ß k ω"),
    ("don't e-mail me@example.com/x_y?z=1#2", "don t e mail me example com x y z 0 0"),
]
# Characters that datatrove makes spaces of, beyond those of ASCII.
MARKS = "—”％１〈、━【「」，】；“《„’∶´．（–？！：～«〉》）。…►»"


def made(way, texts):
    return normalized(pa.array(texts, pa.large_string()), way).to_pylist()


@pytest.mark.contract
def test_datatroves_values():
    texts, expected = map(list, zip(*DATATROVE, strict=True))
    assert made(as_steps(["datatrove"]), texts) == expected


def is_mark(character):
    control = ord(character) < 32 or 127 <= ord(character) < 160
    return character in string.punctuation + MARKS or (control and character not in "\t\n")


PLAIN = {
    "unicode": lambda text: unicodedata.normalize("NFC", text),
    "case": str.lower,
    "digits": lambda text: re.sub(r"\d+(?:[.,،٫⎖⎗⎘]\d+)?", "0", text),
    "punctuation": lambda text: re.sub(
        " +", " ", "".join(" " if is_mark(each) else each for each in text)
    ),
    "white_space": lambda text: " ".join(text.split()),
    "accents": lambda text: "".join(
        each for each in unicodedata.normalize("NFD", text) if unicodedata.category(each) != "Mn"
    ),
}


def characters():
    """Characters of whose category Python's Unicode and Arrow's, of two versions, say the same."""
    by_category = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        by_category[unicodedata.category(chr(code))].append(chr(code))
    for category, found in by_category.items():
        if category not in ("Cn", "Cs", "Co"):
            is_same = pc.match_substring_regex(pa.array(found), rf"(?s)^\p{{{category}}}$")
            yield from itertools.compress(found, is_same.to_pylist())


ASSIGNED = sorted(characters())


def test_nearly_all_characters_are_compared():
    assert len(ASSIGNED) > 140_000


@pytest.mark.parametrize("step", STEPS)
def test_each_step_is_that_of_plain_python_for_every_character(step):
    texts = [f"a{each}b" for each in ASSIGNED]
    assert made((step,), texts) == [PLAIN[step](text) for text in texts]


@given(st.lists(st.text("aΣσ. \n\t1,٣\u0301é\u00a0İ-" + "".join(ASSIGNED[::997]), min_size=1)))
def test_steps_of_random_texts(texts):
    for step in ("unicode", "case", "digits", "white_space", "accents"):
        expected = [PLAIN[step](text) or text for text in texts]
        assert made((step,), texts) == expected


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("repeated", [" ", "1", "1.", "e\u0301", "Σ", "!", "\u0300", "a "])
def test_a_text_of_megabytes_takes_linear_time(step, repeated):
    started = time.process_time()
    made((step,), [repeated * 2_000_000])
    assert time.process_time() - started < 5


def test_nothing_left_leaves_the_text_and_null_and_empty_stay():
    texts = ["!?", "...", None, "", " \n", "\u0301", "A!"]
    assert made(as_steps(["datatrove"]), texts) == [*texts[:-1], "a"]
    frame = pd.DataFrame({"id": range(7), "text": ["!?", "?!", None, "", "!?", "", None]})
    assert ExactDuplicates(normalize="datatrove")(frame)["id"].tolist() == [0, 4]


COPIES = ["One text,\nof TWO lines.", "one text, of two lines.", "One  text\r\nof two Lines"]
WORDS = " and words of its own that make it long enough to be looked at by n-grams" * 3
WAYS = {
    "exact": ExactDuplicates,
    "fuzzy": lambda **options: FuzzyDuplicates(min_similarity=1, **options),
    "characters": lambda **options: FuzzyDuplicates(
        min_similarity=1, compare_by="characters", **options
    ),
    "unverified": lambda **options: FuzzyDuplicates(verify=False, threshold=1, **options),
}


@pytest.mark.parametrize("normalize", [None, "basic", "datatrove", str.lower])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_copies_go_and_texts_stay_as_they_are(way, normalize, frames):
    texts = [text + WORDS for text in COPIES] + [None, "", "another" + WORDS]
    frame = pd.DataFrame({"id": range(6), "text": texts})
    duplicates = way(id_field="id", normalize=normalize, keep_by="length")
    copies = {"basic": [0, 1], "datatrove": [0, 1, 2]}.get(normalize, [])
    if way is WAYS["fuzzy"] and normalize is not None:
        copies = [0, 1, 2]  # words are the same whatever stands between them
    longest = max(copies, key=lambda row: (len(COPIES[row]), -row), default=None)
    stays = [row for row in range(6) if row not in copies or row == longest]
    for dataset in (frames.lazy(frame), frames.plain(frame)):
        found = frames.to_pandas(duplicates(dataset))
        assert sorted(found["id"]) == copies
        kept = frames.to_pandas(duplicates.remove(dataset))
        pd.testing.assert_frame_equal(kept, frame.iloc[stays], check_dtype=False)


@pytest.mark.parametrize("way", ["exact", "fuzzy"])
def test_an_earlier_corpus_and_sources_are_compared_normalized(way):
    texts = [text + WORDS for text in COPIES]
    frame = pd.DataFrame({"id": range(3), "text": texts, "source": ["a", "a", "b"]})
    within = WAYS[way](id_field="id", normalize="datatrove", by="source")
    assert within(frame)["id"].tolist() == [0, 1]
    against = WAYS[way](id_field="id", normalize="datatrove")
    assert against.remove(frame.iloc[:1], against=frame.iloc[1:]).empty


def test_a_summary_shows_the_text_itself():
    frame = pd.DataFrame({"id": range(3), "text": [text + WORDS for text in COPIES]})
    for way in (WAYS["exact"], WAYS["fuzzy"]):
        (group,) = way(id_field="id", normalize="datatrove").summarize(frame).largest
        assert group.beginning.startswith("One text,\nof TWO")


# Of data-juicer's own tests of exact deduplication: texts, and which of them stay.
HAPPY = ["Today is Sunday and it's a happy day!", "Do you need a cup of coffee?"]
HAPPY += ["Today is sunday and it's a happy day!", "Today is sunday and it's a happy day?"]
HAPPY += ["This paper proposed a novel method on LLM pretraining."] * 2


def as_data_juicer(text):
    """Lower case without white space, digits and punctuation of ASCII."""
    return re.sub(rf"\s+|\d+|[{re.escape(string.punctuation)}]", "", text.lower())


@pytest.mark.parametrize(
    ("normalize", "stays"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("basic", [0, 1, 3, 4]),
        (["case", "punctuation", "white_space", "digits"], [0, 1, 4]),
        (as_data_juicer, [0, 1, 4]),
    ],
)
def test_what_data_juicer_keeps_stays(normalize, stays):
    frame = pd.DataFrame({"text": HAPPY})
    assert [*ExactDuplicates(normalize=normalize).remove(frame).index] == stays


def test_names_are_steps_in_one_order():
    assert PRESETS["basic"] == as_steps(["white_space", "case", "unicode"])
    assert ExactDuplicates(normalize="basic") == ExactDuplicates(normalize=[*PRESETS["basic"]])
    both = FuzzyDuplicates(normalize=["datatrove", "unicode"])
    assert both.normalize == tuple(STEPS)
    assert "normalize=('case', 'digits'" in repr(FuzzyDuplicates(normalize="datatrove"))
    assert "normalize=str.lower" in repr(ExactDuplicates(normalize=str.lower))
    assert ExactDuplicates(normalize=[]) == ExactDuplicates()
    with pytest.raises(ValueError, match="normalize='lower' is not one of 'basic', 'datatrove'"):
        ExactDuplicates(normalize=["lower"])
    with pytest.raises(TypeError, match="is a set without order: pass a list"):
        ExactDuplicates(normalize={"case", "accents"})
    with pytest.raises(ValueError, match="normalize=3 is not one of 'basic'"):
        ExactDuplicates(normalize=3)
    with pytest.raises(TypeError, match="normalize"):
        SemanticDuplicates(embedding_field="vector", normalize="basic")


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (len, "1"),
        (lambda text: None, "None"),
        (lambda text: text if "a" in text else None, "None"),
        (str.encode, "b'a'"),
        (lambda text: b"[" + bytes([255]), r"b'\[\\xff'"),
        (lambda text: bytearray(b"a"), r"bytearray\(b'a'\)"),
    ],
)
def test_a_function_that_makes_no_text_is_told(function, value):
    message = rf"normalize= has to return a text for each text, and returned {value}$"
    with pytest.raises(TypeError, match=message):
        ExactDuplicates(normalize=function)(pd.DataFrame({"text": ["a", "b", None]}))


def function(code):
    """A function of a script or notebook, which no process can import."""
    names = {"__name__": "__main__"}
    exec(f"def change(text):\n    return {code}", names)
    return names["change"]


@pytest.mark.parametrize("way", [ExactDuplicates, FuzzyDuplicates])
def test_keys_of_dask_tell_functions_apart_by_their_code(way):
    ways = [None, "basic", "case", function("text[:9]"), function("text[:8]")]
    settings = [way(normalize=normalize) for normalize in ways]
    assert len({tokenize(each) for each in settings}) == len(ways)
    same = way(normalize=function("text[:9]"))
    assert tokenize(same) == tokenize(settings[3])
    frame = dd.from_pandas(pd.DataFrame({"text": ["a", "b"]}), npartitions=1)
    assert same(frame)._name == settings[3](frame)._name != settings[4](frame)._name
    again = cloudpickle.loads(cloudpickle.dumps(same))
    assert tokenize(again) == tokenize(same)


def test_curators_normalize_text():
    for way in (ExactDuplicates, FuzzyDuplicates):
        assert way(normalize_text=True) == way(normalize=["case", "white_space"])
        assert way(normalize_text=False) == way()
