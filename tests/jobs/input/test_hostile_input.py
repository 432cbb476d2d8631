"""A hostile text takes every regular expression, and every line, about as long as any other."""

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

import gpuclassify
from examples.demo.corpus import _opening
from gpuclassify.classifiers.questions.safety_template import TemplateError, parse_template
from gpuclassify.commands.console import ARGUMENT
from gpuclassify.corpus.training.tasks import _in_order
from gpuclassify.hub.calls import _without_queries
from gpuclassify.jobs.input.jsonl import parse_good
from gpuclassify.jobs.input.readers import JsonlReader, read_files
from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError

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


# Each takes far more memory than its bytes, unless it is refused before it is read as a whole.
# Small copies of what fills a worker: with a line of 170 MiB in 170 KiB it is 5 GiB.
MAKE_BOMB = """
import sys, bz2, gzip, lzma, pyarrow as pa, pyarrow.parquet as pq
name, piece, count = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
if name.endswith(".parquet"):
    text = pa.array([piece * count], pa.binary()).view(pa.string())
    options = {"use_dictionary": False, "data_page_version": sys.argv[4]}
    pq.write_table(pa.table({"n": [1], "text": text}), name, compression="zstd", **options)
    sys.exit()
ends = b'{"n": 1}\\n' + sys.argv[4].encode(), sys.argv[5].encode() + b'\\n{"n": 2}\\n'
pieces = [ends[0], *[piece * (count // 64)] * 64, ends[1]]
opens, packs = {"gz": gzip.open, "jsonl": open}, {"bz2": bz2.compress, "xz": lzma.compress}
suffix = name.split(".")[-1]
if pack := packs.get(suffix):  # streams one after another; packing all as one takes minutes
    packed = {piece: pack(piece) for piece in {*pieces}}
    pieces, opens = [packed[piece] for piece in pieces], {suffix: open}
with opens.get(suffix, lambda path, _: pa.output_stream(path))(name, "wb") as file:
    for piece in pieces:
        file.write(piece)
"""
RUN_BOMB = r"""
import re, sys, resource
from pathlib import Path
from gpuclassify import *
resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10
def run(name, out):
    summary = Pipeline([FileReader(name), ParquetWriter(out)], on_error="quarantine").run()
    return summary.rows_written, summary.left_out
Path("small.jsonl").write_text('{"n": 1}\n')
run("small.jsonl", "small")
before, small = peak(), "small.jsonl" if "jsonl" in sys.argv[1] else "small"
print(*run([small, sys.argv[1]], "out"), peak() - before)
"""
LISTS = ("[],", 24 << 20, '{"n": [', "[]]}")
SHORT = ('{"n": 1}\n', 40 << 20, "", "")
BOMBS = {
    "lists in a line": ("a.jsonl.gz", *LISTS, "3 {'line': 1}", 600),
    "texts in a line": ("a.jsonl.gz", '"",', 24 << 20, '{"n": [', '""]}', "3 {'line': 1}", 600),
    "names in a line": ("a.jsonl.gz", '"k":1,', 12 << 20, "{", '"k":1}', "3 {'line': 1}", 600),
    **{
        f"short lines in {suffix}": (f"a.jsonl.{suffix}", *SHORT, "1 {'file': 1}", 650)
        for suffix in ("gz", "zst", "xz", "bz2", "lz4")
    },
    **{
        f"a page of version {version}": (
            "a.parquet",
            "x",
            600 << 20,
            version,
            "",
            "1 {'file': 1}",
            200,
        )
        for version in ("1.0", "2.0")
    },
}


LONGEST = {"names in a line", "short lines in xz", "short lines in lz4", "a page of version 1.0"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LONGEST)) for kind in BOMBS]
)
def test_few_stored_bytes_take_little_memory(tmp_path, kind):
    name, piece, count, before, after, wanted, most_mib = BOMBS[kind]
    made = [sys.executable, "-c", MAKE_BOMB, name, piece, str(count), before, after]
    subprocess.run(made, cwd=tmp_path, check=True)
    assert (tmp_path / name).stat().st_size < (4 << 20)
    done = subprocess.run(
        [sys.executable, "-c", RUN_BOMB, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found, _, mib = done.stdout.splitlines()[-1].rpartition(" ")
    assert found == wanted
    assert int(mib) < most_mib


WIDE = json.dumps({"n": 1, **{f"k{number}": 1 for number in range(2_000)}})
FLAT = ['{"n": 1}'] * 3_500
SPREAD = {
    "one line": [WIDE, *FLAT],
    "a late line": [*FLAT * 10, WIDE],
    "a name a line": [*FLAT, *(f'{{"n": 1, "k{number}": 1}}' for number in range(2_000))],
}


@pytest.mark.parametrize("kind", SPREAD)
def test_columns_of_few_lines_are_refused_and_not_given_to_every_row(tmp_path, kind):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n".join(SPREAD[kind]) + "\n")
    job = Pipeline([JsonlReader(tmp_path / "in"), ParquetWriter(f"{tmp_path}/out")])
    with pytest.raises(
        UnreadableInputError, match=r"line \d+, .*fields=.*types=\{\"meta\": \"json\""
    ):
        job.run()
    reader, wide = JsonlReader(tmp_path / "in"), len(SPREAD[kind]) - SPREAD[kind].count(FLAT[0])
    job = Pipeline([reader, ParquetWriter(f"{tmp_path}/out")], on_error="quarantine")
    assert job.run().left_out == {"line": wide}
    assert JsonlReader(tmp_path / "in").find_parts("quarantine").schema.arrow.names == ["n"]
    named = read_files(tmp_path / "in", fields=["n", "k7"]).compute()
    assert (len(named), int(named["k7"].sum())) == (len(SPREAD[kind]), 1)


def test_many_columns_that_lines_have_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{WIDE}\n" * 50 + '{"n": 2}\n')
    assert read_files(tmp_path / "a.jsonl").compute().shape == (51, 2_001)


DIGITS = "9" * 400
NUMBERS = {
    "alone": (f'{{"n": {DIGITS}}}', "n"),
    "negative": (f'{{"n": -{DIGITS}}}', "n"),
    "more digits than Python takes": (f'{{"n": {"9" * 5_000}}}', "n"),
    "exponent": ('{"n": 1e400}', "n"),
    "fractions": (f'{{"n": 1.5}}\n{{"n": {DIGITS}}}', "n"),
    "integers": (f'{{"n": 1}}\n{{"n": {DIGITS}}}', "n"),
    "in a list": (f'{{"n": [{DIGITS}]}}', "n"),
    "in an object": (f'{{"n": {{"a": [{{"b": {DIGITS}}}]}}}}', "n"),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_beyond_all_types_is_refused_and_not_made_infinite(tmp_path, kind):
    lines, _ = NUMBERS[kind]
    (tmp_path / "a.jsonl").write_text(f'{{"t": "a"}}\n{lines}\n')
    with pytest.raises(UnreadableInputError, match=r"a\.jsonl, line \d+, "):
        Pipeline([JsonlReader(tmp_path / "a.jsonl"), ParquetWriter(f"{tmp_path}/out")]).run()
    job = Pipeline(
        [JsonlReader(tmp_path / "a.jsonl"), ParquetWriter(f"{tmp_path}/out")], on_error="quarantine"
    )
    assert job.run().left_out == {"line": 1}
    text = JsonlReader(tmp_path / "a.jsonl", types={"n": "json"})
    Pipeline([text, JsonlWriter(f"{tmp_path}/text")]).run()
    [path] = (tmp_path / "text").glob("part-*")
    assert lines.split(": ", 1)[1][-20:] in path.read_text()


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
