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
    """Error raised by a `Probe` that finds a problem; its arguments are cells of a `Row`."""

    def __init__(self, check: str, found: str, expected: str, cure: str) -> None:
        super().__init__(check, found, expected, cure)

    def __str__(self) -> str:
        check, found, expected, cure = self.args
        return f"{check}: {found}, expected {expected}; {cure}"


class Probe(Protocol):
    """Protocol of a trial of a job's work, such as loading the job's model; see `check_workers`."""

    def fetch(self) -> None:
        """Download missing files, such as the model's; called on one worker of each machine.

        An error is reported as a problem, and `run` is not called on this machine's workers.
        """

    def run(self, memory_bytes: int) -> None:
        """Try the job's work on this worker, such as running its model on one short text.

        `memory_bytes` is the worker's share of the host's free memory. Raises `MisfitError` if the
        worker does not fit the job, or the error that stops the trial.
        """


class Machine(NamedTuple):
    """Host name of a worker, and UUID of the GPU that torch would use in it ("" for none)."""

    host: str  # host name
    device: str  # UUID of the GPU that torch would use, or ""


class Row(NamedTuple):
    """Row in the table of PreflightError: one problem of one worker, and advice (`cure`)."""

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

    If there are none, the first one is waited for. Package versions are compared with the client's.
    If `uses_gpu`, no two workers may use one GPU. One worker of each machine then calls
    ``probe.fetch()``, and all workers call ``probe.run()``. A worker that leaves meanwhile, or
    takes longer than `step_seconds` for a step, is skipped with a warning if another worker passes.

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
    """Steps and results of one call of `check_workers`, for the workers present at its start."""

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
        (except cudf). Other differences are logged.
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

        Raises PreflightError for all problems so far.
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

        Workers that have left or do not answer are removed from `machines`.
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
        """Wait for one task per worker; return results by address, add a `Row` for each error."""
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
    """Return the UUID of the GPU that torch would use in this process; "" if it would use none."""
    from gpuclassify.workers.nvml import survey_gpus

    gpus = survey_gpus().gpus
    if not gpus:
        return ""
    import torch

    return "" if torch.version.cuda is None else gpus[0].uuid


def fetch_here(packed: bytes) -> None:
    """Call the method `fetch` of a pickled `Probe`, which downloads files."""
    cloudpickle.loads(packed).fetch()


def run_here(packed: bytes, workers_here: int) -> None:
    """Call the method `run` of a pickled `Probe` with this worker's share of the free memory.

    The share is the free memory of the host divided by `workers_here`, its number of workers.
    """
    cloudpickle.loads(packed).run(free_host_bytes() // workers_here)


def _versions(answer: Mapping[str, Any]) -> dict[str, str]:
    """Select the versions to compare from a process's entry in ``Client.get_versions()``.

    Builds after a "+" are removed, and Python's version has two numbers.
    """
    packages = dict(answer["packages"])
    packages["python"] = ".".join(packages["python"].split(".")[:2])
    packages["cudf"] = next(filter(None, map(packages.get, CUDF_WHEELS)), None)
    return {name: packages[name].partition("+")[0] for name in COMPARED if packages.get(name)}
