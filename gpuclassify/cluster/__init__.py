"""Clusters to classify on: local GPUs, local CPUs, Slurm, Coiled, or one that is running."""

from gpuclassify.cluster.client import get_client
from gpuclassify.cluster.prepare import prepare

__all__ = ["get_client", "prepare"]
