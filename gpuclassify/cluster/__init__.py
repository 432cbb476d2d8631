"""Clusters to classify on: local GPUs, local CPUs, or one that is already running."""

from gpuclassify.cluster.client import get_client

__all__ = ["get_client"]
