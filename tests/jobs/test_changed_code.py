"""A function among the stages is known by its code: where it is written makes no other job."""

import importlib.metadata
import subprocess
import sys

import dask.dataframe as dd
import nbformat
import pandas as pd
import pytest
from click.testing import CliRunner
from dask import hashing
from nbclient import NotebookClient

from gpuclassify import AnnotationWriter, PatternSpans, Route, Select, TokenCounter
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores.job import AssignBuckets
from gpuclassify.jobs.input.readers import JsonlReader, ParquetReader
from gpuclassify.jobs.ledger.manifest import JobChangedError
from gpuclassify.jobs.ledger.records import sealed, unsealed
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline

JOB = """
from gpuclassify import JsonlReader, ParquetWriter, Pipeline

STOP = {"the", "a", "of", "an"}

def shorter(text):
    return " ".join(word for word in text.split() if word not in STOP)

def clean(frame):
    return frame.assign(text=frame["text"].map(shorter), least=3)

summary = Pipeline([JsonlReader("in"), clean, ParquetWriter("out", output_bytes=0)]).run(**OPTIONS)
print("resumed", summary.resumed_parts, "of", summary.parts)
"""

ALL_REFUSED = """
from gpuclassify.jobs.ledger.manifest import JobChangedError

for code in {codes!r}:
    try:
        exec(code, {{"__name__": "__main__"}})
    except JobChangedError as err:
        print(err)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / f"in/{name}.jsonl").write_text('{"text": "the end of a river"}\n')
    return tmp_path


@pytest.fixture
def run(folder):
    """Runs a script of this name in the folder, in a process of its own."""

    def run(name, code, seed=0, **options):
        (folder / name).write_text(code.replace("**OPTIONS", f"**{options}"))
        done = subprocess.run(
            [sys.executable, name],
            cwd=folder,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    return run


def take_one_part_away(folder):
    part = min((folder / "out").glob("part-*"))
    part.unlink()


@pytest.mark.slow
def test_a_script_goes_on_under_another_name_and_with_other_lines(folder, run):
    assert run("job.py", JOB) == "resumed 0 of 3"
    take_one_part_away(folder)
    assert run("job.py", "# A comment.\n\n" + JOB, seed=1) == "resumed 2 of 3"
    assert run("renamed.py", JOB.replace("def clean", "# Why.\ndef clean"), 2) == "resumed 3 of 3"
    before = {path: path.read_bytes() for path in (folder / "out").glob("part-*")}
    changes = [("least=3", "least=4"), ('"an"', '"or"'), ("not in STOP", "in STOP")]
    codes = [JOB.replace(*change).replace("**OPTIONS", "") for change in changes]
    told = run("refused.py", ALL_REFUSED.format(codes=codes)).splitlines()
    assert len(told) == len(changes)
    for said in told:
        assert "stage 1 clean has other code (its bytecode, its defaults, or what it" in said
        assert said.index("put the code back") < said.index("accept_changed_code=True")
        assert said.index("write to another directory") < said.index("start over")
    assert {path: path.read_bytes() for path in (folder / "out").glob("part-*")} == before


@pytest.mark.slow
def test_a_cell_goes_on_in_a_new_kernel(folder):
    def execute():
        cell = nbformat.v4.new_code_cell(JOB.replace("**OPTIONS", "report=print"))
        notebook = nbformat.v4.new_notebook(cells=[cell])
        NotebookClient(notebook, timeout=200, resources={"metadata": {"path": folder}}).execute()
        shown = "".join(each.get("text", "") for each in notebook.cells[0].outputs)
        return shown.strip().splitlines()[-1]

    assert execute() == "resumed 0 of 3"
    take_one_part_away(folder)
    assert execute() == "resumed 2 of 3"


def test_other_code_is_taken_where_that_is_asked_for(folder, caplog):
    def make(least, **options):
        def stage(frame):
            return frame.assign(least=least)

        reader = JsonlReader(f"{folder}/in", **options)
        writer = ParquetWriter(f"{folder}/out", output_bytes=0)  # a file for each part
        return Pipeline([reader, stage, writer])

    make(1).run()
    take_one_part_away(folder)
    with pytest.raises(JobChangedError, match=r"accept_changed_code=True"):
        make(2).run()
    words = "stage 1 .*; input is_projected was False and is True"
    with pytest.raises(JobChangedError, match=words) as caught:
        make(2, fields=["text"]).run(accept_changed_code=True)
    assert "accept_changed_code" not in str(caught.value)
    assert make(2).run(accept_changed_code=True).resumed_parts == 2
    assert "stage has other code" in caplog.text
    assert sorted(pd.read_parquet(folder / "out")["least"]) == [1, 1, 2]
    assert make(2).run().resumed_parts == 3  # it is the job's code from now on
    with pytest.raises(JobChangedError, match="put the code back as it was; if"):
        make(1).run()
    job = folder / "out/_gpuclassify/job.json"
    known = unsealed(job.read_bytes())
    known["versions"]["python"] = "3.9.1"
    job.write_bytes(sealed(known))
    with pytest.raises(JobChangedError, match=r"which Python 3\.\d+\.\d+ compiles otherwise than"):
        make(1).run()


def test_buckets_go_on_with_other_code_too(folder):
    def make(least):
        def stage(frame):
            return frame.assign(score=float(least))

        reader, writer = ParquetReader(f"{folder}/p.parquet"), ParquetWriter(f"{folder}/out")
        return AssignBuckets([reader, stage, writer], "score", n=2)

    pd.DataFrame({"text": ["a", "b"]}).to_parquet(folder / "p.parquet")
    make(1).run()
    with pytest.raises(JobChangedError):
        make(2).run()
    assert make(2).run(accept_changed_code=True).resumed_parts == 1


# Parts of the code: only what computes results counts, and each part is named.

ENVIRONMENT = """
import sys

for name in {hidden!r}:
    sys.modules[name] = None

import numpy as np, pandas as pd, pyarrow as pa
from gpuclassify import AnnotationWriter, JsonlReader, PatternSpans, Pipeline, TokenCounter

weights, table, words = np.arange(9.0), pd.DataFrame({{"a": ["x", None]}}), pa.array(["the", None])

def stage(frame):
    assert len(table) + len(words) == 4
    return frame.assign(score=weights[2])

stages = [stage, PatternSpans(), TokenCounter(model={model!r})]
summary = Pipeline([JsonlReader("in"), *stages, AnnotationWriter("notes")]).run()
print("resumed", summary.resumed_parts, "of", summary.parts)
"""


@pytest.mark.slow
def test_a_set_goes_on_whichever_hash_libraries_are_installed(run, sequence_classifier):
    """Dask hashes by xxhash or mmh3 where one is installed, and else by SHA-1."""
    model = str(sequence_classifier("bert"))
    for number, hidden in enumerate(([], ["xxhash"], ["xxhash", "mmh3", "cityhash"])):
        code = ENVIRONMENT.format(hidden=hidden, model=model)
        expected = f"resumed {3 * (number > 0)} of 3"
        assert run("job.py", code, seed=number) == expected


@pytest.fixture
def versions(monkeypatch):
    """Versions by name that replace those of installed packages."""
    known, replaced = importlib.metadata.version, {}
    monkeypatch.setattr(importlib.metadata, "version", lambda n: replaced.get(n) or known(n))
    return replaced


def annotate(folder, *stages, **options):
    job = Pipeline([JsonlReader(f"{folder}/in"), *stages, AnnotationWriter(f"{folder}/notes")])
    return job.run(**options)


def test_a_set_is_refused_for_libraries_that_compute_it_and_no_others(
    folder, versions, sequence_classifier, caplog
):
    def counted(**options):
        return annotate(folder, TokenCounter(model=model), PatternSpans(), **options)

    model = str(sequence_classifier("bert"))
    here = importlib.metadata.version("tokenizers")
    counted()
    versions |= dict.fromkeys(["numba", "llvmlite", "xxhash", "torch", "scikit-learn"], "0.0.1")
    versions["tokenizers"] = f"{here}+cuda"  # a label of the build
    assert counted().resumed_parts == 3
    versions["tokenizers"] = "0.0.2"
    with pytest.raises(JobChangedError) as caught:
        counted()
    said = str(caught.value)
    assert f"stage 1 TokenCounter tokenizers was '{here}' and is '0.0.2'. Parts of both" in said
    assert "install the version that the job began with; if" in said
    assert "PatternSpans" not in said and "accept_changed_code=True" in said
    (folder / "in/new.jsonl").write_text('{"text": "a new file"}\n')  # the set grows
    with pytest.raises(JobChangedError, match=r"tokenizers was .*\(accept_changed_code=True\)"):
        counted()
    assert counted(accept_changed_code=True).rows_read == 1  # of the new file
    assert "tokenizers was" in caplog.text
    assert counted().resumed_parts == 1  # these are the set's versions from now on


def test_the_command_line_accepts_changed_code(folder, versions, sequence_classifier):
    command = ["annotate", f"{folder}/in", f"{folder}/notes", "--classifier", "tokens"]
    command += ["--model", str(sequence_classifier("bert"))]
    assert CliRunner().invoke(main, command).exit_code == 0
    versions["transformers"] = "0.0.1"
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "transformers was" in said and "keep the parts (--accept-changed-code)" in said
    assert CliRunner().invoke(main, [*command, "--accept-changed-code"]).exit_code == 0
    assert CliRunner().invoke(main, command).exit_code == 0


def test_a_changed_class_is_named_and_may_be_accepted(folder):
    def stage(words):
        class Mine(PatternSpans):
            purpose = words

        return Mine()

    annotate(folder, stage("one"))
    with pytest.raises(JobChangedError, match=r"class of stage 1 .*Mine has other code \(digest"):
        annotate(folder, stage("two"))
    assert annotate(folder, stage("one")).resumed_parts == 3
    assert annotate(folder, stage("two"), accept_changed_code=True).resumed_parts == 3


def test_settings_and_models_are_never_accepted_as_code(folder, sequence_classifier):
    first, second = (TokenCounter(model=str(sequence_classifier(n))) for n in ("bert", "roberta"))
    annotate(folder, first)
    with pytest.raises(JobChangedError, match="model_revision was") as caught:
        annotate(folder, second, accept_changed_code=True)
    assert "accept_changed_code" not in str(caught.value)


def test_each_mapper_of_a_route_has_its_parts(folder, versions, sequence_classifier):
    def route():
        counter = TokenCounter(model=str(sequence_classifier("bert")))
        return Route(by="text", to={"the end of a river": counter}, otherwise=counter)

    annotate(folder, route())
    versions["tokenizers"] = "0.0.1"
    with pytest.raises(JobChangedError, match=r"stage 1 Route otherwise tokenizers was"):
        annotate(folder, route())


def test_a_token_in_use_makes_no_other_job(folder, sequence_classifier):
    model = str(sequence_classifier("bert"))
    assert TokenCounter(model=model).digest() == TokenCounter(model=model, token="hf_a").digest()
    assert Select("a > 1").digest() != Select("a > 2").digest()


def test_a_frame_whose_key_dask_hashes_otherwise_is_told(folder, monkeypatch):
    def job():
        frame = pd.DataFrame({"text": ["a", "b"], "n": [1, 2]})
        return Pipeline([dd.from_pandas(frame, npartitions=1), ParquetWriter(f"{folder}/out")])

    assert hashing.hashers[0] is not hashing.hashers[-1]
    job().run()
    assert job().run().resumed_parts == 1
    monkeypatch.setattr(hashing, "hashers", hashing.hashers[-1:])
    with pytest.raises(JobChangedError, match=r"hashes by sha1 here, and hashed by 'xxhash'"):
        job().run()
