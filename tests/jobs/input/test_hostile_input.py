"""A hostile text takes every regular expression, and every line, about as long as any other."""

import importlib
import json
import re
import time
from pathlib import Path

import pyarrow as pa
import pytest

import gpuclassify
from examples.demo.corpus import _opening
from gpuclassify.commands.console import ARGUMENT
from gpuclassify.hub.calls import _without_queries
from gpuclassify.jobs.input.jsonl import parse_good
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.questions.safety_template import TemplateError, parse_template
from gpuclassify.stores.names import redacted
from gpuclassify.stores.opening import open_store
from gpuclassify.stores.store import UnreadableInputError
from gpuclassify.training.tasks import _in_order

SECONDS = 10  # of the processor; what is quadratic takes a minute or more
SIZES = (10_000, 300_000)


def check_linear(call, hostile):
    for size in SIZES:
        text = hostile(size)
        began = time.process_time()
        call(text)
        assert time.process_time() - began < SECONDS, f"{size} characters: {text[:60]!r}..."


def repeated(piece, before="", after=""):
    return lambda size: before + piece * (size // len(piece)) + after


BRACKETS = '{"text":' + "[" * 1_001 + '"'
LINES = {
    "escaped quotes": repeated('\\"', BRACKETS),
    "quotes": repeated('"', BRACKETS),
    "backslashes": repeated("\\", BRACKETS),
    "backslashes that end": repeated("\\\\", BRACKETS, '"}'),
    "lists": repeated("[", '{"text":'),
    "objects": repeated('{"text":'),
    "brackets in text": repeated("[{", '{"text":"', '"}'),
    "digits": repeated("1", '{"text":', "}"),
    "minus": repeated("-", '{"text":'),
    "blanks": repeated(" ", "{"),
    "words of errors": lambda size: '{{"{0}":1,"{0}":1}}'.format("Column(" * (size // 14)),
    "errors of types": lambda size: '{"text":[],"a' + ") changed from" * (size // 13) + '":1}',
    "fields": lambda size: json.dumps({f"{n:0300}": n for n in range(size // 308)}),
    "fields of other types": lambda size: json.dumps({f"f{n % 500}": [] for n in range(size)}),
}
SCHEMA = pa.schema([("text", pa.string()), *((f"f{n}", pa.int64()) for n in range(500))])


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("is_projected", [True, False])
def test_a_hostile_line_is_left_out_or_read_in_time_that_grows_with_it(kind, is_projected):
    def read(line):
        content = b'{"text": "a"}\n' * 50
        table, bad = parse_good(content + line.encode() + b"\n", 0, SCHEMA, is_projected)
        assert len(table) + len(bad) == 51
        assert [found.offset for found in bad] in ([], [len(content)])

    check_linear(read, LINES[kind])


def test_a_hostile_line_among_the_samples_is_named_or_left_out(tmp_path):
    (tmp_path / "in").mkdir()
    line = LINES["escaped quotes"](300_000)
    (tmp_path / "in/a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n{{"text": "b"}}\n')
    began = time.process_time()
    for on_error in ("raise", "quarantine"):
        stages = [JsonlReader(tmp_path / "in"), ParquetWriter(f"{tmp_path}/out")]
        job = Pipeline(stages, on_error=on_error)
        if on_error == "raise":
            with pytest.raises(UnreadableInputError, match=r"a\.jsonl, line 2, from byte 14 "):
                job.run()
        else:
            assert job.run().left_out == {"line": 1}
    assert time.process_time() - began < SECONDS


def explain(text):
    with (
        pytest.raises(OSError, match=r"^s3://bucket: OSError: "),
        open_store("s3://bucket").explained(),
    ):
        raise OSError(text)


def parse_prompt(text):
    with pytest.raises(TemplateError):
        parse_template(text, "a file")


PIECES = ("a", "A", "1", "_", " ", "\t", "\n", "ü", ".", "/", "@", "-", "=", "?", "://", "://a:")
CALLS = {
    "errors of stores": (explain, ("a", "a://", "://", "a://b ", "'a://")),
    "URLs": (lambda text: redacted(f"s3://{text}"), PIECES),
    "queries": (_without_queries, ("?", "? ", "a", "?a")),
    "options in errors": (lambda text: ARGUMENT.sub("", text), ("a", "a=", "a=b ", "a(", "=")),
    "openings": (_opening, ("a", " ", "a ", "_")),
    "labels": (lambda text: _in_order({f"{text}a", "1"}), ("1", "-")),
    "prompts": (parse_prompt, ("[INST] ", "[INST] a", " ", "O1", "<BEGIN CONVERSATION>", "\n")),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_hostile_text_takes_no_call_longer(name):
    call, pieces = CALLS[name]
    for piece in pieces:
        check_linear(call, repeated(piece))


# Which see options of one's own command, the machine and the package's own docstrings alone.
OWN = ("slurm_script.py", "cluster/sizing.py", "doctor.py", "signatures.py")


def patterns():
    """Every compiled regular expression of the package that may see what others have written."""
    root = Path(gpuclassify.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "re.compile(" in path.read_text() and not str(path).endswith(OWN):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            for own, value in vars(importlib.import_module(name)).items():
                if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                    yield pytest.param(value, id=f"{name.removeprefix('gpuclassify.')}.{own}")


@pytest.mark.parametrize("pattern", [*patterns()])
def test_a_hostile_text_takes_no_pattern_longer(pattern):
    literals = re.findall(r"[\w<>:/-]{2,}", pattern.pattern)
    for piece in (*PIECES, *literals, "\\", '"', "[", "{", "<", ":", "a:", "a.", "a\n", "a=", "O1"):
        for before in ("", *literals[:2]):
            check_linear(pattern.search, repeated(piece, before, "\0"))
