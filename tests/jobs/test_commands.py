"""The commands of jobs: which settings options mean, exit codes, and going on."""

import contextlib
import json
import re
import shutil
import stat
import subprocess
import sys
import time

import click
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner
from distributed import Client

from gpuclassify.commands.buckets import buckets
from gpuclassify.commands.classify import classify, report
from gpuclassify.commands.client import shown_workers
from gpuclassify.commands.dedup import dedup
from gpuclassify.commands.options import _WORDS, command_line
from gpuclassify.commands.plan import plan
from gpuclassify.commands.settings import JobSettings, dump_settings, load_settings
from tests.replicas import sample_texts, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_checkpoint(folder / "domain", "domain")
    write_checkpoint(folder / "quality", "quality")
    lines = [json.dumps({"text": text, "id": row}) for row, text in enumerate(sample_texts(40))]
    (folder / "in.jsonl").write_text("\n".join(lines))
    (folder / "broken.jsonl").write_text("\n".join([*lines, '{"text": 5}']))
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*arguments, command=classify):
        return CliRunner().invoke(command, [*map(str, arguments)], obj={"debug": False})

    return run


@pytest.fixture
def settings_of(run, tmp_path):
    """The settings that options mean."""

    def settings_of(*arguments):
        done = run(*arguments, "--dump-config", tmp_path / "job.yaml")
        assert done.exit_code == 0, done.output
        return yaml.safe_load((tmp_path / "job.yaml").read_text())

    return settings_of


def test_the_report_has_the_command_and_no_secrets(run, tmp_path):
    done = run(
        "in.jsonl", tmp_path / "out dir", "--classifier", "domain", "--model", "domain",
        "--set", "autocast=false", "--filter-by", "Games", "--restart",
        "--cluster", "cpu", "--workers", "1", "--cluster-option", "name=secret1",
        "--cluster-option=memory_limit=2GB", "--source-field", "id", "--examples", "0",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "DomainClassifier: dropped" in done.output
    report = json.loads((tmp_path / "out dir/_report/report.json").read_text())
    assert report["command"] == (
        f"gpuclassify classify in.jsonl '{tmp_path}/out dir' --classifier domain --model domain "
        "--set autocast=false --filter-by Games --cluster cpu --workers 1 "
        "--cluster-option name=... --cluster-option=memory_limit=... --source-field id --examples 0"
    )
    assert report["examples"] == {}
    assert sum(rows["read"] for rows in report["sources"]["id"].values()) == 40


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
    context.meta[_WORDS] = (word, "out", "--restart")
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


def test_digests_of_input_are_an_option_of_dedup_too(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    words = (tmp_path / "a.jsonl", tmp_path / "out", "--method", "exact", "--input-digest")
    run(*words, command=dedup)
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
    with pytest.warns(UserWarning, match="give these URLs whole on the command line"):
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
            "classifiers must be given: --classifier FAMILY (see `gpuclassify models`)",
        ),
        ("", "input and output and classifiers must be given: INPUT... OUTPUT --classifier"),
        ("in.jsonl in.jsonl/out --classifier domain", "in.jsonl is a file: name"),
        ("in.jsonl out --classifier domian", "Did you mean 'domain'"),
    ],
)
def test_wrong_calls_leave_with_2_and_write_nothing(run, folder, arguments, words):
    done = run(*arguments.split())
    assert done.exit_code == 2
    assert words in done.output
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--part-size 0", "--part-size '0' is below 1 byte"),
        ("--part-size=-5MB", "--part-size '-5MB' is below 1 byte"),
        (
            "--dump-config no/where.yaml",
            "cannot be written to no/where.yaml: No such file or directory. Name a file",
        ),
        ("--min-score High=x", "--min-score 'High=x': pass a number, or LABEL=NUMBER"),
        ("--model domain --scheduler http://10.0.0.1:8786", "use tcp://10.0.0.1:8786, or tls://"),
        ("--classifier quality --filter-by High", "say which, as in --filter-by domain:High"),
        ("--model a --model b", "--model is given 2 times"),
        ("--min-confidence much", "--min-confidence 'much': pass a number"),
        ("--set token=hf_x", "a token is no setting"),
        ("--config no.yaml", "the settings no.yaml cannot be read: No such file or directory"),
        ("--type price", "--type 'price': pass COLUMN=TYPE"),
        ("--type price=number", "Arrow has no such type"),
        ("--cluster-option queue", "--cluster-option 'queue': pass NAME=VALUE"),
        (
            "--model domain --cluster cpu --cluster-option local_directry=x",
            "did you mean 'local_directory'",
        ),
        (
            "--model domain --workers 1 --cluster-option n_workers=2",
            "mean the same: give one of them",
        ),
    ],
)
def test_wrong_options_leave_with_2_and_write_nothing(run, folder, options, words):
    done = run("in.jsonl", "out", "--classifier", "domain", *options.split())
    assert done.exit_code == 2
    assert words in done.output
    assert "hf_x" not in done.output
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "must hold names and values"),
        ("a: b: c", "is no YAML file"),
        ("input: a\noutput: b\ninput: c", "input is set on line 1 and again on line 3: leave one"),
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
    ],
)
def test_wrong_files_of_settings_are_told(run, tmp_path, content, words):
    (tmp_path / "job.yaml").write_text(content)
    done = run("--config", tmp_path / "job.yaml")
    assert (done.exit_code, words in done.output) == (2, True)


def test_a_job_goes_on_leaves_out_and_starts_over(run, folder):
    options = ["--classifier", "domain", "--classifier", "quality", "--model", "domain:domain",
               "--model", "quality:quality", "--cluster", "cpu", "--workers", "1",
               "--cluster-option", "local_directory=scratch"]  # fmt: skip
    command = ["broken.jsonl", "out", *options, "--on-error", "quarantine", "--type", "id=double"]
    done = run(*command, "--part-size", "1kB")
    assert done.exit_code == 3
    assert "Left out: 1 lines; see" in done.output
    assert "_report/report.html" in done.output
    found = pd.concat(map(pd.read_parquet, (folder / "out").glob("*.parquet")))
    assert found["id"].dtype == "float64"
    assert sorted(found["id"]) == list(range(40))
    assert {"domain_pred", "quality_pred"} <= set(found.columns)
    assert (folder / "scratch").is_dir()  # the cluster got its option
    made = run("out", "--json", command=report)
    assert json.loads(made.stdout)["labels"].keys() == {"domain_pred", "quality_pred"}
    changed = run(*command, "--part-size", "2kB")
    assert (changed.exit_code, "part_bytes was 1000 and is 2000" in changed.output) == (2, True)
    again = run(*command, "--part-size", "1kB", "--json")
    assert again.exit_code == 3
    summary = json.loads(again.stdout[again.stdout.index("{") :])
    assert summary["resumed_parts"] == len(summary["files"]) > 1
    assert run("nowhere", command=report).exit_code == 2


DOMAIN = ("--classifier", "domain", "--model", "domain")


@pytest.fixture(scope="module")
def finished(folder):
    """A job of the first rows that is done, in a directory."""
    out = folder / "finished"
    arguments = ["in.jsonl", "finished", "-n", "7", *DOMAIN, "--cluster", "cpu", "--workers", "1"]
    with contextlib.chdir(folder):
        done = CliRunner().invoke(classify, arguments, obj={"debug": False})
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    told = ["Looking for the input's parts", "Checking parts that are done", "Starting 1 worker(s)"]
    assert lines[:3] == told
    assert lines[-1].startswith("DomainClassifier: 100% 1/1 parts, 7 rows")
    return out


def test_a_limit_reads_the_first_rows_alone_and_is_part_of_the_job(run, finished, folder):
    (written,) = finished.glob("*.parquet")
    given = pd.read_json(folder / "in.jsonl", lines=True)[:7]
    assert pd.read_parquet(written)[["text", "id"]].values.tolist() == given.values.tolist()
    other = run("in.jsonl", "finished", "--limit", 6, *DOMAIN)
    assert (other.exit_code, "holds parts of a job that differs" in other.output) == (2, True)
    done = run("in.jsonl", "few", "--limit", 0, *DOMAIN)
    assert (done.exit_code, "--limit 0" in done.output) == (2, True)
    done = run("in.jsonl", "few", "--limit", 5, *DOMAIN, "--type", "id=double")
    assert (done.exit_code, "--type has no meaning" in done.output) == (2, True)


def test_a_finished_job_starts_no_cluster_and_imports_no_torch(finished, folder):
    probe = f"""
import sys, time
sys.modules["distributed"] = None  # as where it is not installed
from click.testing import CliRunner
from gpuclassify.commands.classify import classify
words = {["in.jsonl", "finished", "-n", "7", *DOMAIN]!r}
done = CliRunner().invoke(classify, words, obj={{"debug": False}})
assert done.exit_code == 0, done.output
assert "1 of 1 parts were there already, with 7 rows" in done.stdout
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
        (["--scheduler", "in.jsonl"], "in.jsonl is not a scheduler file"),
    ],
)
def test_what_this_machine_cannot_run_is_refused_before_anything_starts(
    run, folder, monkeypatch, options, cure
):
    monkeypatch.setitem(sys.modules, "cudf", None)
    monkeypatch.setattr("gpuclassify.cluster.client.find_spec", lambda name: None)
    monkeypatch.setattr("gpuclassify.cluster.local.start", None)
    started = time.monotonic()
    done = run("in.jsonl", "impossible", *DOMAIN, *options)
    assert (done.exit_code, cure in done.output) == (2, True)
    assert time.monotonic() - started < 10  # most of it for Dask to be imported
    assert not (folder / "impossible").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["im.jsonl"], "no such input: im.jsonl. Did you mean 'in.jsonl'?"),
        (["in.jsonl", "--text-field", "txt"], "no text column 'txt'"),
        (["in.jsonl", "--field", "idd"], "no column 'idd'. Did you mean 'id'?"),
        (["in.jsonl", "-n", "3", "--field", "idd"], "no column 'idd'. Did you mean 'id'?"),
    ],
)
def test_a_wrong_input_leaves_with_2_and_a_suggestion(run, arguments, words):
    done = run(*arguments, "wrong", *DOMAIN)
    assert (done.exit_code, words in done.output) == (2, True), done.output


def test_a_type_of_a_column_that_no_sample_has_is_warned_of(run, caplog, tmp_path):
    run("in.jsonl", tmp_path, *DOMAIN, "--type", "idd=string", "--cluster", "gpu")
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


def test_reports_of_a_file_and_plans_with_an_output_are_told(run, folder):
    done = run("in.jsonl", command=report)
    assert (done.exit_code, "in.jsonl is a file: name a directory" in done.output) == (2, True)
    pd.DataFrame({"text": ["x"]}).to_parquet(folder / "other.parquet")
    done = run("in.jsonl", "other.parquet", "--classifier", "domain", command=plan)
    assert (done.exit_code, "leave OUTPUT out" in done.output) == (2, True)


@pytest.mark.parametrize("paths", [(), ("in.jsonl",)])
def test_commands_without_a_config_file_do_not_tell_of_one(run, paths):
    done = run(*paths, "--score", "a", command=buckets)
    assert done.exit_code == 2
    assert "name the input, and then the output: INPUT... OUTPUT" in done.output
    assert "--config" not in done.output


def test_help_shows_options_in_groups_and_to_a_plan_none_of_a_cluster(run):
    shown, planned = (run("--help", command=command).output for command in (classify, plan))
    groups = ["Classifiers:", "Columns and rows:", "Files:", "Cluster:", "Settings:", "Options:"]
    assert [line for line in shown.splitlines() if line in groups] == groups
    for parameter in classify.params:
        for option in parameter.opts if isinstance(parameter, click.Option) else ():
            assert re.search(rf"^  (-\w, )?{option}[ ,]", shown, re.MULTILINE), option
    assert "Files:" in planned
    assert "Cluster:" not in planned
    assert "--scheduler" not in planned


def test_help_needs_no_framework():
    probe = (
        "import sys; from click.testing import CliRunner; "
        "from gpuclassify.commands.classify import classify; "
        "from gpuclassify.commands.plan import plan; "
        "assert CliRunner().invoke(classify, ['--help']).exit_code == 0; "
        "assert CliRunner().invoke(plan, ['--help']).exit_code == 0; "
        "assert not {'torch', 'transformers', 'distributed', 'pandas', 'dask'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


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
