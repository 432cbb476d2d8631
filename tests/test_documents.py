"""What the README says of the classifiers, and the guarantees of their tests, is true."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuclassify.classifiers import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 35  # of a sentence
NOT_PROSE = re.compile(r"^```.*?^```$|^<!--.*?-->$|^\|.*?$|^\([\w-]+\)=$", re.MULTILINE | re.DOTALL)
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[*:-]|\d+\.) |#)")
SENTENCE_END = re.compile(r"(?<=[.!?])[*)\"]*\s+(?=[^a-z])|\s·\s")
WORD = re.compile(r"(?<!\S)(?!\W*CODE)\S+")


def sentences_of(page):
    """Yield the sentences of a page, CODE for code, without tables and targets of links."""
    text = NOT_PROSE.sub("\n\n", page.read_text(encoding="utf-8"))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "CODE", text))
    for paragraph in PARAGRAPH.split(text):
        yield from SENTENCE_END.split(" ".join(paragraph.split()))


@pytest.mark.contract
def test_no_sentence_of_a_page_is_long():
    pages = [ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        if page.parent.name != "reference":  # its texts are docstrings
            long = [s for s in sentences_of(page) if len(re.findall(WORD, s)) > MOST_WORDS]
            assert not long, f"{page}: more than {MOST_WORDS} words: {long[0]}"


def test_the_readme_table_names_each_classifier_with_its_model_and_licence():
    for name, family in FAMILIES.items():
        begins = f"| `{family.__qualname__}`<br>`{name}` |"
        (row,) = [line for line in README.splitlines() if line.startswith(begins)]
        assert family.licence in row or "model's" in row
        assert family.defaults.get("model", "model=") in row
        columns = [v for k, v in family.defaults.items() if k.endswith("label_field")]
        assert all(column.removesuffix("-score-label") in row for column in columns)


def test_each_guarantee_has_a_test_of_the_contract():
    """Of the tests that it names, at least one is in ``make test``."""
    text = (ROOT / "docs/how/guarantees.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", text, re.MULTILINE)
    named = {number: re.findall(r"`(tests/[^`]+)`", cell) for number, cell in rows}
    assert [*named] == [str(number) for number in range(1, len(named) + 1)]
    paths = sorted({path for paths in named.values() for path in paths})
    selection = re.search(r"^HERE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", f"{selection} and contract"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *paths], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    tests = done.stdout.splitlines()
    without = [n for n, paths in named.items() if not any(t.startswith((*paths,)) for t in tests)]
    assert not without, f"mark a test of these guarantees with pytest.mark.contract: {without}"


def test_the_page_for_coding_agents_is_short_and_names_what_exists():
    agents = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"^make ([\w-]+)", agents, re.MULTILINE)} <= {*targets}
    assert all((ROOT / path).exists() for path in re.findall(r"tests/\S+\.py", agents))
    assert len(agents.splitlines()) <= 40


@pytest.fixture(scope="module")
def tables():
    """The module that writes tables and reference into pages."""
    paths = [str(ROOT / "docs"), str(ROOT / "tests")]
    sys.path[:0] = paths
    try:
        yield importlib.import_module("tables")
    finally:
        for path in paths:
            sys.path.remove(path)


@pytest.mark.contract
def test_pages_hold_the_tables_of_today(tables):
    stale = [str(path) for path, text, today in tables.pages() if text != today]
    assert not stale, f"run `make tables`: {stale}"


def test_no_reference_of_a_page_is_empty():
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        marks = re.findall(r"^<!-- reference: .*\n", text, re.MULTILINE)
        signatures = re.findall(r"^<!-- reference: .*\n\n```none\n\w+\(", text, re.MULTILINE)
        assert len(marks) == len(signatures), page


@pytest.mark.parametrize("between", ["", "\n", "\n\n", "\nof another day\n\n"])
def test_marks_are_filled_however_they_are_spaced(tables, between):
    for mark, words in (("reference: gpuclassify.agreement", "agreement(dataset"),
                        ("table: classifiers", "| class |")):  # fmt: skip
        filled = tables.written(f"# A\n\n<!-- {mark} -->\n{between}<!-- end -->\n", "guide/a")
        assert words in filled and "another day" not in filled
        assert tables.written(filled, "guide/a") == filled


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ("<!-- reference: gpuclassify.agreement --> \n<!-- end -->", "is no mark"),
        ("<!--table: classifiers -->\n<!-- end -->", "is no mark"),
        ("<!-- table: classifiers -->\n", "is no mark"),
        ("<!-- end -->", "is no mark"),
        ("<!-- table: scale -->\n<!-- table: faults -->\n<!-- end -->", "no <!-- end --> before"),
    ],
)
def test_marks_that_would_stay_empty_are_refused(tables, marks, reason):
    with pytest.raises(ValueError, match=reason):
        tables.written(marks, "guide/a")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
