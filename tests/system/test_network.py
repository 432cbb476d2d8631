"""A network that is cut between machines while a job runs, as network namespaces of one machine."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gpuclassify import DomainClassifier
from tests.processes import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SCHEDULER = "10.213.77.1"
ROWS = 400
# The shortest silence on a line that Dask can tell, and its usual time for connecting.
SETTINGS = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s"}
CLIENT = """
import sys, time
from pathlib import Path
from distributed import Client
from gpuclassify import DomainClassifier
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import ParquetWriter

folder = Path(sys.argv[1])

def double(frame):
    time.sleep(0.2)
    return frame.assign(doubled=frame["id"] * 2)

def report(done, parts, summary):
    (folder / "done").write_text(str(done))

reader = JsonlReader(f"{folder}/in.jsonl", part_bytes=200)
with Client(scheduler_file=f"{folder}/scheduler.json", timeout=60) as client:
    client.wait_for_workers(2, timeout=120)
    classifier = DomainClassifier(model=sys.argv[2], score_field="scores", autocast=False)
    stages = [reader, double, classifier, ParquetWriter(f"{folder}/out", output_bytes=0)]
    Pipeline(stages).run(client, report=report)
    print(len(client.nthreads()))
"""


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@pytest.fixture
def network():
    """Three namespaces: the scheduler's, with a bridge to those of two workers."""
    if shutil.which("ip") is None:
        pytest.fail("this test needs the Debian package iproute2", pytrace=False)
    if os.geteuid():
        pytest.fail("this test makes network namespaces: run it as root", pytrace=False)
    names = [f"gpuclassify-{os.getpid()}-{number}" for number in range(3)]
    try:
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if number == 0:
                ip("-n", name, "link", "add", "bridge", "type", "bridge")
                ip("-n", name, "address", "add", f"{SCHEDULER}/24", "dev", "bridge")
                ip("-n", name, "link", "set", "bridge", "up")
                continue
            ends = ["name", f"line{number}", "type", "veth", "peer", "name", "eth0", "netns", name]
            ip("-n", names[0], "link", "add", *ends)
            ip("-n", names[0], "link", "set", f"line{number}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.213.77.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(stack, namespace, *command, **options):
    """A process in a namespace, which ends with the test."""
    search = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", namespace, sys.executable, *map(str, command)]
    process = subprocess.Popen(command, env=environment, **options)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def parts_done(folder):
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((folder / "done").read_text())
    return 0


def test_a_job_survives_a_line_that_is_cut(network, tmp_path, checkpoint):
    scheduler, *workers = network
    with (tmp_path / "in.jsonl").open("w") as file:
        for row in range(ROWS):
            file.write(json.dumps({"id": row, "text": f"text {row}"}) + "\n")
    (tmp_path / "client.py").write_text(CLIENT)
    module, file = "distributed.cli.dask_worker", tmp_path / "scheduler.json"
    with contextlib.ExitStack() as stack:
        options = ["--host", SCHEDULER, "--port", "0", "--scheduler-file", file, "--no-dashboard"]
        start(stack, scheduler, "-m", "distributed.cli.dask_scheduler", *options)
        for number, name in enumerate(workers):
            options = ["--nthreads", "1", "--no-dashboard", "--name", f"worker{number}"]
            options += ["--scheduler-file", file, "--local-directory", tmp_path / name]
            options += ["--host", f"10.213.77.{number + 2}", "--death-timeout", "120"]
            start(stack, name, "-m", module, *options)
        command = [tmp_path / "client.py", tmp_path, checkpoint("domain")]
        client = start(stack, scheduler, *command, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: parts_done(tmp_path) >= 5, seconds=200)
        ip("-n", scheduler, "link", "set", "line1", "down")
        cut_at = parts_done(tmp_path)
        output, _ = client.communicate(timeout=300)
        assert client.returncode == 0
    parts = len(list((tmp_path / "out").glob("*.parquet")))
    assert cut_at < parts - 5  # it was in the middle of the job
    assert output.split() == ["1"]  # the worker behind the line is no part of the cluster any more
    found = pd.concat(pd.read_parquet(path) for path in (tmp_path / "out").glob("*.parquet"))
    found = found.sort_values("id", ignore_index=True)
    assert found["id"].tolist() == list(range(ROWS))
    assert found["doubled"].tolist() == [2 * row for row in range(ROWS)]
    options = {"model": str(checkpoint("domain")), "score_field": "scores", "autocast": False}
    calm = DomainClassifier(**options)(found[["id", "text"]])
    assert found["domain_pred"].tolist() == calm["domain_pred"].tolist()
    np.testing.assert_allclose(np.stack(found["scores"]), np.stack(calm["scores"]), atol=1e-5)
    books = tmp_path / "out" / "_gpuclassify"
    assert len(list((books / "records").iterdir())) == parts
    assert (tmp_path / "out" / "_SUCCESS").exists()
