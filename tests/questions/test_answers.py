"""Answers are read by the published rule, and never later than they are decided."""

import pytest

from gpuclassify.questions.answers import ANSWER_LABELS, Verdict, read_answer

CODES = [f"O{number}" for number in range(1, 14)]
ANSWERS = [
    "safe",
    " safe",
    "safe\n",
    "safe\nO3",
    "safer",
    "unsafe",
    "unsafe\n",
    "unsafe\nO1",
    "unsafe\n O13 ",
    "unsafe\nO1\nO2",
    "unsafe\nO3, O13",
    "unsafe\nO3,O3,O7,O99",
    "unsafe\nO3,",
    "unsafe\nO14",
    "unsafe\nO3 O4",
    "unsafe\n,O3",
    "unsafe\nviolence",
    "unsafely\nO1",
    "Unsafe\nO1",
    "\nsafe",
    "",
    "   ",
    "I cannot say",
]


def published_rule(answer):
    """The rule as documented for the known tools: one category exactly, or unknown."""
    lines = answer.split("\n")
    if lines[0].strip() == "safe":
        return "safe"
    if lines[0].strip() == "unsafe" and len(lines) > 1 and lines[1].strip() in CODES:
        return lines[1].strip()
    return "unknown"


def test_the_labels_are_the_published_ones():
    assert ("unknown", "safe", *CODES) == ANSWER_LABELS


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_complete_answer_is_read_like_the_known_tools_do(answer):
    assert read_answer(answer, True).label == published_rule(answer)


@pytest.mark.parametrize(
    ("answer", "label", "categories"),
    [
        ("unsafe\nO3, O13", "unknown", ("O3", "O13")),
        ("unsafe\nO3,O3,O7,O99", "unknown", ("O3", "O7")),
        ("unsafe\nO3,", "unknown", ("O3",)),
        ("unsafe\n,O3", "unknown", ()),
        ("unsafe\nO99,O3", "unknown", ()),
        ("safe", "safe", ()),
        ("unsafe\nO2", "O2", ("O2",)),
    ],
)
def test_several_categories_are_kept(answer, label, categories):
    assert read_answer(answer, True) == Verdict(label, categories)


@pytest.mark.parametrize("needs_all", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_decided_early_is_what_the_whole_answer_says(answer, needs_all):
    whole = read_answer(answer, True)
    for end in range(len(answer) + 1):
        early = read_answer(answer[:end], False, needs_all)
        if early is None:
            continue
        assert early.label == whole.label
        if needs_all:
            assert early == whole
        assert read_answer(answer[:end], True).label == whole.label


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("safe\n...", 5),
        ("unsafe\nO3\n...", 10),
        ("unsafe\nO3, O4", 10),
        ("unsafe\nO14", 10),
        ("unsafe\nX", 8),
        ("The text", 1),
        ("sab", 3),
    ],
)
def test_nothing_is_decoded_after_the_decision(answer, end):
    undecided = [n for n in range(len(answer) + 1) if read_answer(answer[:n], False) is None]
    assert undecided == list(range(end))


def test_one_digit_may_become_two():
    assert read_answer("unsafe\nO1", False) is None
    assert read_answer("unsafe\nO1", True) == Verdict("O1", ("O1",))
    assert read_answer("unsafe\nO1\n", False) == Verdict("O1", ("O1",))
