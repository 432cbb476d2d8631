"""Looking at a cluster's workers before work starts, so that mistakes show at once and together."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle  # type: ignore[import-untyped]

from gpuclassify._version import __version__
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
FIRST_SECONDS = 300.0  # a new worker imports the library, perhaps over a network, to answer
PROBE_SECONDS = 1800.0  # a model of many GB over a slow line
LOOK_SECONDS = 2.0  # at which workers there still are
LEAVING_SECONDS = 5.0  # until the scheduler, too, sees that a connection has ended
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
    first_seconds: float = FIRST_SECONDS,
    probe_seconds: float = PROBE_SECONDS,
) -> dict[str, Facts]:
    """Check the workers that a client has now; on an idle cluster, wait for the first.

    Their versions are compared with the client's, no two may use one GPU, and `probe` is tried:
    one worker of each machine fetches what it needs, then all of them run it. A worker that leaves
    meanwhile or does not answer is left to Dask, which replaces it, as long as another one passes.
    Workers that join later are not looked at. Where all leave before they answer, as those of a
    cluster that scales by its tasks may, nothing is checked, and a warning says so.

    Parameters
    ----------
    client : distributed.Client
    probe : Probe, optional
    uses_gpu : bool
        Whether work would use a GPU where there is one.
    answer_seconds : float
        How long a worker may take to tell of itself once the first one has.
    first_seconds : float
        How long that first one is waited for before the time of each begins all the same.
    probe_seconds : float
        How long a worker may take for each step of the probe.

    Returns
    -------
    dict of str to Facts
        What passed, by the worker's address.

    Raises
    ------
    PreflightError
        At least one worker cannot work, or none of those that stay answers.
    """
    addresses = _wait_for_workers(client)
    crew = _Crew(count=len(addresses))
    _gather_facts(client, addresses, crew, answer_seconds, first_seconds)
    _compare_versions(crew, versions_here())
    if uses_gpu:
        _refuse_shared_devices(crew)
    crew.raise_if_failed()
    if probe is not None and crew.facts:
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
    client: Any,
    addresses: Sequence[str],
    crew: _Crew,
    answer_seconds: float,
    first_seconds: float,
) -> None:
    """Ask all workers at once; one that hangs keeps nobody waiting longer than its time."""
    answers = client.sync(_ask_all, client, addresses, answer_seconds, first_seconds)
    is_any_there = not all(map(_is_silence, answers.values()))
    seconds = answer_seconds if is_any_there else first_seconds + answer_seconds
    for address, answer in answers.items():
        if isinstance(answer, Facts):
            crew.facts[address] = answer
        elif _is_silence(answer):
            is_late = isinstance(answer, TimeoutError)
            reason = f"in {seconds:g} seconds" if is_late else f"but {_shown(answer)}"
            crew.silent[address] = f"no answer {reason}"
        else:  # it does not even know the question
            version = __version__
            cure = f"pip install gpuclassify=={version}"
            crew.fail(address, "gpuclassify", _shown(answer), version, cure)
    if not is_any_there:
        _refuse_silent(client, crew)


def _refuse_silent(client: Any, crew: _Crew) -> None:
    """Fail where nobody answers, unless all have left: an adaptive cluster takes idle ones away.

    A question is no task, and whoever is asked is idle for Dask.
    """
    crew.silent = _still_there(client, crew.silent)
    for address, reason in crew.silent.items():
        crew.fail(address, "answer", reason, "an answer", "look at its log, restart it")
    crew.raise_if_failed()
    logger.warning("all workers have left during the check; those that come are not checked")


def _still_there(client: Any, silent: Mapping[str, str]) -> dict[str, str]:
    """Those that do not leave; a broken connection may be seen before the scheduler sees it."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while True:
        present = client.nthreads()
        staying = {address: why for address, why in silent.items() if address in present}
        if not staying or time.monotonic() > deadline:
            return staying
        time.sleep(0.1)


async def _ask_all(
    client: Any, addresses: Sequence[str], answer_seconds: float, first_seconds: float
) -> dict[str, Any]:
    """Answers or errors, by address; the first answer starts the clock of all the others."""
    turn = asyncio.Semaphore(ASKED_AT_ONCE)
    clock = asyncio.Event()
    patience = asyncio.get_running_loop().call_later(first_seconds, clock.set)

    async def ask(address: str) -> Any:
        async with turn:
            question = client.run(
                facts_here, workers=[address], on_error="return", asynchronous=True
            )
            try:
                answers = await _wait_by(clock, question, answer_seconds)
            except Exception as err:
                return err
        answer = answers.get(address, ConnectionError("it is gone"))
        if not _is_silence(answer):
            clock.set()
        return answer

    try:
        answers = await asyncio.gather(*map(ask, addresses))
    finally:
        patience.cancel()
    return dict(zip(addresses, answers, strict=True))


async def _wait_by(clock: asyncio.Event, question: Awaitable[Any], seconds: float) -> Any:
    """Wait for an answer until some seconds after the clock is set."""
    asked, started = asyncio.ensure_future(question), asyncio.ensure_future(clock.wait())
    try:
        await asyncio.wait([asked, started], return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.wait_for(asked, seconds)
    finally:
        asked.cancel()
        started.cancel()


def _is_silence(answer: Any) -> bool:
    return isinstance(answer, OSError)  # a TimeoutError is one


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
                    crew.fail(address, check, _shown(error), expected, "see its log")
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


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _host_of(address: str) -> str:
    return address.rpartition("//")[2].rpartition(":")[0]
