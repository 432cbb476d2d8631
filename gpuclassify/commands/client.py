"""The Dask cluster that commands run on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuclassify.commands.console import interrupt_hint, start_progress, wrong_call_exits

if TYPE_CHECKING:
    from gpuclassify.jobs.report.progress import JobProgress


def run_on_cluster(prepare: Callable[[], Any], cluster: Mapping[str, Any], restart: bool) -> Any:
    """The summary of the job that `prepare` makes, run on a cluster if anything is left to do."""
    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            job = prepare()
            client = None
            progress.waiting("Checking parts that are done")
            if job.needs_workers():
                client = open_client(cluster, progress, job.source.count)
        at_first = "waiting for rows"
        if job.spec.text_fields:
            at_first = "loading the model" + (f" on {shown_workers(client)}" if client else "")
        progress.watch(job.spec.chain.__name__, client, at_first)
        from gpuclassify.jobs.job import PartsNote

        ended = client or contextlib.nullcontext()
        with interrupt_hint(restart), PartsNote.counted_again(), ended:
            return job.run(client, job.shown_by(progress))


def open_client(given: Mapping[str, Any], progress: JobProgress, parts: int | None = None) -> Any:
    """A client of the cluster that settings name, which is started where none is running.

    They are ``cluster``, ``cluster_options``, ``workers``, ``scheduler`` and ``backend``, as of
    `JobSettings`. A job of a single part gets a single worker, with all cores. ValueError or
    FileNotFoundError: they contradict each other, name nothing that is there, or ask for what this
    machine cannot give.
    """
    from gpuclassify.cluster import get_client
    from gpuclassify.cluster.sizing import ImpossibleClusterError

    workers, cluster = given["workers"], given["cluster"]
    options = dict(given["cluster_options"] or {})
    if "n_workers" in options and workers is not None:
        raise ValueError(
            f"workers={workers} and the cluster option n_workers={options['n_workers']!r} "
            "mean the same: give one of them"
        )
    if given["scheduler"] is not None:
        if workers is not None or cluster != "auto":
            raise ValueError(
                "--scheduler connects to a cluster that is running; --workers and --cluster start "
                "a new one: give one or the other"
            )
        progress.waiting(f"Connecting to {given['scheduler']}")
        return _connect(given["scheduler"], options)
    if workers is None and parts == 1 and cluster in ("auto", "cpu", "gpu"):
        workers = options.get("n_workers", 1)
    if workers is not None:
        options["n_workers"] = workers
    count = options.get("n_workers")
    progress.waiting("Starting workers" if count is None else f"Starting {count} worker(s)")
    try:
        return get_client(cluster, **{"backend": given["backend"], **options})
    except ImpossibleClusterError as err:
        raise ValueError(str(err)) from err


def shown_workers(client: Any) -> str:
    """How many workers a cluster has, and how much memory the smallest of them, in words."""
    from dask.utils import format_bytes

    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    limits = [worker["memory_limit"] for worker in workers]
    least = f" with {format_bytes(min(limits))}" if limits and all(limits) else ""
    return f"{len(limits)} worker{'' if len(limits) == 1 else 's'}{least}"


def _connect(scheduler: str, options: dict[str, Any]) -> Any:
    from gpuclassify.cluster import get_client
    from gpuclassify.cluster.client import NoSchedulerError

    is_file = Path(scheduler).exists()
    if not is_file and ":" not in scheduler:
        raise FileNotFoundError(
            f"--scheduler {scheduler!r} is neither an address, such as "
            "tcp://host:8786, nor a file that is there"
        )
    where: dict[str, Any] = {"scheduler_file" if is_file else "address": scheduler}
    try:
        return get_client(**where, **options)
    except NoSchedulerError as err:
        cure = "leave --scheduler out, which starts a cluster here"
        raise NoSchedulerError(err.address, cure) from err
