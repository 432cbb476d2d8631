"""Lost texts are reported: files without texts, empty texts, and cut texts."""

import gzip
import json
from collections import Counter

import fasttext
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify import (
    DistributedDataClassifier,
    FileReader,
    LanguageIdentifier,
    ParquetWriter,
    Pipeline,
)
from gpuclassify.commands.cli import main
from gpuclassify.workers.run_context import collected_stats

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]
WORDS = ["theorem and proof", "click here, free offer", "größer über Straße"]
PRODUCTS = [{"sku": f"p-{row}", "price": row} for row in range(7)]


def lines(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def texts_of(count):
    return [{"id": row, "text": WORDS[row % 3]} for row in range(count)]


def write_packed(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(texts_of(5))))
    (folder / "shop.jsonl.gz").write_bytes(gzip.compress(lines(PRODUCTS)))


def write_large(folder):
    """Two files, cut into several parts."""
    (folder / "a.jsonl").write_bytes(lines(texts_of(60)))
    (folder / "shop.jsonl").write_bytes(lines([{**row, "about": "x" * 300} for row in PRODUCTS]))


def write_small(folder):
    """Many small files, of which several make one part."""
    for number in range(20):
        (folder / f"a-{number:02}.jsonl").write_bytes(lines(texts_of(3)))
    (folder / "shop.jsonl").write_bytes(lines(PRODUCTS))


def write_parquet(folder):
    pd.DataFrame(texts_of(5)).to_parquet(folder / "a.parquet")
    pd.DataFrame({"id": range(7), "text": [None] * 7}).to_parquet(folder / "shop.parquet")


@pytest.mark.parametrize("write", [write_packed, write_large, write_small, write_parquet])
def test_a_file_without_texts_is_named_with_its_rows(tmp_path, fasttext_model, write):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    part_bytes = 1_000 if write is write_large else None
    reader = FileReader(f"{tmp_path}/in", part_bytes=part_bytes)
    stages = [reader, LanguageIdentifier(model=fasttext_model("softmax"))]
    [shop] = map(str, (tmp_path / "in").glob("shop*"))

    plan = Pipeline(stages).plan(trial_seconds=None)
    summary = Pipeline([*stages, ParquetWriter(f"{tmp_path}/out")]).run()

    assert summary.textless == {shop: 7}
    report = json.loads((tmp_path / "out/_report/report.json").read_text())
    page = (tmp_path / "out/_report/report.html").read_text()
    for output in (*plan.warnings, repr(summary), *report["warnings"], page):
        assert f"no row has a text in {shop} (7 rows)" in " ".join(output.split())
    assert (len(plan.warnings), len(report["warnings"])) == (1, 1)


def test_files_that_all_have_texts_are_not_named(tmp_path, fasttext_model):
    (tmp_path / "a.jsonl").write_bytes(lines([*texts_of(3), {"id": 3}, {"id": 4, "text": None}]))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    stages = [
        FileReader(f"{tmp_path}/*.jsonl"),
        LanguageIdentifier(model=fasttext_model("softmax")),
    ]
    summary = Pipeline([*stages, ParquetWriter(f"{tmp_path}/out")]).run()
    assert summary.textless == {}
    assert Pipeline(stages).plan(trial_seconds=None).warnings == ()


def test_the_terminal_names_files_and_counts_what_is_dropped_by_kind_and_label(
    tmp_path, fasttext_model
):
    empty = [{"text": None}, {"text": ""}, {"text": ""}, *[{"text": " \n\t"}] * 3]
    (tmp_path / "a.jsonl").write_bytes(lines([*texts_of(9), *empty]))
    (tmp_path / "shop.jsonl").write_bytes(lines(PRODUCTS))
    model = str(fasttext_model("softmax"))
    words = ["--classifier", "language", "--model", model, "--filter-by", "hq"]
    paths = [f"{tmp_path}/*.jsonl", f"{tmp_path}/out"]
    found = CliRunner().invoke(main, ["classify", *paths, *words, "--workers", "1"])
    assert found.exit_code == 0, found.output
    output = " ".join(found.output.split())
    assert f"no row has a text in {tmp_path}/shop.jsonl (7 rows)" in output
    # Seven rows of the shop and one of the other file have null.
    assert "dropped 19 of 22 rows (null 8, empty 2, blank 3, label 6)" in output
    assert "22 rows read, 3 rows written, 0 texts truncated" in output
    library = fasttext.load_model(model)
    texts = [*WORDS * 3, "", "", *["   "] * 3]
    labels = Counter(library.predict(text)[0][0].removeprefix("__label__") for text in texts)
    assert labels["hq"] == 3
    for label, count in labels.items():
        row = next(line for line in found.output.splitlines() if f"│ {label} " in line)
        cells = [cell for cell in row.replace("│", " ").split() if cell.isdigit()]
        assert cells == [str(count), "3" if label == "hq" else "0"]  # labelled and written
    assert "tokens/s" not in found.output and "padding" not in found.output

    plan = CliRunner().invoke(main, ["plan", paths[0], *words, "--no-time"])
    assert f"no row has a text in {tmp_path}/shop.jsonl (7 rows)" in " ".join(plan.output.split())


CUT = ["word " * 30, "word " * 4, "word " * 31, None, "", "a b", "word " * 30]


@pytest.mark.parametrize("max_chars", [None, 10, 20, 150])
@pytest.mark.parametrize(
    ("kind", "template"),
    [
        *[(kind, None) for kind in ("fasttext", "encoder", "windows", "lines")],
        *[(kind, "{title}: {text}") for kind in ("encoder", "windows")],
    ],
)
def test_texts_that_max_chars_cuts_count_as_truncated(
    sequence_classifier, fasttext_model, kind, template, max_chars
):
    options = {"max_chars": max_chars}
    make, model = LanguageIdentifier, fasttext_model("softmax")
    if kind != "fasttext":
        options |= {"text_template": template, "max_seq_length": 16}
        options |= {} if kind == "encoder" else {"long_text": kind}
        make, model = DistributedDataClassifier, sequence_classifier("bert")
    frame = pd.DataFrame({"text": CUT, "title": "t"})

    with collected_stats() as counted:
        make(model=model, **options)(frame)
    with_column = make(model=model, truncated_field="cut", **options)(frame)

    shown = [None if t is None else (template or "{text}").format(text=t, title="t") for t in CUT]
    folded = {text[:max_chars] for text in shown if text is not None}
    is_cut = dict.fromkeys(folded, False)
    for text, cut in zip(shown, with_column["cut"], strict=True):
        if text is not None:
            is_cut[text[:max_chars]] |= bool(cut)
            assert bool(cut) or len(text) <= (max_chars or len(text))
    assert sum(run.truncated_texts for run in counted) == sum(is_cut.values())


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_without_texts_says_nothing_of_its_file(tmp_path, fasttext_model, order):
    rows = [{"id": n, "text": None, "about": "x" * 300} for n in range(10)]
    (tmp_path / "in.jsonl").write_bytes(lines([*rows, *texts_of(60)][::order]))
    reader = FileReader(f"{tmp_path}/in.jsonl", part_bytes=1_000)
    classifier = LanguageIdentifier(model=fasttext_model("softmax"))
    summary = Pipeline([reader, classifier, ParquetWriter(f"{tmp_path}/out")]).run()
    assert summary.parts > 3
    assert summary.textless == {} and summary.warnings == []
