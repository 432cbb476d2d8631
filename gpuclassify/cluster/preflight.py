"""Looking at a cluster's workers before work starts, so that mistakes show at once and together."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle  # type: ignore[import-untyped]

import gpuclassify
from gpuclassify.cluster.preflight_table import MisfitError, PreflightError, Row, render
from gpuclassify.cluster.worker_facts import (
    DECISIVE,
    OPTIONAL,
    Facts,
    facts_here,
    free_memory,
    versions_here,
)

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
PROBE_SECONDS = 1800.0  # a model of many GB over a slow line
LOOK_SECONDS = 2.0  # at which workers there still are
ASKED_AT_ONCE = 64
PRIORITY = 1_000  # before what other clients' tasks wait for


class Probe(Protocol):
    """What is tried on workers."""

    def fetch(self) -> None:
        """Bring to this machine what it lacks; called on one worker of each."""

    def run(self, memory_bytes: int) -> None:
        """Try the work itself, on every worker.

        Parameters
        ----------
        memory_bytes : int
            Host memory that the process may take.

        Raises
        ------
        MisfitError
            Something that a row of the table can say.
        Exception
            Whatever else stops the work.
        """


@dataclass
class _Crew:
    """The workers that were there when the check began, and what was found of them."""

    facts: dict[str, Facts] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)  # why, by address
    count: int = 0

    def fail(self, worker: str, check: str, found: str, expected: str, cure: str) -> None:
        host = self.facts[worker].host if worker in self.facts else _host_of(worker)
        self.rows.append(Row(worker, host, check, found, expected, cure))

    def raise_if_failed(self) -> None:
        if self.rows:
            raise PreflightError(render(self.rows, self.count))


def check_workers(
    client: Any,
    probe: Probe | None = None,
    *,
    uses_gpu: bool = True,
    answer_seconds: float = ANSWER_SECONDS,
    probe_seconds: float = PROBE_SECONDS,
) -> dict[str, Facts]:
    """Check the workers that a client has now; on an idle cluster, wait for the first.

    Their versions are compared with the client's, no two may use one GPU, and `probe` is tried:
    one worker of each machine fetches what it needs, then all of them run it. A worker that leaves
    meanwhile or does not answer is left to Dask, which replaces it, as long as another one passes.
    Workers that join later are not looked at.

    Parameters
    ----------
    client : distributed.Client
    probe : Probe, optional
    uses_gpu : bool
        Whether work would use a GPU where there is one.
    answer_seconds, probe_seconds : float
        How long a worker may take to tell of itself, and for each step of the probe.

    Returns
    -------
    dict of str to Facts
        What passed, by the worker's address.

    Raises
    ------
    PreflightError
        At least one worker cannot work, or none answers.
    """
    addresses = _wait_for_workers(client)
    crew = _Crew(count=len(addresses))
    _gather_facts(client, addresses, crew, answer_seconds)
    _compare_versions(crew, versions_here())
    if uses_gpu:
        _refuse_shared_devices(crew)
    crew.raise_if_failed()
    if probe is not None:
        _run_probes(client, probe, crew, probe_seconds)
    crew.raise_if_failed()
    _report_silent(crew)
    return crew.facts


def _wait_for_workers(client: Any) -> list[str]:
    """Addresses of the workers; a cluster that scales by its tasks starts one for a task."""
    if not client.nthreads():
        logger.warning("the cluster has no workers yet: waiting for the first, as Dask does")
        client.submit(os.getpid, pure=False).result()
        logger.warning("the first worker is there; those that join later are not checked")
    return sorted(client.nthreads())


def _gather_facts(
    client: Any, addresses: Sequence[str], crew: _Crew, answer_seconds: float
) -> None:
    """Ask all workers at once; one that hangs keeps nobody waiting longer than its time."""
    for address, answer in client.sync(_ask_all, client, addresses, answer_seconds).items():
        if isinstance(answer, Facts):
            crew.facts[address] = answer
        elif isinstance(answer, (OSError, TimeoutError)):
            crew.silent[address] = f"no answer in {answer_seconds:g} seconds"
        else:  # it does not even know the question
            found = f"{type(answer).__name__}: {_first_line(answer)}"
            version = gpuclassify.__version__
            crew.fail(address, "gpuclassify", found, version, f"pip install gpuclassify=={version}")
    if not crew.facts and not crew.rows:
        for address, reason in crew.silent.items():
            crew.fail(address, "answer", reason, "an answer", "look at its log, restart it")
        crew.raise_if_failed()


async def _ask_all(client: Any, addresses: Sequence[str], answer_seconds: float) -> dict[str, Any]:
    turn = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(address: str) -> Any:
        async with turn:
            question = client.run(
                facts_here, workers=[address], on_error="return", asynchronous=True
            )
            try:
                answers = await asyncio.wait_for(question, answer_seconds)
            except Exception as err:
                return err
        return answers.get(address, TimeoutError("it is gone"))

    answers = await asyncio.gather(*map(ask, addresses))
    return dict(zip(addresses, answers, strict=True))


def _compare_versions(crew: _Crew, client: Mapping[str, str]) -> None:
    expected = {**_most_common_cudf(crew.facts.values()), **client}
    harmless: Counter[str] = Counter()
    for address, facts in crew.facts.items():
        for name, wanted in expected.items():
            found = facts.versions.get(name)
            if found == wanted or (found is None and name in OPTIONAL):
                continue
            if found is None or name in DECISIVE:
                crew.fail(address, name, found or "not installed", wanted, _cure(name, wanted))
            else:
                harmless[f"{name} {found}, and {wanted} here"] += 1
    for text, count in harmless.items():
        logger.warning("%d workers have %s; results should not differ", count, text)


def _cure(name: str, wanted: str) -> str:
    if name == "python":
        return f"start it with Python {wanted}"
    if name == "cudf":
        return f"install RAPIDS {wanted} on all workers"
    return f"pip install {name}=={wanted}"


def _most_common_cudf(facts: Iterable[Facts]) -> dict[str, str]:
    """What workers have that the client need not have, where they agree most."""
    counts = Counter(one.versions["cudf"] for one in facts if "cudf" in one.versions)
    return {"cudf": counts.most_common(1)[0][0]} if counts else {}


def _refuse_shared_devices(crew: _Crew) -> None:
    """Raise a row for every worker that uses a GPU which another one uses already."""
    owners: dict[str, str] = {}
    for address, facts in crew.facts.items():
        owner = owners.setdefault(facts.device, address) if facts.device else address
        if owner != address:
            crew.fail(
                address,
                "GPU",
                f"{facts.device}, which {owner} uses too",
                "one worker for each GPU",
                "start workers with dask cuda worker, or set CUDA_VISIBLE_DEVICES for each",
            )


def _run_probes(client: Any, probe: Probe, crew: _Crew, probe_seconds: float) -> None:
    # As bytes: a task that a worker cannot unpickle costs it its connection.
    packed = cloudpickle.dumps(probe)
    first = {facts.host: address for address, facts in reversed(crew.facts.items())}
    fetching = {address: _submit(client, address, fetch_here, packed) for address in first.values()}
    _settle(client, crew, fetching, "files", "a model in the cache, or the Hub", probe_seconds)
    failed = {row.host for row in crew.rows}
    sharers = Counter(facts.host for facts in crew.facts.values())
    running = {
        address: _submit(client, address, run_here, packed, sharers[facts.host])
        for address, facts in crew.facts.items()
        if facts.host not in failed
    }
    _settle(client, crew, running, "model", "that it runs", probe_seconds)
    for address in crew.silent:
        crew.facts.pop(address, None)
    if not crew.facts and not crew.rows:
        for address, reason in crew.silent.items():
            crew.fail(address, "model", reason, "that it runs", "see its log, and its memory")


def _submit(client: Any, address: str, function: Callable[..., None], *arguments: Any) -> Any:
    return client.submit(
        function, *arguments, workers=[address], priority=PRIORITY, pure=False, retries=0
    )


def fetch_here(packed: bytes) -> None:
    """The task of one worker of each machine."""
    cloudpickle.loads(packed).fetch()


def run_here(packed: bytes, sharers: int) -> None:
    """The task of each worker, with its share of the memory that its machine has left."""
    from distributed import get_worker

    cloudpickle.loads(packed).run(free_memory(get_worker()) // sharers)


def _settle(
    client: Any,
    crew: _Crew,
    futures: Mapping[str, Any],
    check: str,
    expected: str,
    timeout_seconds: float,
) -> None:
    """Wait for tasks, by the address of their worker, and note those that failed."""
    try:
        crew.silent |= _wait_while_there(client, futures, timeout_seconds)
        for address, future in futures.items():
            if future.status == "error":
                error = future.exception()
                if isinstance(error, MisfitError):
                    crew.fail(address, *error.args)
                else:
                    found = f"{type(error).__name__}: {_first_line(error)}"
                    crew.fail(address, check, found, expected, "see its log")
    finally:
        client.cancel(list(futures.values()), force=True)


def _wait_while_there(
    client: Any, futures: Mapping[str, Any], timeout_seconds: float
) -> dict[str, str]:
    """Wait for the futures; returns why some were given up, by address."""
    from distributed import wait

    given_up: dict[str, str] = {}
    deadline = time.monotonic() + timeout_seconds
    while pending := [a for a, f in futures.items() if f.status == "pending" and a not in given_up]:
        if time.monotonic() > deadline:
            reason = f"the probe did not end in {timeout_seconds:g} seconds"
            return given_up | dict.fromkeys(pending, reason)
        try:
            wait([futures[address] for address in pending], timeout=LOOK_SECONDS)
        except TimeoutError:
            present = client.nthreads()
            given_up |= {a: "lost during the check" for a in pending if a not in present}
    return given_up


def _report_silent(crew: _Crew) -> None:
    for address, reason in crew.silent.items():
        logger.warning("worker %s was not checked: %s; the others start", address, reason)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _host_of(address: str) -> str:
    return address.rpartition("//")[2].rpartition(":")[0]
