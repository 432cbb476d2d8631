"""Check of a cluster's workers before a job starts, which reports all problems together."""

from __future__ import annotations

import io
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle  # type: ignore[import-untyped]

from gpuclassify.workers.device_errors import free_host_bytes

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

# Turn it off by dask.config.set({"gpuclassify.preflight": False}).
SETTING = "gpuclassify.preflight"
# Versions that affect results or messages between processes; other `COMPARED` ones rarely do.
DECISIVE = ("gpuclassify", "python", "torch", "transformers", "tokenizers", "cudf")
COMPARED = (*DECISIVE, "dask", "distributed", "pandas", "pyarrow")
CUDF_WHEELS = ("cudf", "cudf-cu13", "cudf-cu12")  # wheel names carry CUDA's major version
# Timeout per step, long enough to download a model of many GB over a slow line. Dask removes a
# hanging worker earlier, after the scheduler's worker-ttl without heartbeats.
STEP_SECONDS = 1800.0
LOOK_SECONDS = 2.0  # interval between checks for lost workers
PRIORITY = 1_000  # before other clients' waiting tasks
TABLE_WIDTH = 10_000  # wide enough that no cell is wrapped


class PreflightError(RuntimeError):
    """Error raised if workers cannot do a job's work; its message is a table of problems."""


class MisfitError(RuntimeError):
    """Error raised on a worker by a `Probe` (a trial of a job's work) that finds a problem.

    Its arguments are the cells ``check``, ``found``, ``expected`` and ``cure`` of a `Row`, which is
    shown in the table of PreflightError.
    """

    def __init__(self, check: str, found: str, expected: str, cure: str) -> None:
        super().__init__(check, found, expected, cure)

    def __str__(self) -> str:
        check, found, expected, cure = self.args
        return f"{check}: {found}, expected {expected}; {cure}"


class Probe(Protocol):
    """Protocol of a trial of a job's work, such as loading the job's model.

    Before a job starts, `check_workers` calls `fetch` on one worker of each machine, then `run` on
    every worker.
    """

    def fetch(self) -> None:
        """Download missing files, such as the model's; called on one worker of each machine.

        An error is reported as a problem, and `run` is not called on this machine's workers.
        """

    def run(self, memory_bytes: int) -> None:
        """Try the job's work on this worker, such as running the job's model on one short text.

        It is called on every worker. `memory_bytes` is the worker's share of the host's free
        memory, which the trial compares with the memory that the job needs. Raises `MisfitError` if
        the worker does not fit the job, or the error that stops the trial.
        """


class Machine(NamedTuple):
    """Host name of a worker (`host`), and UUID of the GPU that torch would use in it (`device`).

    `device` is "" if the worker sees no GPU, or its torch is built without CUDA.
    """

    host: str  # host name
    device: str  # UUID of the GPU that torch would use, or ""


class Row(NamedTuple):
    """Row in the table of PreflightError: one problem of one worker.

    `worker` is the worker's address and `host` its host name. `check` says what was checked, such
    as a package; `found` and `expected` are its actual and required state, and `cure` is advice.
    """

    worker: str
    host: str
    check: str
    found: str
    expected: str
    cure: str


def check_workers(
    client: Client,
    probe: Probe | None = None,
    *,
    uses_gpu: bool = True,
    step_seconds: float = STEP_SECONDS,
) -> list[str]:
    """Check that a client's present workers can do a job's work.

    If there are none, as on an adaptive cluster, the first one is waited for. Package versions on
    the workers are compared with the client's. If `uses_gpu`, no two workers may use one GPU. If
    there is a `probe`, a trial of the job's work, one worker of each machine then calls
    ``probe.fetch()``, and all workers call ``probe.run()``. Workers that join later are not
    checked.

    A worker that leaves meanwhile, or takes longer than `step_seconds` for one of these steps, is
    skipped with a warning if another worker passes. If all workers leave before they answer, which
    may happen on an adaptive cluster, nothing is checked, and a warning is logged.

    Returns the sorted addresses of the workers that passed. Raises PreflightError if a worker
    cannot do the work, or no remaining worker answers.
    """
    if not client.nthreads():  # an adaptive cluster starts a worker for a task
        logger.warning("the cluster has no workers yet: waiting for the first, as Dask does")
        client.submit(os.getpid, pure=False).result()
        logger.warning("the first worker is there; those that join later are not checked")
    check = _Check(client, step_seconds)
    check.compare_versions()
    check.look(uses_gpu)
    if probe is not None:
        check.try_out(probe)
    for address, reason in check.given_up.items():
        logger.warning("worker %s was not checked: %s; the others start", address, reason)
    return sorted(check.machines)


class _Check:
    """Steps and results of one call of `check_workers`, for the workers present at its start.

    The steps are `compare_versions`, `look` and `try_out`, in this order.
    """

    def __init__(self, client: Client, step_seconds: float) -> None:
        self.client = client
        self.step_seconds = step_seconds
        self.workers = sorted(client.nthreads())
        self.machines: dict[str, Machine] = {}  # workers without a problem so far, by address
        self.rows: list[Row] = []
        self.given_up: dict[str, str] = {}  # reason, by address

    def compare_versions(self) -> None:
        """Compare workers' package versions with the client's, and add a `Row` for each problem.

        A problem is another version of a package in `DECISIVE`, or a package that is missing
        (except cudf). Other differences are logged. If the client has no cudf, the most frequent
        version on the workers is expected. If a worker does not report its versions in time, a
        warning is logged, and nothing is compared.
        """
        names = [name for name in (*COMPARED, *CUDF_WHEELS) if name != "python"]  # always reported
        asked = {"packages": names, "callback_timeout": self.step_seconds}
        try:
            answer = self.client.sync(self.client.get_versions, **asked)
        except TimeoutError:
            logger.warning(
                "versions are not compared: a worker did not report its versions in time"
            )
            return
        versions_by_worker = {
            a: _versions(one) for a, one in answer["workers"].items() if a in self.workers
        }
        cudf = Counter(
            one["cudf"] for one in versions_by_worker.values() if "cudf" in one
        ).most_common(1)
        expected = {**({"cudf": cudf[0][0]} if cudf else {}), **_versions(answer["client"])}
        harmless: Counter[str] = Counter()
        for address, versions in versions_by_worker.items():
            for name, wanted in expected.items():
                version = versions.get(name)
                if version == wanted or (version is None and name == "cudf"):
                    continue
                if version is None or name in DECISIVE:
                    cure = {
                        "python": f"start it with Python {wanted}",
                        "cudf": f"install RAPIDS {wanted} on all workers",
                    }.get(name, f"pip install {name}=={wanted}")
                    self._fail(address, name, version or "not installed", wanted, cure)
                else:
                    harmless[f"{name} {version}, and {wanted} here"] += 1
        for text, count in harmless.items():
            logger.warning("%d workers have %s; results should not differ", count, text)

    def look(self, uses_gpu: bool) -> None:
        """Store each worker's host and GPU; a GPU of two workers is a problem if `uses_gpu`.

        Workers with a problem are not asked, because they may be unable to answer. Raises
        PreflightError if there are problems, including those of `compare_versions`, or if no worker
        answers, unless all have left; that is logged.
        """
        failed = {row.worker for row in self.rows}
        asked = {a: self._submit(a, look_here) for a in self.workers if a not in failed}
        self.machines = self._settle(asked, "answer", "an answer")
        owners: dict[str, str] = {}
        for address, machine in self.machines.items():
            owner = owners.setdefault(machine.device, address)
            if uses_gpu and machine.device and owner != address:
                actual = f"{machine.device}, which {owner} uses too"
                cure = "start workers with dask cuda worker, or set CUDA_VISIBLE_DEVICES for each"
                self._fail(address, "GPU", actual, "one worker for each GPU", cure)
        if not self.machines and not self.rows:
            if not self.given_up.keys().isdisjoint(self.client.nthreads()):
                self._fail_given_up("an answer", "look at its log, restart it")
            else:  # an adaptive cluster removes idle workers
                logger.warning("all workers have left during the check; new ones are not checked")
        self._raise_if_failed()

    def try_out(self, probe: Probe) -> None:
        """Run the probe on the workers in `machines`, and raise PreflightError for problems.

        First, one worker of each machine downloads the probe's files. Workers that have left or do
        not answer are removed from `machines`; if none remains, that is a problem.
        """
        # Sent as bytes, because a task that a worker cannot unpickle closes its connection.
        packed = cloudpickle.dumps(probe)
        first = {machine.host: address for address, machine in reversed(self.machines.items())}
        fetching = {a: self._submit(a, fetch_here, packed) for a in first.values()}
        self._settle(fetching, "files", "a model in the cache, or the Hub")
        failed = {row.host for row in self.rows}
        workers_here = Counter(machine.host for machine in self.machines.values())
        running = {
            address: self._submit(address, run_here, packed, workers_here[machine.host])
            for address, machine in self.machines.items()
            if machine.host not in failed
        }
        self._settle(running, "model", "that it runs")
        had_any = bool(self.machines)
        for address in self.given_up:
            self.machines.pop(address, None)
        if had_any and not self.machines and not self.rows:
            self._fail_given_up("that it runs", "see its log, and its memory")
        self._raise_if_failed()

    def _submit(self, address: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.client.submit(
            function, *arguments, workers=[address], priority=PRIORITY, pure=False, retries=0
        )

    def _settle(self, futures: Mapping[str, Any], check: str, expected: str) -> dict[str, Any]:
        """Wait for one task per worker; return results by address, and add a `Row` for each error.

        `check` and `expected` are cells of these rows. Workers that failed or left have no result.
        """
        try:
            self._wait_while_there(futures)
            for address, future in futures.items():
                if future.status != "error":
                    continue
                error = future.exception()
                if isinstance(error, MisfitError):
                    self._fail(address, *error.args)
                else:
                    first_line = (str(error).splitlines() or [""])[0]
                    actual = f"{type(error).__name__}: {first_line}"
                    self._fail(address, check, actual, expected, "see its log")
            done = {a: future for a, future in futures.items() if future.status == "finished"}
            return dict(zip(done, self.client.gather(list(done.values())), strict=True))
        finally:
            self.client.cancel(list(futures.values()), force=True)

    def _wait_while_there(self, futures: Mapping[str, Any]) -> None:
        from distributed import wait

        deadline = time.monotonic() + self.step_seconds
        while pending := {
            address: future
            for address, future in futures.items()
            if future.status == "pending" and address not in self.given_up
        }:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                reason = f"it did not answer in {self.step_seconds:g} seconds"
                self.given_up |= dict.fromkeys(pending, reason)
                return
            try:
                wait(list(pending.values()), timeout=min(LOOK_SECONDS, left_seconds))
            except TimeoutError:
                present = self.client.nthreads()
                lost = [address for address in pending if address not in present]
                self.given_up |= dict.fromkeys(lost, "lost during the check")

    def _fail(self, worker: str, check: str, actual: str, expected: str, cure: str) -> None:
        address = worker.rpartition("//")[2].rpartition(":")[0]
        host = self.machines[worker].host if worker in self.machines else address
        self.rows.append(Row(worker, host, check, actual, expected, cure))

    def _fail_given_up(self, expected: str, cure: str) -> None:
        for address, reason in self.given_up.items():
            self._fail(address, "answer", reason, expected, cure)

    def _raise_if_failed(self) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            return
        table = Table(*Row._fields, box=None, pad_edge=False)
        for row in self.rows:
            table.add_row(*map(Text, row))
        text = io.StringIO()
        Console(file=text, width=TABLE_WIDTH, color_system=None).print(table)
        shown = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        failed = len({row.worker for row in self.rows})
        raise PreflightError(
            f"{failed} of {len(self.workers)} workers cannot do this work:\n{shown}\n"
            f"To work without this check: dask.config.set({{{SETTING!r}: False}})"
        )


def look_here() -> Machine:
    """Return the host and GPU of the worker that runs this task, without making a CUDA context."""
    return Machine(socket.gethostname(), device_here())


def device_here() -> str:
    """Return the UUID of the GPU that torch would use in this process.

    Returns "" if no GPU is visible, or torch is built without CUDA.
    """
    from gpuclassify.workers.nvml import survey_gpus

    gpus = survey_gpus().gpus
    if not gpus:
        return ""
    import torch

    return "" if torch.version.cuda is None else gpus[0].uuid


def fetch_here(packed: bytes) -> None:
    """Call the method `fetch` of a pickled `Probe`, which downloads files.

    This is the task for one worker of each machine.
    """
    cloudpickle.loads(packed).fetch()


def run_here(packed: bytes, workers_here: int) -> None:
    """Call the method `run` of a pickled `Probe` with this worker's share of the free memory.

    The share is the free memory of the host divided by `workers_here`, its number of workers.
    """
    cloudpickle.loads(packed).run(free_host_bytes() // workers_here)


def _versions(answer: Mapping[str, Any]) -> dict[str, str]:
    """Select the versions to compare from a process's entry in ``Client.get_versions()``.

    The build after a "+" is removed, so that "2.13.0+cpu" and "2.13.0+cu130" are equal. Python's
    version has two numbers. Missing packages have no entry.
    """
    packages = dict(answer["packages"])
    packages["python"] = ".".join(packages["python"].split(".")[:2])
    packages["cudf"] = next(filter(None, map(packages.get, CUDF_WHEELS)), None)
    return {name: packages[name].partition("+")[0] for name in COMPARED if packages.get(name)}
