"""The Dask cluster that commands run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_client(
    cluster: str,
    cluster_options: dict[str, Any] | None,
    workers: int | None,
    scheduler: str | None,
    backend: str,
) -> Any:
    """A client of the cluster that options name, which is started where none is running.

    Parameters are the settings of `gpuclassify.jobs.settings.JobSettings`.

    Raises
    ------
    ValueError, FileNotFoundError
        The options contradict each other, or name nothing that is there.
    """
    from gpuclassify.cluster import get_client
    from gpuclassify.cluster.client import NoSchedulerError

    options = cluster_options or {}
    if "n_workers" in options and workers is not None:
        raise ValueError(
            f"workers={workers} and the cluster option n_workers={options['n_workers']!r} "
            "mean the same: give one of them"
        )
    if scheduler is None:
        if workers is not None:
            options = {**options, "n_workers": workers}
        return get_client(cluster, **{"backend": backend, **options})
    if workers is not None or cluster != "auto":
        raise ValueError(
            "--scheduler connects to a cluster that is running; --workers and --cluster start a "
            "new one: give one or the other"
        )
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
