"""What Slurm clusters and job files are made of, as far as it shows without a Slurm."""

import importlib
import inspect
import itertools
import json
import logging
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import dask
import pytest
import yaml
from click.testing import CliRunner

from gpuclassify.cluster import get_client
from gpuclassify.cluster.security import make_certificate
from gpuclassify.cluster.sizing import parse_walltime
from gpuclassify.cluster.slurm import (
    CUDA_FLAGS,
    KeptCluster,
    cuda_arguments,
    plan_slurm,
    start_slurm,
)
from gpuclassify.commands.slurm_script import sbatch_script, slurm_script


def job_script(**options):
    """What dask-jobqueue would submit; without a job, nothing of Slurm is called."""
    plan = plan_slurm(**options)
    with KeptCluster(**plan.arguments) as cluster:
        return plan, cluster.job_script()


def test_plain_workers():
    plan, script = job_script(
        n_workers=6, processes=2, cores=8, memory="64GB", partition="long", account="me",
        walltime="1-00:00:00", threads_per_worker=2, job_extra=["--exclusive"],
        prologue=["module load python"], python="/opt/python", job_directives_skip=["-J"],
    )  # fmt: skip
    assert plan.jobs == 3
    assert plan.cores_per_worker == 4
    assert plan.torch_fraction is None
    lines = script.splitlines()
    wanted = ["-p long", "-A me", "--cpus-per-task=8", "--mem=60G", "-t 1-00:00:00", "--exclusive"]
    assert {f"#SBATCH {option}" for option in wanted} <= set(lines)
    assert "#SBATCH -J" not in script
    assert "--gres" not in script
    assert lines.index("module load python") < len(lines) - 1
    command = next(line for line in lines if line.startswith("/opt/python"))
    assert "-m distributed.cli.dask_worker tls://" in command
    assert "--dashboard-address 127.0.0.1:0" in command
    assert "--nthreads 2 " in command
    assert "--nworkers 2 " in command
    assert "--memory-limit 29.80GiB" in command  # half of 64 GB


def test_slurm_clusters_have_tls_unless_they_are_told_otherwise(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with KeptCluster(**plan_slurm(memory="1GB").arguments) as cluster:
        words = shlex.split(cluster.job_script().splitlines()[-1])
        given = dict(itertools.pairwise(words))
        files = {Path(given[f"--tls-{name}"]) for name in ("ca-file", "cert", "key")}
        assert {path.parent for path in files} == {tmp_path}
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        with pytest.raises(TypeError, match="TLS"):  # without certificates
            get_client(address=cluster.scheduler_address, timeout=1)
    assert not any(path.exists() for path in files)
    for given in ({"security": None}, {"protocol": "tcp://"}):
        assert "security" not in {
            k for k, v in plan_slurm(memory="1GB", **given).arguments.items() if v
        }
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = pytest.raises(RuntimeError, match="sbatch is not here")
    with caplog.at_level(logging.WARNING, "gpuclassify"), refused:
        get_client("slurm", memory="1GB", security=False)
    assert "takes connections without TLS" in caplog.text


def test_gpu_workers_are_those_of_dask_cuda():
    plan, script = job_script(
        n_workers=8, gpus_per_job=4, memory="256GB", rmm_async=True, rmm_maximum_pool_size="20GB",
        enable_cudf_spill=True, rmm_release_threshold="1GB", pre_import=["cudf", "torch"],
        torch_memory_fraction=0.4, worker_extra_args=["--dashboard-prefix", "x"],
    )  # fmt: skip
    assert plan.jobs == 2
    assert plan.torch_fraction == 0.4
    assert "#SBATCH --gres=gpu:4" in script.splitlines()
    assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in script.splitlines()
    assert "#SBATCH --cpus-per-task=32" in script.splitlines()  # 8 for each worker
    words = shlex.split(script.splitlines()[-1])
    assert words[1:3] == ["-m", "dask_cuda.cli"]
    given = dict(itertools.pairwise(words))
    assert given["--nthreads"] == "2"  # with pandas frames
    assert given["--rmm-maximum-pool-size"] == "20000000000"
    assert given["--device-memory-limit"] == "16000000000"
    assert given["--rmm-release-threshold"] == "1GB"
    assert given["--pre-import"] == "cudf,torch"
    assert {"--rmm-async", "--enable-cudf-spill"} <= set(words)
    assert given["--dashboard-prefix"] == "x"
    assert "--rmm-pool-size" not in words
    plan, script = job_script(gpus_per_job=1, memory="64GB", backend="cudf")  # as a local cluster
    assert plan.torch_fraction == 0.45
    assert "--nthreads 1 " in script
    assert "--rmm-pool-size 0.3 --rmm-maximum-pool-size 0.5 --device-memory-limit 0.4" in script


@pytest.mark.rapids
def test_dask_cuda_reads_the_arguments_that_are_written():
    cli = importlib.import_module("dask_cuda.cli").worker
    names = {parameter.name for parameter in cli.params}
    cluster = importlib.import_module("dask_cuda").LocalCUDACluster
    local = set(inspect.signature(cluster).parameters)
    assert set(CUDA_FLAGS) <= names
    # Those of its Nanny, which LocalCUDACluster hands on by their own names.
    assert set(CUDA_FLAGS) - local <= {"worker_class"}
    settings = {
        "rmm_pool_size": 0.3, "device_memory_limit": 16_000_000_000, "rmm_managed_memory": False,
        "rmm_track_allocations": True, "rmm_log_directory": "a folder", "enable_nvlink": None,
        "rmm_allocator_external_lib_list": ["torch", "cupy"], "cudf_spill_stats": 1,
    }  # fmt: skip
    words = shlex.split(" ".join(cuda_arguments(settings)))
    found = cli.make_context("worker", ["tcp://127.0.0.1:1", *words]).params
    assert found["rmm_pool_size"] == "0.3"
    assert found["device_memory_limit"] == "16000000000"
    assert found["rmm_managed_memory"] is False
    assert found["rmm_track_allocations"] is True
    assert found["rmm_log_directory"] == "a folder"
    assert found["enable_nvlink"] is None
    assert set(found["rmm_allocator_external_lib_list"]) == {"torch", "cupy"}
    assert found["cudf_spill_stats"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"walltime": "01:00:00"}, ("3300s", "60s")),
        ({"walltime": "10"}, ("480s", "24s")),
        ({"walltime": "10", "leave_before": "1m"}, ("540s", "12s")),
        ({}, ("1500s", "60s")),  # dask-jobqueue's half hour
        ({"walltime": "UNLIMITED"}, None),
    ],
)
def test_workers_leave_before_the_walltime(options, words):
    prologue = plan_slurm(memory="1GB", **options).arguments["job_script_prologue"]
    if words is None:
        assert prologue == []
        return
    names = [line.split()[1].partition("=")[0] for line in prologue]
    assert [line.rpartition("=")[2] for line in prologue] == list(words)
    with dask.config.set(dask.config.collect_env(dict(zip(names, words, strict=True)))):
        assert dask.config.get("distributed.worker.lifetime.duration") == words[0]
        assert dask.config.get("distributed.worker.lifetime.stagger") == words[1]


def test_a_walltime_is_read_as_sbatch_reads_it():
    seconds = {
        "90": 5_400, "90:30": 5_430, "1:30:15": 5_415, "2-3": 183_600, "2-3:15": 184_500,
        "2-3:15:20": 184_520, "infinite": None, "UNLIMITED": None,
    }  # fmt: skip
    assert {text: parse_walltime(text) for text in seconds} == seconds
    for text in ("", "2h", "1:2:3:4", "1-", "0", "-5", "0:00"):
        with pytest.raises(ValueError, match="is no time limit of Slurm's"):
            parse_walltime(text)


def test_the_users_dask_configuration_holds():
    configured = {
        "jobqueue.slurm.memory": "8GB", "jobqueue.slurm.cores": 6, "jobqueue.slurm.walltime": "20",
        "jobqueue.slurm.job-extra-directives": ["--reservation=mine"],
        "jobqueue.slurm.job-script-prologue": ["module load cuda"],
        "jobqueue.slurm.scheduler-options": {"port": 0},
    }  # fmt: skip
    with dask.config.set(configured):
        _, script = job_script()
        plan = plan_slurm(job_extra=["--exclusive"])
    assert "#SBATCH --reservation=mine" in script
    assert "#SBATCH --cpus-per-task=6" in script
    assert "DURATION=960s" in script
    assert "\nmodule load cuda\n" in script
    assert plan.arguments["job_extra_directives"] == ["--exclusive", "--reservation=mine"]
    assert plan.arguments["scheduler_options"]["port"] == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"partitoin": "x"}, TypeError, "Did you mean 'partition'"),
        ({"device_memory_limit": 0.5}, TypeError, "no option 'device_memory_limit'"),
        ({"memory": None}, ValueError, "memory= is missing"),
        ({"gpus_per_job": 2, "n_workers": 3}, ValueError, "a multiple of 2"),
        ({"gpus_per_job": 2, "processes": 1}, ValueError, "each GPU has one worker"),
        ({"gpus_per_job": -1}, ValueError, "gpus_per_job=-1"),
        ({"n_workers": True}, TypeError, "n_workers=True"),
        ({"processes": 4, "cores": 2}, ValueError, "cores=2"),
        ({"walltime": "10", "leave_before": "9m"}, ValueError, "no time to work"),
        ({"walltime": "2h"}, ValueError, "no time limit of Slurm's"),
        ({"job_extra": "--exclusive"}, ValueError, r"\['--exclusive'\]"),
        (
            {"gpus_per_job": 1, "rmm_async": True, "rmm_maximum_pool_size": 0.9},
            ValueError,
            "starves the other",
        ),
    ],
)
def test_wrong_options_are_told_before_anything_starts(options, error, words):
    with pytest.raises(error, match=words):
        start_slurm({"memory": "1GB", **options})


def script(*arguments, config="", **options):
    """A script with the command's defaults for other options."""
    defaults = slurm_script.make_context("slurm-script", []).params
    options = {name: options.get(name, value) for name, value in defaults.items()}
    del options["config"], options["arguments"]
    return sbatch_script(arguments, config, options)


def test_a_script_says_what_was_asked_for_and_bash_reads_it():
    text = script(
        "crawl/*.jsonl", "out dir/", "--set", "a='b' $c", nodes=3, gpus_per_node=4,
        memory="64G", walltime="2-00", partition="gpu", account="me", interface="ib0",
        job_extra=("--exclusive",), prologue=("module load cuda",), requeue_before=300,
        worker_options="--rmm-async",
    )  # fmt: skip
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    wanted = """--nodes=3 --ntasks-per-node=4 --gpus-per-task=1 --cpus-per-task=8 --mem=64G
        --time=2-00 --partition=gpu --account=me --exclusive --requeue --open-mode=append
        --signal=B:USR1@300"""
    assert {f"#SBATCH {option}" for option in wanted.split()} <= set(text.splitlines())
    directives = [n for n, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    first_command = next(
        n for n, line in enumerate(text.splitlines()) if line and not line.startswith("#")
    )
    assert max(directives) < first_command  # sbatch reads none after that
    command = re.search(r"gpuclassify classify (.*?) \\\n", text)[1]
    assert shlex.split(command) == ["crawl/*.jsonl", "out dir/", "--set", "a='b' $c"]
    assert text.count("--interface ib0") == 2
    assert "-m dask cuda worker" in text
    assert "--nthreads 2 " in text  # worker_options come behind, so that one of theirs counts
    assert "--rmm-async" in text
    assert text.count('--preload "$PRELOAD"') == 2
    assert max(map(len, text.splitlines())) <= 110


def test_a_script_for_a_container_passes_gpus_on_and_takes_its_python():
    text = script("in", "out", container="my image.sif", gpus_per_node=2)
    assert "\nPYTHON=(apptainer exec --nv --bind=\"$PWD\" 'my image.sif' python3)\n" in text
    assert "--nv" not in script("in", "out", container="my image.sif")
    assert f"\nPYTHON={sys.executable}\n" in script("in", "out")


def test_a_script_for_cpus_asks_for_no_gpu_and_one_without_tls_says_nothing_of_it():
    text = script("in", "out", workers_per_node=2, tls=False)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "--protocol tcp://" in text
    assert "TLS__" not in text
    assert "#SBATCH --ntasks-per-node=2" in text
    assert "-m dask worker" in text
    assert "--nthreads 1 " in text
    assert not re.search(r"(?i)gpus|gres|cuda|--mem=", text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prologue": ("export HF_TOKEN=hf_abc",)}, "the settings contain a token"),
        ({"arguments": ("--set", "x=hf_" + "a" * 34)}, "the settings contain a token"),
        (
            {"prologue": ("export AWS_SECRET_ACCESS_KEY='abc'",)},
            "the settings contain a token or password",
        ),
        ({"arguments": ("--set", "PGPASSWORD=x")}, "the settings contain a token or password"),
        ({"partition": "gpu\nrm -r x"}, "partition=.* has a line break"),
        ({"job_extra": ("--exclusive", "--x\ncurl")}, "job_extra=.* has a line break"),
        ({"prologue": ("module load cuda\rrm",)}, "prologue=.* has a line break"),
        ({"walltime": "2"}, "leaves no time to work"),
        ({"walltime": "soon"}, "no time limit of Slurm's"),
        ({"gpus_per_node": 2, "workers_per_node": 1}, "each GPU has one worker"),
        ({"nodes": 0}, "nodes=0"),
        ({"partition": ""}, "partition='' is not a text: leave it out"),
        ({"certificates": "here", "tls": False}, "certificates= has no effect with tls=False"),
    ],
)
def test_scripts_that_are_refused(settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        script(*settings.get("arguments", ()), **settings)


@pytest.mark.parametrize(
    "line", ["END_OF_SETTINGS", "END_OF_SETTINGS_", "$(touch ran)", "`touch ran`"]
)
def test_nothing_of_the_settings_becomes_a_command(tmp_path, line):
    config = f"a: |\n{line}\ntouch ran\n$(touch ran)\n"
    names = {
        "python": "true; touch ran",
        "interface": "$(touch ran)",
        "worker_options": "$(touch ran) ';'",
    }
    text = script("in $(touch ran)", config=config, tls=False, **names)
    # What would run on the node: each program only says what it is given.
    program = f"{re.escape(shlex.quote(names['python']))}"
    text = re.sub(rf"^PYTHON={program}$", "PYTHON=report", text, flags=re.M)
    said = "report() { printf '%s\\n' \"$@\" >> said; cat >> said; touch x; }\n"
    quiet = (
        'srun() { shift; shift; "$@"; }\nscontrol() { :; }\nSLURM_JOB_ID=1\nSLURM_CPUS_PER_TASK=1\n'
    )
    text = text.replace("until [ -s", "touch $SCHEDULER_FILE; echo > $SCHEDULER_FILE\nuntil [ -s")
    subprocess.run(
        ["bash", "-c", said + quiet + text], cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=60
    )
    assert not (tmp_path / "ran").exists()
    assert config.rstrip() in (tmp_path / "said").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        return CliRunner().invoke(slurm_script, [*words], obj={"debug": False})

    return run


JOB = ("--", "in.jsonl", "out", "--classifier", "domain")


def test_the_command_writes_settings_into_the_script(run, tmp_path):
    settings = {"input": ["a'b.jsonl"], "output": "out", "classifiers": [{"classifier": "domain"}]}
    (tmp_path / "job.yaml").write_text("# why\n" + yaml.safe_dump(settings))
    done = run("--config", "job.yaml", "--", "--batch-size", "8")
    assert done.exit_code == 0, done.output
    assert "# why" in done.output
    written = re.search(r"<<'(\w+)' &\n(.*?)\n\1\n", done.output, re.DOTALL)[2]
    assert yaml.safe_load(written) == settings
    assert "classify --config /dev/stdin --batch-size 8" in done.output
    assert "job.yaml" not in done.output


LANGUAGE = ("--", "in.jsonl", "out", "--classifier", "language", "--model", "lid.bin")
GPUS = ("--gpus-per-node", "2")


@pytest.mark.parametrize(
    ("words", "takes_gpus"),
    [
        ((*GPUS, *JOB), True),
        ((*GPUS, *LANGUAGE[:5], "--model", "language:lid.bin", "--classifier", "domain"), True),
        ((*GPUS, *LANGUAGE, "--backend", "cudf"), True),
        ((*GPUS, *LANGUAGE), False),
        ((*GPUS, *JOB, "--device", "cpu"), False),
    ],
)
def test_gpus_are_asked_for_where_a_stage_can_use_one(run, words, takes_gpus):
    done = run(*words)
    assert ("#SBATCH --gpus-per-task=1" in done.output) == takes_gpus
    if not takes_gpus:
        assert done.exit_code == 2
        told = " ".join(done.output.split())
        assert "no stage of the job can use the GPUs of --gpus-per-node 2: leave it out" in told
        assert "(--workers-per-node 8)" in told
        done = run("--workers-per-node", "8", *words[2:])
    assert done.exit_code == 0, done.output
    assert "gpuclassify, dask, and all that the models import" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*JOB, "--batch-sise", "8"), "No such option"),
        ((*JOB, "--batch-sise", "8"), "Usage: slurm-script -- [OPTIONS] INPUT... OUTPUT\n"),
        ((*JOB, "--min-score", "high"), "pass a number"),
        (("--", "in.jsonl", "out"), "needs classifiers: pass"),
        ((*JOB, "--workers", "4"), "use --nodes"),
        ((*JOB, "--cluster", "gpu"), "starts a cluster"),
        ((*JOB, "--scheduler", "tcp://a:1"), "starts a scheduler"),
        ((*JOB, "--restart"), "start over"),
        ((*JOB, "--config", "job.yaml"), "before the --"),
        (("--config", "job.yaml"), "leave out the job's setting workers=4"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
        (("--nodes", "0", *JOB), "--nodes 0"),
        (("--certificates", "nowhere", *JOB), "'nowhere' is no directory with ca.pem"),
        (("--certificates", ".", "--no-tls", *JOB), "--certificates has no effect with --no-tls"),
        (("--", "https://me:hunter2@host/a.jsonl", *JOB[2:]), "has a password"),
        (("--", "in.jsonl", "ftp://me:p'ss@host/out", *JOB[3:]), "the URL of ftp://host/out has"),
        (("--prologue", "export A=https://host/?sig=1", *JOB), "may be a signature"),
        (("--config", "signed.yaml"), "the URL of https://host/in.jsonl has"),
    ],
)
def test_wrong_jobs_are_told_before_they_wait_in_a_queue(run, tmp_path, words, told):
    settings = {
        "input": "in.jsonl", "output": "out", "workers": 4,
        "classifiers": [{"classifier": "domain"}],
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(settings))
    signed = {**settings, "input": "https://host/in.jsonl?X-Amz-Signature=1"}
    (tmp_path / "signed.yaml").write_text(yaml.safe_dump(signed))
    done = run(*words)
    assert done.exit_code == 2
    assert "hunter2" not in done.output
    assert told in done.output
    assert "#SBATCH" not in done.output


# What a job's file asks of Slurm, which starts a worker in each task; the rest is as it stands.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
LOOK = """
import json, os, stat, sys
from distributed import Client
with Client(scheduler_file=sys.argv[sys.argv.index("--scheduler") + 1]) as client:
    client.wait_for_workers(1)
    folder = os.environ.get("TLS")
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, folder + "/key.pem")]
    print(json.dumps([client.scheduler.address, *client.nthreads(), *modes]))
"""


# Apptainer's command line, without a container.
APPTAINER = """#!/bin/sh
[ "$1 $2 $3" = "exec --bind=$PWD my image.sif" ] || exit 9
shift 3
echo "$2 $3" >> entered
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_own", "container"), [(False, None), (True, None), (False, "my image.sif")]
)
def test_a_scripts_processes_speak_tls_alone(tmp_path, has_own, container):
    certificates = None
    if has_own:
        certificates = str(tmp_path / "pki")
        make_certificate(Path(certificates))
    # In the place of the command: who is there, and how.
    (tmp_path / "look.py").write_text(LOOK)
    for name, content in {"srun": SRUN, "apptainer": APPTAINER}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    options = {"certificates": certificates, "container": container}
    text = script("in", "out", python=sys.executable, **options)
    text = text.replace("-m gpuclassify classify", f"{tmp_path}/look.py")
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run(
        ["bash"], input=text.replace("\nTLS=", "\nexport TLS="),
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *addresses, folder_mode, key_mode = json.loads(done.stdout.splitlines()[-1])
    assert len(addresses) == 2
    assert all(address.startswith("tls://") for address in addresses)
    assert (folder_mode, key_mode) == (0o700, 0o600)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".gpuclassify")]
    if container is not None:  # certificates, scheduler, command and worker ran in it
        started = [
            "-m dask",
            "-m dask",
            "-m gpuclassify.cluster.security",
            f"{tmp_path}/look.py in",
        ]
        assert sorted((tmp_path / "entered").read_text().splitlines()) == started
