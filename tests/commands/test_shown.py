"""What others have named is shown, and commands no terminal and no page."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from gpuclassify import (
    AnnotationWriter,
    ApplyThresholds,
    Mix,
    Pipeline,
    ScoreBuckets,
    Thresholds,
    agreement,
    score_edges,
)
from gpuclassify.commands.cli import Visible, main
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.pages import markdown, text_table, visible

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]
RED = "\x1b[31mred\x1b]0;title\x07"
# Escapes of 7 and of 8 bits, a title, back over what was written, from right to left, unseen, half.
CONTROLS = [RED, "\x9b2J", "a\rb", "a\x08b", "\u202egnp.exe", "zero\u200bwidth", "\ud800", "\x00"]


@pytest.mark.parametrize("text", CONTROLS, ids=ascii)
def test_what_controls_a_terminal_is_written_as_an_escape(text):
    shown = visible(f"one\n\ttwo {text} é 漢\u3000字\u00a0🙂")
    assert shown.startswith("one\n\ttwo ") and shown.endswith(" é 漢\u3000字\u00a0🙂")
    assert shown[:9].isspace() is False and shown[9:-8].isprintable()
    assert visible(text, "").isprintable()
    assert text_table([("name", text)]).isprintable()
    record = logging.LogRecord("x", 30, "x", 1, "%s", (text,), None)
    assert Visible("%(message)s").format(record).isprintable()


def test_a_command_leaves_logging_as_it_found_it():
    logger = logging.getLogger("gpuclassify")
    before = list(logger.handlers), logger.level
    assert CliRunner().invoke(main, ["--debug", "models"]).exit_code == 0
    assert (list(logger.handlers), logger.level) == before


HOSTILE = [
    *("<b>x</b>", "<!-- x", "&lt;b&gt;", "<https://e.example>", "\\<i>", "x\\`<i>`"),
    *("_x_", "*x*", "__x__", "~~x~~", "~x~", "`x`", "```", "[x](http://e.example)", "[^1]"),
    *("![x](http://e.example)", "https://e.example", "www.e.example", "WWW.e.example"),
    *("a@e.example", "@user", ":smile:", "$x^2$", "$$x$$", "x #", "a|b", "a\\|b", "|", "\\"),
    *("<script>alert(1)</script>", "[a](javascript:b)", "![](x) `b` | c *d*", "__label__hq & co"),
    *("a\n\n# b", "a\r- b", "a\u2028b", "\x1b[1m", "\u202eb", "mailto:a", "xmpp:a@b.example"),
]


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_no_text_has_a_meaning_in_markdown(text):
    """The oracle is markdown-it; what renderers link, replace or typeset beyond it is escaped."""
    escaped, parser = markdown(text), MarkdownIt("commonmark", {"html": True})
    parser.enable(["table", "strikethrough"])
    for line in (f"# {escaped}", f"Labels: {escaped}, x", f"| a |\n| --- |\n| {escaped} |"):
        tokens = parser.parse(line)
        parts = [part for token in tokens for part in token.children or ()]
        assert {part.type for part in parts} == {"text"}
        assert not {"html_block", "fence", "hr"} & {token.type for token in tokens}
        assert visible(text, "").strip() in "".join(part.content for part in parts)
    assert not re.search(r"(?<!\\)[$@~]|(?<!\\):(?=\S)|www\.", escaped, re.IGNORECASE)


@pytest.fixture
def model(sequence_classifier, tmp_path):
    """A classifier with controls and letters of several alphabets in each of its labels."""
    folder = tmp_path / "model"
    shutil.copytree(sequence_classifier("bert"), folder)
    config = json.loads((folder / "config.json").read_text())
    names = {
        place: f"Ökologie 漢字 {RED} \u202egnp{place}" for place in range(len(config["id2label"]))
    }
    config |= {"id2label": names, "label2id": {name: place for place, name in names.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def inputs(tmp_path):
    texts = pd.DataFrame({"text": [f"{RED} text {n} {'word ' * n}" for n in range(40)] * 2})
    texts.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    return str(tmp_path / "in.jsonl")


def commands(model, inputs, out):
    named = ["--classifier", "checkpoint", "--model", str(model)]
    yield ["classify", inputs, f"{out}/labels", *named]
    yield ["compare", inputs, *named, "--with", "max_seq_length=8"]
    yield ["preview", inputs, *named]
    yield ["dedup", inputs, f"{out}/clean", "--method", "exact"]
    yield ["classify", f"{out}/{RED}.jsonl", f"{out}/none", *named]
    yield ["classify", inputs, f"{out}/none", *named, "--filter-by", RED[:-2]]
    yield ["report", f"{out}/{RED}"]


def test_commands_print_no_controls(model, inputs, tmp_path):
    codes = []
    for words in commands(model, inputs, tmp_path):
        done = CliRunner().invoke(main, words)
        assert not set(done.output) & {"\x1b", "\x07", "\u202e"}, done.output
        assert r"\x1b" in done.output, words
        codes.append(done.exit_code)
    assert codes == [0, 0, 0, 0, 2, 2, 2]


def test_rows_as_json_have_escapes_and_the_same_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [text for text in CONTROLS if text != "\ud800"]  # which no file holds
    texts += ["\x7f", "\U000e0041", "é 漢\u3000🙂"]
    frame = pd.DataFrame({"id": range(len(texts)), "text": texts, f"n {RED}": texts})
    frame.to_parquet("in.parquet")
    stages = [FileReader("in.parquet"), lambda part: part.assign(label=part["text"])]
    Pipeline([*stages, AnnotationWriter("notes")]).run(report=lambda *_: None)
    words = ["show", "notes", "--input", "in.parquet", "-n", "99"]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0 and done.stdout.replace("\n", "").replace("\u3000", "").isprintable()
    expected = frame.assign(label=texts).to_dict("records")
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0 and done.stdout.replace("\n", "").replace("\u3000", "").isprintable()


def labelled_by(name):
    """Labelled rows of two groups with controls in their names, and in those of columns."""
    rows = pd.DataFrame({"score": [n / 400 for n in range(400)], "text": name})
    rows["human"] = [n % 7 != 0 and n > 150 for n in range(400)]
    return rows.assign(**{f"by{name}": [name, f"{name}2"] * 200, "tokens": 3})


@pytest.mark.parametrize("name", [text for text in CONTROLS if text != "\ud800"], ids=ascii)
def test_results_show_no_controls_of_groups_and_columns(name, tmp_path):
    rows = labelled_by(name)
    by = next(each for each in rows if each.startswith("by"))
    found = Thresholds.fit(
        rows, score="score", label="human", by=by, precision=0.6, small_groups="pool",
        min_labels=300,
    )  # fmt: skip
    mix = Mix.plan(rows, by=by, tokens=5_000)
    agreed = agreement(rows.assign(model=rows["human"]), ["human", "model"], by=by)
    edges = score_edges(rows, "score", by=by, n=3)
    for result in (found, mix, agreed, edges):
        for shown in (str(result), repr(result)):
            assert shown.replace("\n", "").isprintable(), type(result)
    for mapper in (ApplyThresholds(found), ScoreBuckets(edges)):
        assert repr(mapper).isprintable()


def test_letters_that_the_terminal_lacks_end_no_command(model, inputs, tmp_path):
    encodings = ["ascii", "latin-1", "ascii"]
    for encoding, words in zip(encodings, commands(model, inputs, tmp_path), strict=False):
        done = subprocess.run(
            [sys.executable, "-m", "gpuclassify", *words],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert "?" in done.stdout.decode(encoding)
