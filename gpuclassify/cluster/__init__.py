"""Dask clusters: local GPUs or CPUs, Slurm, Coiled, or a running one; read `client.py` first."""

from gpuclassify.cluster.client import get_client, prepare

__all__ = ["get_client", "prepare"]
