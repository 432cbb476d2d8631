"""Helpers of Curator's published scripts: command-line arguments, file lists and Ray's client."""

from __future__ import annotations

import argparse
import os
from functools import partialmethod
from typing import Any

from gpuclassify import cluster
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.settings.checks import warn_once
from gpuclassify.workers.nvml import survey_gpus

# Arguments and their defaults, or their type if there is no default.
_CLIENT = {
    "scheduler_address": str, "scheduler_file": str, "n_workers": os.cpu_count(),
    "threads_per_worker": 1, "nvlink_only": False, "protocol": "tcp", "rmm_pool_size": str,
}  # fmt: skip
_TORCH = {"enable_spilling": False, "set_torch_to_use_rmm": False}
_ALL = {**_CLIENT, "device": "cpu", "files_per_partition": 2, "num_files": int}
_CLASSIFIER = {**_ALL, **_TORCH, "max_mem_gb_classifier": int, "rmm_pool_size": "512MB"}


class ArgumentHelper:
    """Helper that adds the options of scripts for NeMo Curator 0.x to a command-line parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def add_distributed_args(self, arguments: dict[str, Any] = _ALL) -> argparse.ArgumentParser:
        """Add command-line arguments to the parser, and return the parser.

        `arguments` maps names to defaults, or to types if there is no default; a default of False
        makes a flag. By default, they are the arguments that configure a Dask cluster, and
        ``--device``, ``--files-per-partition`` and ``--num-files``.
        """
        for name, default in arguments.items():
            kind = default if isinstance(default, type) else type(default)
            how: Any = {"action": "store_true"} if default is False else {"type": kind}
            how["default"] = None if default is kind else default
            self.parser.add_argument(f"--{name.replace('_', '-')}", **how)
        return self.parser

    add_distributed_classifier_cluster_args = partialmethod(add_distributed_args, _CLASSIFIER)

    @staticmethod
    def parse_client_args(args: argparse.Namespace) -> dict[str, Any]:
        """Return arguments of `gpuclassify.curator.get_client` by name, from a script's `args`.

        ``cluster_type`` is the parsed ``--device``, or "cpu" without it.
        """
        arguments = {"cluster_type": getattr(args, "device", "cpu")}
        return arguments | {name: vars(args)[name] for name in (*_CLIENT, *_TORCH) if name in args}


class RayClient:
    """Stand-in for Ray's client, which starts one Dask worker per GPU if there are several GPUs.

    `num_gpus` is the number of workers, by default the number of visible GPUs. If it is 1 or 0, no
    worker starts, and jobs run in this process, on all its cores and the GPU. Nothing starts before
    `start`. Options of Ray are ignored with a warning.
    """

    def __init__(self, num_gpus: int | None = None, **ray_options: object) -> None:
        self.num_gpus, self.client = num_gpus, None
        if ray_options:
            warn_once(
                f"RayClient: {ray_options} has no effect, because jobs use all cores and no Ray"
            )

    def start(self) -> None:
        """Start the Dask workers and their client, if there is more than one worker to start."""
        count = len(survey_gpus().gpus) if self.num_gpus is None else self.num_gpus
        self.client = cluster.get_client("gpu", n_workers=count) if count > 1 else None

    def stop(self) -> None:
        """Close the Dask client that `start` made, which stops the workers; else do nothing."""
        if self.client is not None:
            self.client.close()


def get_all_file_paths_under(
    path: str,
    recurse_subdirectories: bool = False,
    keep_extensions: str | list[str] | None = None,
    **options: Any,
) -> list[str]:
    """List the paths or URLs of the files in the folder `path`, sorted.

    Files in subfolders are included with `recurse_subdirectories`. With `keep_extensions`, only
    files whose names end with one of these texts are listed. The list is empty if the folder is
    missing. `options` may have ``storage_options`` for fsspec; others are ignored.
    """
    store = open_store(path, options.get("storage_options"))
    names = store.filesystem.find(store.root, maxdepth=None if recurse_subdirectories else 1)
    kept = [keep_extensions or ""] if isinstance(keep_extensions, str | None) else keep_extensions
    names = sorted(name for name in names if name.endswith(tuple(kept)))
    return [*map(store.url_of, names)]
