"""A classifier that loses its GPU, in a module that workers can import."""

import os
from pathlib import Path

import torch

from gpuclassify import DomainClassifier

ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\n"
    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


class BreakingClassifier(DomainClassifier):
    """Loses the GPU at the first part, in the process that comes to it first."""

    def compute(self, texts, name_row):
        flag = Path(os.environ["BREAKS"])
        broken = Path(f"{flag}-{os.getpid()}")
        if len(texts) > 1 and not flag.exists():
            flag.touch()
            broken.touch()
        if broken.exists():
            raise torch.AcceleratorError(ILLEGAL_ACCESS)
        return super().compute(texts, name_row)
