"""What labels say of spans, by their scheme."""

import numpy as np
import pytest

from gpuclassify import SpanClassifier
from gpuclassify.classifiers.spans.tags import Predictions, scheme_of, tags_of


def spans_of(labels, tags, scheme=None):
    """Label, first token and end of the spans of one text's tags, a token a character."""
    places = np.arange(len(tags))
    codes = np.array([labels.index(tag) for tag in tags])
    kinds = tags_of(labels, scheme)
    tokens = Predictions(
        np.zeros_like(places), places, places + 1, codes, np.ones(len(tags), np.float32)
    )
    spans = kinds.group(tokens)
    return [
        (kinds.names[code], int(start), int(end))
        for code, start, end in zip(spans.labels, spans.starts, spans.ends, strict=True)
    ]


IOB = ["O", "B-X", "I-X", "B-Y", "I-Y"]
BIOES = ["O", *(f"{letter}-{name}" for name in "XY" for letter in "BIES")]
BILOU = ["O", *(f"{letter}-{name}" for name in "XY" for letter in "BILU")]
CASES = [
    ("iob2", IOB, "B-X I-X O B-X B-X I-Y", [("X", 0, 2), ("X", 3, 4), ("X", 4, 5), ("Y", 5, 6)]),
    # In IOB1 a span begins with I, and with B only behind one of the same label.
    ("iob2", IOB, "I-X I-X B-X I-X I-Y O", [("X", 0, 2), ("X", 2, 4), ("Y", 4, 5)]),
    ("iob2", ["O", "I-X", "I-Y"], "I-X I-X I-Y O I-X", [("X", 0, 2), ("Y", 2, 3), ("X", 4, 5)]),
    ("bioes", BIOES, "B-X I-X E-X S-X S-X O", [("X", 0, 3), ("X", 3, 4), ("X", 4, 5)]),
    (
        "bioes",
        BIOES,
        "B-X E-X I-X E-X S-Y B-Y",
        [("X", 0, 2), ("X", 2, 4), ("Y", 4, 5), ("Y", 5, 6)],
    ),
    (
        "bilou",
        BILOU,
        "U-X U-X B-Y I-Y L-Y B-Y L-Y",
        [("X", 0, 1), ("X", 1, 2), ("Y", 2, 5), ("Y", 5, 7)],
    ),
    ("plain", ["O", "X", "Y"], "X X Y O X", [("X", 0, 2), ("Y", 2, 3), ("X", 4, 5)]),
    ("plain", ["O", "E-MAIL", "S-BAHN"], "E-MAIL E-MAIL O", [("E-MAIL", 0, 2)]),
    ("plain", ["X", "Y"], "X X Y", [("X", 0, 2), ("Y", 2, 3)]),
]


@pytest.mark.parametrize(("scheme", "labels", "tags", "expected"), CASES)
def test_the_scheme_shows_in_the_labels(scheme, labels, tags, expected):
    assert scheme_of(labels) == scheme
    assert spans_of(labels, tags.split()) == expected
    assert spans_of(labels, tags.split(), scheme) == expected


def test_a_text_ends_a_span():
    kinds = tags_of(IOB)
    tokens = Predictions(
        np.array([0, 0, 1]), np.array([0, 2, 0]), np.array([1, 3, 1]), np.array([1, 2, 2]),
        np.array([0.5, 1.0, 0.25], np.float32),
    )  # fmt: skip
    spans = kinds.group(tokens)
    assert (spans.text_of.tolist(), spans.starts.tolist()) == ([0, 1], [0, 0])
    assert (spans.ends.tolist(), spans.scores.tolist()) == ([3, 1], [0.75, 0.25])


def test_another_scheme_is_read_if_asked_and_refused_where_no_label_shows_it():
    assert spans_of(["O", "B-X", "I-X"], ["B-X", "I-X"], "plain") == [("B-X", 0, 1), ("I-X", 1, 2)]
    assert spans_of(IOB, ["B-X", "I-X"], "iob1") == [("X", 0, 2)]
    with pytest.raises(ValueError, match=r'scheme="bilou" needs labels such as B-PER'):
        tags_of(["O", "X"], "bilou")
    with pytest.raises(ValueError, match="scheme='iob' is not one of"):
        SpanClassifier(model="a/b", scheme="iob")


@pytest.mark.parametrize("aggregation", ["simple", "none"])
def test_bioes_of_a_model(token_classifier, aggregation):
    labels = ("O", "B-X", "I-X", "E-X", "S-X")
    mapper = SpanClassifier(
        model=token_classifier(labels=labels), aggregation=aggregation, autocast=False
    )
    found = mapper(["one more text of several words that is read"] * 2)["spans"]
    assert mapper.labels == (["X"] if aggregation == "simple" else list(labels[1:]))
    assert {span["label"] for row in found for span in row} <= set(mapper.labels)
