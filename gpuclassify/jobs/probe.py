"""What a job tries on each worker before its first part: its models are there, fit, and run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dask

from gpuclassify.cluster.preflight import SETTING, MisfitError, check_workers
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.text_mapper import TextMapper


@dataclass(frozen=True)
class ModelProbe:
    """Downloads, loads and runs models.

    Attributes
    ----------
    mappers : tuple of TextMapper
    """

    mappers: tuple[TextMapper, ...]

    def fetch(self) -> None:
        """Download every model, once for the machine."""
        for mapper in self.mappers:
            mapper.model.fetch()

    def run(self, memory_bytes: int) -> None:
        """Load each model in turn and run it on a text.

        Parameters
        ----------
        memory_bytes : int
            Host memory that the process may take.

        Raises
        ------
        MisfitError
            A model is larger than what is free.
        Exception
            Whatever stops a model from running here.
        """
        for mapper in self.mappers:
            _check_memory(mapper, memory_bytes)
            mapper.probe()


def check_cluster(client: Any, stages: Iterable[PartitionMap], backend: str) -> None:
    """Raise PreflightError if workers of the client cannot do a job; unless that is set off."""
    if not dask.config.get(SETTING, True):
        return
    mappers = tuple(stage for stage in stages if isinstance(stage, TextMapper))
    probe = ModelProbe(mappers) if mappers else None
    check_workers(client, probe, uses_gpu=may_use_gpu(mappers, backend))


def may_use_gpu(mappers: Iterable[TextMapper], backend: str) -> bool:
    """Whether a job takes a GPU where a worker has one."""
    return backend == "cudf" or any(mapper.runner.takes_gpu for mapper in mappers)


def _check_memory(mapper: TextMapper, memory_bytes: int) -> None:
    """Raise MisfitError if the weights are larger than what is free.

    Where models are loaded already, loading another one makes room for itself.
    """
    from gpuclassify.inference.residency import MODELS

    if MODELS.keys():
        return
    device, dtype = mapper.runner.device_and_dtype()
    needed = sum(mapper.model.weights_bytes(dtype).values())
    free = memory_bytes
    if str(device) != "cpu":
        from gpuclassify.inference.memory import free_bytes  # imports torch

        free = free_bytes(device)
    if needed > free:
        raise MisfitError(
            f"memory of {device}",
            f"{free / 1e9:.2f} GB free",
            f"{needed / 1e9:.2f} GB for {mapper.model.identities[0].name}",
            "fewer workers a machine, a higher memory_limit, or end what else runs there",
        )
