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

from gpuclassify.commands.cli import Visible, main
from gpuclassify.pages import markdown, text_table, visible

pytestmark = pytest.mark.usefixtures("one_torch_thread")
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
