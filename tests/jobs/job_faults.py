"""Jobs in processes that die, and the little functions that they run."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
from distributed import Client

from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores import local
from gpuclassify.jobs.task import run_part

STORE_PART_BYTES = 8_000  # some 12 parts: every request to a store takes its time
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["gpuclassify.jobs.pipeline", "pandas", "pytest"])


def write_input(folder, files=3, rows=200):
    """JSON lines with texts of several lengths and ids that tell rows apart."""
    folder.mkdir(parents=True)
    for number in range(files):
        with (folder / f"{number}.jsonl").open("w") as file:
            for row in range(number * rows, (number + 1) * rows):
                file.write(json.dumps({"id": row, "text": f"text {row} " + "ü" * (row % 40)}))
                file.write("\n")


def double(frame):
    """A stage: drops every third row, and computes a column."""
    frame = frame[frame["id"] % 3 != 0]
    return frame.assign(doubled=frame["id"] * 2)


def with_remainder(frame):
    """The same, and columns that rows are put into folders by."""
    frame = double(frame)
    remainders = {"remainder": frame["id"] % 7 % 3, "parity": frame["id"] % 2}
    return frame.assign(**remainders, half=frame["id"] / 2)


def with_scores(frame):
    """A stage that writes scores, and says how often it did."""
    with Path(os.environ["SCORED"]).open("a") as file:
        file.write("".join(f"{row}\n" for row in frame["id"]))
    return frame.assign(a=frame["a"] * 2, b=frame["b"] - 1)


def slowly(frame):
    """The same, so slow that a signal comes in between.

    Where GATE names a file, rows from 150 on wait for it; with MOST_PARTS, as many are written and
    no more. Arguments would be part of the job.
    """
    time.sleep(0.02)
    most = os.environ.get("MOST_PARTS")
    while most and len(list(Path(os.environ["PARTS"]).glob("*.parquet"))) >= int(most):
        time.sleep(0.01)
    gate = os.environ.get("GATE")
    while gate and len(frame) and frame["id"].min() >= 150 and not Path(gate).exists():
        time.sleep(0.01)
    return double(frame)


def with_process(frame):
    """The same, and who did it: attempts that differ."""
    time.sleep(0.01)
    return double(frame).assign(process=os.getpid())


def job(folder, stage=double, part_bytes=2_000, **options):
    """A pipeline from ``folder/in`` to ``folder/out``, of some 15 parts."""
    reader = JsonlReader(f"{folder}/in/*.jsonl", part_bytes=part_bytes)
    writer = ParquetWriter(f"{folder}/out", output_bytes=0)  # a file for each part
    return Pipeline([reader, stage, writer], **options)


def result(folder):
    """The rows that are there, in the order of their ids."""
    frames = [pd.read_parquet(path) for path in sorted(Path(folder, "out").glob("*.parquet"))]
    return pd.concat(frames).sort_values("id", ignore_index=True)


def in_process(function, *arguments):
    """Run a function in a process of its own; returns the process, started."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    return process


def run_job(folder, stage, most_parts):
    """A client, to be killed once it has written so many parts."""
    os.environ |= {"MOST_PARTS": str(most_parts), "PARTS": f"{folder}/out"}
    job(folder, stage).run()


def run_job_at(folder, stage, environment, address=None):
    """A client in an object store that `environment` names, to be killed by the store."""
    os.environ |= environment
    with Client(address) if address else contextlib.nullcontext() as client:
        job(folder, stage, STORE_PART_BYTES).run(client)


def run_job_until_link(folder, last_link, is_done):
    """See `run_until_link`."""
    run_until_link(job(folder), last_link, is_done)


def run_until_link(job, last_link, is_done):
    """A job that dies by its own hand at a call of link(), before or after it is done."""
    link, calls = os.link, []

    def die(*arguments):
        calls.append(arguments)
        if len(calls) == last_link and not is_done:
            os.kill(os.getpid(), signal.SIGKILL)
        link(*arguments)
        if len(calls) == last_link:
            os.kill(os.getpid(), signal.SIGKILL)

    local.os.link = die
    job.run()


def run_until_step(job, step, done, environment):
    """A job that dies by its own hand once so many parts of a step are done."""
    os.environ |= environment

    def die(name, parts, of, summary):
        if (name, parts) == (step, done):
            os.kill(os.getpid(), signal.SIGKILL)

    job.run(report=die)


def race(folder, barrier, answers):
    """One of several attempts at the same parts, all at once."""
    prepared = job(folder, with_process).prepare()
    for number, name in enumerate(prepared.manifest.names()[:5]):
        barrier.wait()
        record = run_part(prepared.source.input.parts[number], number, name, prepared.spec.pack())
        answers.put((name, record.digest))


def run_on_full_disk(folder, answers):
    """A job whose files may not grow."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, 1_500))
    with pytest.raises(OSError, match="File too large") as caught:
        job(folder).run()
    answers.put((str(caught.value), caught.value.__notes__))


def run_without_permission(folder, answers):
    """A job whose output may not be written to any more, not as root either."""
    _drop_capabilities()
    out = Path(folder, "out")
    out.chmod(0o500)
    with pytest.raises(PermissionError) as caught:
        job(folder).run()
    out.chmod(0o700)
    answers.put((str(caught.value), getattr(caught.value, "__notes__", [])))


def _drop_capabilities():
    """Permissions hold for root without capabilities as for everybody."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None, use_errno=True).capset(header, data)
