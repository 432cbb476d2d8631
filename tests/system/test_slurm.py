"""Clusters and jobs on a real Slurm with two nodes and two fake GPUs on each."""

import json
import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Worker

from gpuclassify import get_client
from gpuclassify.cluster.sizing import parse_walltime
from gpuclassify.commands.settings import JobSettings
from gpuclassify.commands.slurm_script import slurm_script
from tests.oracle import assert_labels_agree, raw_outputs
from tests.replicas import sample_texts, write_checkpoint
from tests.system.slurm_cluster import SlurmCluster, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
RAPIDS_PYTHON = ROOT / ".venv-rapids" / "bin" / "python"
GATE = Path(__file__).with_name("gate.py")
ALL_GPUS = {("n0", "0"), ("n0", "1"), ("n1", "0"), ("n1", "1")}
# dask-cuda asks the driver about every device, and there is none here: these are the names under
# which its own tests leave that out. Placement, names and arguments stay what they are.
WITHOUT_DRIVER = "export DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC=1"
MOCK_WORKER = "dask_cuda.utils_test.MockWorker"
START_SECONDS = 400
ENDS = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        # The nodes' processes read this checkout.
        patch.setenv("PYTHONPATH", str(ROOT))
        yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def folder(slurm, tmp_path, monkeypatch):
    """Where logs of jobs go; nothing of a test is in the queue after it."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    try:
        wait_until(lambda: not slurm.jobs(), "the queue to be empty")
    except TimeoutError:
        slurm.run("scancel", *slurm.jobs())  # not in the way of the next test
        raise


@pytest.fixture(scope="module")
def domain(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "domain", "domain")


@pytest.fixture
def rapids_python():
    if not RAPIDS_PYTHON.exists():
        pytest.fail(f"{RAPIDS_PYTHON} has dask-cuda; make it with: make test-rapids")
    return str(RAPIDS_PYTHON)


@pytest.fixture
def texts(folder):
    """The texts of ``in.jsonl``."""
    texts = sample_texts(60)
    lines = [json.dumps({"id": row, "text": text}) for row, text in enumerate(texts)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    return texts


def arguments(domain):
    """A job of some 20 parts, each a file."""
    return [
        "in.jsonl", "out", "--classifier", "domain", "--model", str(domain),
        "--set", "autocast=false", "--part-size", "600", "--output-bytes", "0",
    ]  # fmt: skip


def assert_right(domain, texts):
    """The rows written are the input's, with the labels of plain transformers."""
    frames = [pd.read_parquet(path) for path in sorted(Path("out").glob("*.parquet"))]
    found = pd.concat(frames).sort_values("id")
    assert found["id"].tolist() == list(range(len(texts)))
    assert found["text"].tolist() == list(texts)
    names = json.loads(Path(domain, "config.json").read_text())["id2label"]
    labels = [names[str(number)] for number in range(len(names))]
    expected = raw_outputs(domain, texts)
    assert assert_labels_agree(found["domain_pred"], labels, expected) <= 2


def places_of(client):
    """The node, the GPU and the Slurm job of every worker."""

    def where():  # in here, so that it travels by value
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none").split(",")
        return os.environ["SLURMD_NODENAME"], gpus[0], os.environ["SLURM_JOB_ID"]

    return list(client.run(where).values())


def test_a_killed_job_is_replaced_and_the_classification_is_whole(slurm, folder, domain, texts):
    gate = folder / "gate"
    settings = JobSettings.of({
        "input": "in.jsonl", "output": "out", "part_size": 600,
        "classifiers": [{"classifier": "domain", "model": str(domain), "autocast": False}],
    })  # fmt: skip
    options = {
        "n_workers": 2,
        "cores": 1,
        "memory": "2GB",
        "partition": "debug",
        "walltime": "1:00:00",
        "prologue": [f"export GATE={gate}"],
        "worker_extra_args": ["--preload", str(GATE)],
        "job_extra": ["--comment=mine"],
        "look_every_seconds": 0.5,
    }
    with get_client("slurm", **options) as client:
        client.wait_for_workers(2, timeout=START_SECONDS)
        addresses = [client.scheduler.address, *client.nthreads()]
        assert {address.partition("://")[0] for address in addresses} == {"tls"}
        before = slurm.jobs()
        assert {slurm.job(job)["Comment"] for job in before} == {"mine"}
        assert {(gpu, job) for _, gpu, job in places_of(client)} == {
            ("none", job) for job in before
        }

        def kill_once(done, total, summary):
            if done >= 1 and not gate.exists():
                slurm.run("scancel", "--signal=KILL", "--full", before[0])
                gate.touch()

        summary = settings.job().prepare().run(client, kill_once)
        assert gate.exists()
        wait_until(lambda: before[0] not in slurm.jobs(), "the job to be gone")
        client.wait_for_workers(2, timeout=START_SECONDS)
        after = wait_until(lambda: len(slurm.jobs()) == 2 and slurm.jobs(), "another job")
        assert before[1] in after
        assert before[0] not in after
    assert summary.rows_written == len(texts)
    assert_right(domain, texts)


def test_each_gpu_gets_one_worker(slurm, rapids_python):
    options = {
        "n_workers": 4,
        "gpus_per_job": 2,
        "cores": 2,
        "memory": "2GB",
        "python": rapids_python,
        "prologue": [WITHOUT_DRIVER],
        "worker_class": MOCK_WORKER,
        "torch_memory_fraction": None,
        "rmm_pool_size": 0.25,
    }
    with get_client("slurm", **options) as client:
        client.wait_for_workers(4, timeout=START_SECONDS)
        places = places_of(client)
        assert len(places) == 4
        assert {(node, gpu) for node, gpu, _ in places} == ALL_GPUS
        assert {job for _, _, job in places} == set(slurm.jobs())
        assert len(slurm.jobs()) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"partition": "nowhere"}, "invalid partition specified: nowhere"),
        ({"gpus_per_job": 3, "n_workers": 3}, "Requested node configuration is not available"),
    ],
)
def test_what_sbatch_says_against_a_job_is_the_error(slurm, wrong, words):
    with pytest.raises(RuntimeError, match=words):
        get_client("slurm", memory="1GB", cores=3, **wrong)
    assert slurm.jobs() == []


def test_a_worker_leaves_before_its_walltime_and_hands_over_what_it_holds(slurm, folder):
    options = {
        "n_workers": 1,
        "cores": 1,
        "memory": "1GB",
        "walltime": "3",
        "leave_before": "145s",
        "look_every_seconds": 0.5,
    }
    with get_client("slurm", **options) as client:
        client.wait_for_workers(1, timeout=START_SECONDS)
        (job,) = slurm.jobs()
        (leaving,) = client.nthreads()

        async def join():
            return await Worker(client.scheduler.address, nthreads=1, security=client.security)

        # Something to hand over to, which stays.
        staying = client.sync(join)
        try:
            calls = folder / "calls"

            def hold():
                with calls.open("a") as file:
                    file.write("called\n")
                return "held"

            future = client.submit(hold, workers=[leaving], allow_other_workers=True)
            assert future.result(timeout=START_SECONDS) == "held"
            wait_until(lambda: leaving not in client.nthreads(), "it to leave")
            assert client.who_has(future)[future.key] == (staying.address,)
            wait_until(lambda: slurm.job(job)["JobState"] == "COMPLETED", "the job's end")
            assert future.result(timeout=60) == "held"
            assert calls.read_text() == "called\n"
            client.wait_for_workers(2, timeout=START_SECONDS)  # another job
        finally:
            client.sync(staying.close)


def test_jobs_that_end_without_a_worker_close_the_cluster_and_say_why(slurm, caplog):
    options = {
        "memory": "1GB",
        "cores": 1,
        "prologue": ["echo the environment is broken >&2; exit 1"],
        "look_every_seconds": 0.3,
    }
    client = get_client("slurm", **options)
    try:
        with pytest.raises(BaseException, match=r"cancelled|lost"):
            client.submit(os.getpid).result(timeout=START_SECONDS)
    finally:
        client.close()
    assert "without a worker" in caplog.text
    assert "the environment is broken" in caplog.text


def test_time_limits_are_read_as_slurm_reads_them(slurm):
    for text in ("30", "2:30", "1:02:00", "2-3", "1-02:30", "1-0:0:30", "07"):
        job = slurm.run("sbatch", "--parsable", "--hold", f"--time={text}", "--wrap=true")
        shown = slurm.job(job)["TimeLimit"]
        slurm.run("scancel", job)
        seconds = parse_walltime(text)
        # Slurm counts whole minutes.
        assert pd.Timedelta(shown.replace("-", " days ")).total_seconds() == -(-seconds // 60) * 60


def write_script(path, *words):
    done = CliRunner().invoke(slurm_script, [*map(str, words)], obj={"debug": False})
    assert done.exit_code == 0, done.output
    path.write_text(done.output)


def test_a_script_binds_gpus_and_goes_on_after_its_time_limit(
    slurm, folder, domain, texts, rapids_python
):
    gate = folder / "gate"
    write_script(
        folder / "job.sh", "--nodes", 2, "--gpus-per-node", 2, "--cpus-per-task", 1,
        "--memory", "4G", "--python", rapids_python, "--partition", "debug",
        "--prologue", WITHOUT_DRIVER, "--prologue", f"export GATE={gate}",
        "--worker-options", f"--worker-class {MOCK_WORKER} --preload {GATE}",
        "--", *arguments(domain),
    )  # fmt: skip
    job = slurm.run("sbatch", "--parsable", "job.sh")
    wait_until(lambda: len(list(folder.glob("worker *"))) >= 4, "the workers", START_SECONDS)
    places = [path.name.split()[1:3] for path in folder.glob("worker *")]
    assert {tuple(place) for place in places} == ALL_GPUS
    wait_until(lambda: list(folder.glob("out/*.parquet")), "a part", START_SECONDS)
    # What Slurm itself sends some time before the limit.
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    wait_until(
        lambda: slurm.job(job)["JobState"] == "PENDING", "the job to be requeued", START_SECONDS
    )
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("out/*.parquet")}
    gate.touch()
    # What a run leaves whose node is lost.
    (folder / f".gpuclassify-{job}-0.json").write_text("{}")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # not after two minutes
    state = wait_until(lambda: ended(slurm, job), "the job's end", START_SECONDS)
    log = (folder / f"gpuclassify-{job}.log").read_text()
    assert state == ("COMPLETED", "0:0"), told(slurm, log)
    assert slurm.job(job)["Restarts"] == "1"
    assert "parts were done already" in log
    for name, time_ns in written.items():
        assert (folder / "out" / name).stat().st_mtime_ns == time_ns
    assert 0 < len(written) < len(list(folder.glob("out/*.parquet")))
    assert_right(domain, texts)
    assert list(folder.glob(".gpuclassify-*")) == []


def test_a_script_whose_workers_cannot_start_ends_at_once(slurm, folder, domain, texts):
    write_script(
        folder / "job.sh", "--cpus-per-task", 1, "--worker-options", "--nthreads none",
        "--", *arguments(domain),
    )  # fmt: skip
    job = slurm.run("sbatch", "--parsable", "job.sh")
    state, code = wait_until(lambda: ended(slurm, job), "the job's end", START_SECONDS)
    assert state == "FAILED"
    assert code != "0:0"
    log = (folder / f"gpuclassify-{job}.log").read_text()
    assert "Invalid value for '--nthreads'" in log
    assert "all workers have ended" in log


def test_settings_in_a_script_run_on_cpu_workers_and_the_exit_code_is_the_commands(
    slurm, folder, domain, texts
):
    with (folder / "in.jsonl").open("a") as file:
        file.write('\n{"id": 60, "text": 5}')  # is no text
    config = (
        f"# what to do\ninput: in.jsonl\noutput: out\non_error: quarantine\nclassifiers:\n"
        f"- {{classifier: domain, model: {domain}, autocast: false}}\n"
    )
    (folder / "job.yaml").write_text(config)
    write_script(folder / "job.sh", "--config", "job.yaml", "--cpus-per-task", 1)
    (folder / "job.yaml").unlink()
    assert subprocess.run(["sbatch", "--wait", "job.sh"], check=False).returncode == 3
    assert_right(domain, texts)


def ended(slurm, job):
    """State and exit code of a job that has ended."""
    shown = slurm.job(job)
    return (shown["JobState"], shown["ExitCode"]) if shown["JobState"] in ENDS else None


def told(slurm, log):
    """What the job and Slurm's daemons wrote, for a test that fails."""
    return log + "".join(
        f"\n{path.name}:\n{path.read_text(errors='replace')[-8000:]}"
        for path in sorted(slurm.folder.glob("slurm*.log"))
    )
