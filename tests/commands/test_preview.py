"""``gpuclassify preview`` and ``models``: a look before a job, in a terminal and in a pipe."""

import gzip
import io
import json
import subprocess
import sys

import pandas as pd
import pyarrow.json as paj
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import DomainClassifier, NemotronSafetyGuardClassifier, PromptClassifier
from gpuclassify.classifiers import FAMILIES
from gpuclassify.classifiers.questions.published_guards import QWEN3GUARD_HARMS
from gpuclassify.classifiers.questions.taxonomy import TAXONOMY
from gpuclassify.commands.cli import main
from gpuclassify.commands.preview import first_texts
from gpuclassify.jobs.input.readers import FileReader, first_rows
from tests.replicas import sample_texts, write_celadon
from tests.replicas.chat_models import write_chat_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ODD = "a\nb \x1b[31mc \x9b2J \u202e[bold]"
TEXTS = [*sample_texts(30, max_words=60), None, "", ODD, "word " * 5_000]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    frame = pd.DataFrame({"text": TEXTS[::-1], "id": range(len(TEXTS))})
    frame.to_json(folder / "in.jsonl", orient="records", lines=True)
    (folder / "in.jsonl.gz").write_bytes(gzip.compress((folder / "in.jsonl").read_bytes()))
    frame.to_parquet(folder / "in.parquet", row_group_size=5)
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return str(write_chat_model(tmp_path_factory.mktemp("chat"), "qwen2"))


@pytest.fixture
def run(checkpoint, monkeypatch):
    """The command, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words, family="domain", **options):
        model = ["--classifier", family, "--model", str(checkpoint(family))]
        return CliRunner().invoke(main, ["preview", *map(str, words), *model], **options)

    return run


def test_each_text_has_a_line_with_label_and_confidence(run, files, checkpoint):
    done = run(files / "in.jsonl", "-n", 4)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) == 80
    model = DomainClassifier(model=checkpoint("domain"), confidence_field="confidence")
    expected = model(TEXTS[::-1][:4])
    for text, label, confidence in zip(
        ["word word", r"a\nb \x1b[31mc \x9b2J \u202e[bold]", "", "null"],
        expected["domain_pred"].fillna("null"),
        expected["confidence"],
        strict=True,
    ):
        cell = "null" if label == "null" else f"{label} {confidence:.3f}"
        assert [line for line in lines if text in line and cell in line], cell
    assert not {"\x1b", "\x9b", "\u202e"} & set(done.stdout)
    assert lines[-1] == "4 rows read, 4 shown"


def test_filters_drop_rows_and_lists_are_named(run, files):
    done = run(files / "in.jsonl", "-n", 10, "--min-confidence", 1, "--score-field", "scores")
    assert done.exit_code == 0, done.output
    assert "10 rows read, 0 shown" in done.stdout
    assert "Not shown: scores; --json prints all" in done.stdout


@pytest.mark.parametrize("family", ["prompt-task-complexity", "fineweb-edu", "content-type"])
def test_every_classifier_fits_80_columns(run, files, family):
    done = run(files / "in.parquet", "-n", 5, family=family)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    table = [line for line in lines if line[0] in "┏┃┡│└"]
    assert {len(line) for line in table} == {80}


def test_a_question_is_shown_once_as_written_with_answers_and_probabilities(
    files, chat_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "ask.txt").write_text("Is it \u202e an ad?\n\n{text}\n")
    options = ["--classifier", "prompt", "--model", chat_model, "--answers", "yes, no"]
    options += ["--prompt-file", str(tmp_path / "ask.txt"), "--label-field", "is_ad"]
    done = CliRunner().invoke(main, ["preview", str(files / "in.jsonl"), "-n", "4", *options])
    assert done.exit_code == 0, done.output
    asks = PromptClassifier(
        model=chat_model,
        prompt="Is it \u202e an ad?\n\n{text}",
        answers=["yes", "no"],
        label_field="is_ad",
        confidence_field="confidence",
    )
    expected = asks(pd.DataFrame({"text": TEXTS[::-1][:4]}))
    for label, confidence in zip(expected["is_ad"], expected["confidence"], strict=True):
        assert ("null" if pd.isna(label) else f"{label} {confidence:.3f}") in done.stdout
    lines = ["<|im_start|>user", r"Is it \u202e an ad?", "", "word " * 60 + "...<|im_end|>"]
    shown = "\n    ".join([f"The first prompt of {chat_model}:", *lines])
    assert done.stdout.startswith(f"{shown}\n    <|im_start|>assistant\n")
    assert done.stdout.count("The first prompt") == 1


def test_lists_of_labels_are_shown_without_brackets(files, chat_model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["-n", "3", "--classifier", "nemotron-safety-guard", "--model", chat_model]
    done = CliRunner().invoke(main, ["preview", str(files / "in.jsonl"), *options])
    assert done.exit_code == 0, done.output
    found = NemotronSafetyGuardClassifier(model=chat_model)(
        pd.DataFrame({"text": TEXTS[::-1][:3]})
    )["nemotron_categories"]
    assert any(len(own) > 0 for own in found) and not any("[" in own for own in found)
    for own in found:
        assert ", ".join(own) in " ".join(done.stdout.replace("│", " ").split())


def test_json_lines_are_whole(run, files):
    done = run(
        files / "in.jsonl", "-n", 3, "--json", "--score-field", "s", "--score-format", "struct"
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["text"] for row in rows] == TEXTS[::-1][:3]
    assert rows[0]["s"][rows[0]["domain_pred"]] == rows[0]["domain_pred_confidence"]


@pytest.mark.parametrize(
    "given", ["One text.\n\nAnother.\r\n", '{"text": "One text."}\n\n{"text": "Another."}']
)
def test_standard_input_is_json_or_plain_lines(run, given):
    done = run("-", "--json", input=given)
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [
        "One text.",
        "Another.",
    ]


@pytest.mark.parametrize(
    ("words", "given", "cure"),
    [
        (["-", "in.jsonl"], "", "'-' is standard input and must be the only input"),
        (["-"], '{"text": "a"}\n{"text":\n', "standard input, line 2 cannot be read: "),
        (["-"], b"caf\xe9\n", "standard input is not UTF-8"),
        (["-"], '{"body": "a"}', "no text column 'text'; columns are ['body']"),
        (["nothing.jsonl"], "", "no such input: nothing.jsonl"),
        ([], "", "a job needs input"),
    ],
)
def test_a_wrong_call_leaves_with_2(run, words, given, cure):
    done = run(*words, input=given)
    is_broken = "line 2" in cure or "UTF-8" in cure  # the call is right, and the text is not
    assert done.exit_code == (1 if is_broken else 2)
    assert cure in done.stderr


def test_labels_of_another_model_are_warned_of_once(files, checkpoint):
    model = ["--classifier", "quality", "--model", str(checkpoint("domain"))]
    done = CliRunner().invoke(main, ["preview", str(files / "in.jsonl"), "-n", "1", *model])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("Warning: ")
    assert done.stderr.count("not the labels of QualityClassifier") == 1
    assert "pass --labels; else" in done.stderr
    labels = ["--labels", ",".join(DomainClassifier.published_labels)]
    meant = CliRunner().invoke(main, ["preview", str(files / "in.jsonl"), *model, *labels])
    assert (meant.exit_code, meant.stderr) == (0, "")
    done = CliRunner().invoke(main, ["preview", str(files / "in.jsonl"), *model, "--strict"])
    assert done.exit_code == 2


def test_a_warning_has_a_line_beside_what_shows_progress(files, checkpoint):
    words = ["--classifier", "quality", "--model", str(checkpoint("domain"))]
    command = ["preview", str(files / "in.jsonl"), "-n", "1", *words]
    done = CliRunner(env={"FORCE_COLOR": "1"}).invoke(main, command)
    assert "Classifying" in done.stderr
    # What draws the progress writes it, and wraps it.
    assert "Warning: " in done.stderr and all(len(line) < 100 for line in done.stderr.splitlines())


def test_nothing_is_said_when_the_reader_has_seen_enough():
    """A pipe that is closed before anything is written; `models` loads none, and so is quick."""
    command = [sys.executable, "-m", "gpuclassify", "models"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) in (0, 1)


def test_scores_by_name_are_shown_where_there_is_nothing_else(files, tmp_path):
    model = write_celadon(tmp_path / "m")
    words = ["preview", str(files / "in.jsonl"), "-n", "3", "--classifier", "celadon"]
    done = CliRunner().invoke(main, [*words, "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert "race_origin" in done.stdout and "violence" in done.stdout
    assert "Not shown" not in done.stdout


# Rows of published corpora, shortened, and what of their nested columns is shown.
CORPUS_ROWS = {
    "fineweb": (
        {"id": "<urn:uuid:1>", "dump": "CC-MAIN-2024-10", "language_score": 0.93, "token_count": 7},
        {"language_score": "0.930", "token_count": "7", "dump": "CC-MAIN-2024-10"},
    ),
    "dolma": (
        {"id": "a", "metadata": {"warc_url": "http://a", "spans": [[0, 5, 0.5]], "n": 1.5}},
        {"metadata": '{"warc_url": "http://a", "spans": [[0.0, 5.0, 0.5]], "n": 1.5}'},
    ),
    "hplt": (
        {"f": "w.warc", "seg_langs": ["en", "de"], "scores": [0.25, 1], "pii": [[3, 9]]},
        {"seg_langs": "en, de", "scores": "0.250, 1.000", "pii": "[[3, 9]]"},
    ),
    "redpajama": (
        {"meta": '{"url": "http://a"}', "signals": {"ccnet": 0.5, "words": 3.25}, "added": None},
        {"meta": '{"url": "http://a"}', "signals": "ccnet 0.500, words 3.250", "added": "null"},
    ),
    "nemotron": (
        {"warc": {"date": "May 2024", "labels": [{"name": "x", "score": None}]}},
        {"warc": '{"date": "May 2024", "labels": [{"name": "x", "score": null}]}'},
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("corpus", CORPUS_ROWS)
def test_columns_are_shown_as_their_types_say(run, tmp_path, monkeypatch, corpus, kind):
    columns, shown = CORPUS_ROWS[corpus]
    rows = [{"text": "Stocks rose.", **columns}, {"text": "It rained."}]
    path = tmp_path / f"in.{kind}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "parquet":
        pq.write_table(paj.read_json(path), path)
    whole = run(path)
    assert whole.exit_code == 0, whole.output
    assert "Not shown" not in whole.stdout
    monkeypatch.setenv("COLUMNS", "1000")
    fields = [word for name in shown for word in ("--field", name)]
    first = next(line for line in run(path, *fields).stdout.splitlines() if "Stocks" in line)
    cells = [cell.strip() for cell in first.strip("│ ").split("│")]
    assert cells[1 : 1 + len(shown)] == list(shown.values())
    selected = json.loads(run(path, *fields, "--json").stdout.splitlines()[0])
    assert {*selected} >= {"text", *shown}
    assert not ({*columns} - {*shown}) & {*selected}


# Rows of files.


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.parquet"])
@pytest.mark.parametrize("most", [1, 7, 1_000])
def test_the_first_rows_are_those_of_the_whole(files, name, most):
    found = first_rows(FileReader([str(files / name)]), most)
    assert found["id"].tolist() == list(range(len(TEXTS)))[:most]
    assert found["text"].isna().sum() == TEXTS[::-1][:most].count(None)


def test_several_files_follow_each_other(files):
    paths = [str(files / name) for name in ("in.jsonl", "in.jsonl.gz")]
    assert first_rows(FileReader(paths), 40)["id"].tolist() == [*range(34), *range(6)]
    paths[0] = str(files / "in.parquet")
    assert first_rows(FileReader(paths), 40)["id"].tolist() == [*range(34), *range(6)]


def test_no_more_of_a_file_is_read_than_is_shown(files, monkeypatch):
    taken = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *args, **options: (taken.append(len(b)) or b for b in batches(*args, **options)),
    )
    first_rows(FileReader([str(files / "in.parquet")]), 3)
    assert sum(taken) == 3
    stream = io.BytesIO(b"one\ntwo\nthree\n")
    assert first_texts(stream, 2, ["text"])["text"].tolist() == ["one", "two"]
    assert stream.read() == b"three\n"


# Labels, offline.


def test_models_prints_all_labels_of_one():
    done = CliRunner().invoke(main, ["models", "content-type"])
    assert done.exit_code == 0
    shown = [line.strip() for line in done.stdout.splitlines()]
    assert set(FAMILIES["content-type"].published_labels) <= set(shown)
    assert "class    ContentTypeClassifier" in shown


def test_models_prints_the_labels_of_each_column_of_an_answer():
    done = CliRunner().invoke(main, ["models", "taxonomy"])
    assert (done.exit_code, "eai_fdc (string)" in done.stdout) == (0, True)
    for name, (_, labels) in TAXONOMY.items():
        labels = [*labels, "Abstain"]
        for column in (f"eai_{name}", f"eai_{name}_secondary"):
            listed = "".join(f"        {label}\n" for label in labels)
            assert f"    labels   {len(labels)} of {column}\n{listed}" in done.stdout
    (guard,) = json.loads(CliRunner().invoke(main, ["models", "qwen3guard", "--json"]).stdout)
    assert guard["labels"] == guard["labels_by_column"]["qwen3guard_safety"]
    assert guard["labels_by_column"]["qwen3guard_categories"] == list(QWEN3GUARD_HARMS)


def test_models_tells_what_is_known_of_a_published_checkpoint():
    done = CliRunner().invoke(main, ["models", "qurater"])
    for line in (
        "    model    princeton-nlp/QuRater-1.3B\n",
        "    licence  not stated\n",
        "    class    DistributedDataClassifier\n",
        "    reads    512 tokens, in as many windows as it takes\n",
        "    cite     arXiv:2402.09739\n",
        "    checked  the layout, on a small copy with random weights",
        "    labels   4\n        writing_style\n",
    ):
        assert line in done.stdout
    assert done.stdout.count("qurater_scores (struct<writing_style: float") == 1
    languages = CliRunner().invoke(main, ["models", "finepdfs-edu"]).stdout
    assert " azj_Latn," in languages and max(map(len, languages.splitlines())) <= 100
    (one,) = json.loads(CliRunner().invoke(main, ["models", "stack-edu-go", "--json"]).stdout)
    assert (one["family"], one["variants"]) == ("stack-edu-go", {})
    assert one["model"] == "HuggingFaceTB/stack-edu-classifier-go"


def test_models_json_has_the_labels_of_each():
    listed = json.loads(CliRunner().invoke(main, ["models", "--json"]).stdout)
    labels = {row["family"]: row["labels"] for row in listed}
    assert labels["quality"] == ["High", "Medium", "Low"]
    assert labels["instruction-data-guard"] == [False, True]
    (one,) = json.loads(CliRunner().invoke(main, ["models", "quality", "--json"]).stdout)
    assert one in listed


def test_models_suggests_the_name_that_was_meant():
    done = CliRunner().invoke(main, ["models", "domian"])
    assert (done.exit_code, "Did you mean 'domain'?" in done.stderr) == (2, True)
