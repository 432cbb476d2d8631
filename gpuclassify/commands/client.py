"""Start, or connect to, the Dask cluster of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.commands.console import interrupt_hint, start_progress, wrong_call_exits
from gpuclassify.settings.paths import exists
from gpuclassify.workers.machine import free_memory, keep_freed_memory, usable_cores
from gpuclassify.workers.nvml import survey_gpus

if TYPE_CHECKING:
    from distributed import Client

    from gpuclassify.jobs.input.sources import Source
    from gpuclassify.jobs.report.progress import JobProgress
    from gpuclassify.mapping.partition_map import PartitionMap

# Maximum bytes of an input that is processed here instead of on a cluster, for one part and for
# several parts (pieces of the input, one per task). A cluster would not speed up a single part.
# Several parts run one after another here: a cluster of many cores is faster, in spite of its
# start, if they take more than about ten seconds.
MOST_INPUT_BYTES, MOST_PARTS_BYTES = 64 << 20, 32 << 20
ROW_BYTES = 20  # memory per byte of a file, which may be compressed


def run_on_cluster(prepare: Callable[[], Any], cluster: Mapping[str, Any], restart: bool) -> Any:
    """Run the job that `prepare` returns, on a cluster or in this process; return its result.

    A cluster is started only if work is left to do, and this process cannot do it (`runs_here`).
    `cluster` has the cluster settings of `JobSettings` by name, and `restart` is the option
    --restart.
    """
    from gpuclassify.jobs.stages import as_chain

    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            job = prepare()
            client = None
            stages = as_chain([*job.spec.chain.mappers, *job.recipe.step_mappers()])
            progress.waiting("Checking parts that are done")
            if job.needs_workers():
                if runs_here(job.source, stages, cluster):
                    if stages.is_slow:
                        progress.waiting("Loading the model")
                        load_here(stages)
                else:
                    client = open_client(cluster, progress, job.source.count)
        at_first = "waiting for rows"
        if stages.text_mappers():
            at_first = "loading the model" + (f" on {shown_workers(client)}" if client else "")
        progress.watch(job.title, client, at_first)
        from gpuclassify.jobs.job import PartsNote

        ended = client or contextlib.nullcontext()
        with interrupt_hint(restart), PartsNote.counted_again(), ended:
            return job.run(client, job.shown_by(progress))


def runs_here(source: Source, stages: PartitionMap, cluster: Mapping[str, Any]) -> bool:
    """Return whether to run the job in this process, which starts faster than a cluster.

    True for a small input, if models and rows fit into a quarter of free memory, unless the
    settings `cluster` ask for a cluster or for cudf frames. Slow `stages`, such as neural networks,
    run here only if the input is a single part (read by one task), and there is no GPU.
    """
    is_open = (cluster["cluster"], cluster["backend"]) == ("auto", "pandas")
    is_open = is_open and not any(cluster[name] for name in ("cluster_options", "scheduler"))
    if not is_open or cluster["workers"] is not None:
        return False
    # Other stages, such as tokenizers and fastText, use all cores from one process.
    if stages.is_slow and (source.count > 1 or survey_gpus().has_gpu):
        return False
    input_bytes = source.size_bytes
    most_bytes = MOST_INPUT_BYTES if source.count == 1 else MOST_PARTS_BYTES
    if input_bytes is None or input_bytes > most_bytes:
        return False
    needed = ROW_BYTES * input_bytes
    for mapper in stages.text_mappers():
        weights = mapper.model.weights_bytes(np.dtype(np.float32))
        if not (weights or mapper.model.is_readable()):
            return False
        needed += sum(weights.values())
    return needed <= free_memory() // 4


def load_here(stages: PartitionMap) -> None:
    """Load the models of `stages` into this process, with threads and memory as in a worker."""
    import torch

    torch.set_num_threads(usable_cores())
    keep_freed_memory()
    for mapper in stages.text_mappers():
        mapper.setup()


def open_client(
    settings: Mapping[str, Any], progress: JobProgress, parts: int | None = None
) -> Any:
    """Return a Dask client of the cluster in the settings; start the cluster unless it is running.

    `settings` has the cluster settings of `JobSettings` by name. On this machine, a job with
    ``parts=1`` (pieces of the input, one per task) gets one worker, unless the settings have a
    number of workers.
    """
    from gpuclassify.cluster import get_client
    from gpuclassify.cluster.sizing import ImpossibleClusterError

    workers, cluster = settings["workers"], settings["cluster"]
    options = dict(settings["cluster_options"] or {})
    if "n_workers" in options and workers is not None:
        raise ValueError(
            f"workers={workers} and the cluster option n_workers={options['n_workers']!r} "
            "mean the same: pass one of them"
        )
    if settings["scheduler"] is not None:
        if workers is not None or cluster != "auto":
            raise ValueError(
                "--scheduler connects to a cluster that is running; --workers and --cluster start "
                "a new one: pass one or the other"
            )
        progress.waiting(f"Connecting to {settings['scheduler']}")
        return _connect(settings["scheduler"], options)
    if workers is None and parts == 1 and cluster in ("auto", "cpu", "gpu"):
        workers = options.get("n_workers", 1)
    if workers is not None:
        options["n_workers"] = workers
    count = options.get("n_workers")
    progress.waiting("Starting workers" if count is None else f"Starting {count} worker(s)")
    try:
        return get_client(cluster, **{"backend": settings["backend"], **options})
    except ImpossibleClusterError as err:
        raise ValueError(str(err)) from err


def shown_workers(client: Client) -> str:
    """Return a phrase such as "4 workers with 8.00 GiB" for a client's workers.

    The size is the lowest memory limit; it is left out if a worker has no limit.
    """
    from dask.utils import format_bytes

    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    limits = [worker["memory_limit"] for worker in workers]
    least = f" with {format_bytes(min(limits))}" if limits and all(limits) else ""
    return f"{len(limits)} worker{'' if len(limits) == 1 else 's'}{least}"


def _connect(scheduler: str, options: dict[str, Any]) -> Any:
    from gpuclassify.cluster import get_client
    from gpuclassify.cluster.client import NoSchedulerError

    is_file = exists(scheduler)
    if not is_file and ":" not in scheduler:
        raise FileNotFoundError(
            f"--scheduler {scheduler!r} is neither an address, such as "
            "tcp://host:8786, nor an existing file"
        )
    where: dict[str, Any] = {"scheduler_file" if is_file else "address": scheduler}
    try:
        return get_client(**where, **options)
    except NoSchedulerError as err:
        cure = "leave out --scheduler to start a cluster here"
        raise NoSchedulerError(err.address, cure) from err
