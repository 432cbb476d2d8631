"""What every worker of a local cluster is set to, workers that join later included."""

import ctypes
import logging
import os
import platform

from distributed import Worker, WorkerPlugin

logger = logging.getLogger(__name__)

# Parameters of mallopt(3). Releases of glibc before 2.34 refuse thresholds above 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLDS_BYTES = (1 << 30, 32 << 20)
TRIM_THRESHOLD_BYTES = 2**31 - 1


class ComputeThreads(WorkerPlugin):
    """Give a worker's process its share of the cores.

    Dask's nanny starts workers with ``OMP_NUM_THREADS=1``, which leaves torch a single thread, and
    knows nothing of the tokenizers, whose pool would take every core of the machine in each worker.

    Parameters
    ----------
    threads : int
        Threads of one torch operation, and of tokenizing.
    """

    name = "gpuclassify-compute-threads"

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def setup(self, worker: Worker) -> None:
        """Set the number for the whole process, in which nothing was tokenized yet."""
        import torch

        torch.set_num_threads(self.threads)
        if worker.nanny:  # else the process is the user's own
            os.environ.setdefault("RAYON_NUM_THREADS", str(self.threads))


class KeepFreedMemory(WorkerPlugin):
    """Let a worker process keep freed memory instead of faulting it in for every operation.

    Dask's nanny sets glibc's trim threshold, which makes every large activation a fresh mapping.
    The price is that a worker holds on to its peak memory. A tensor above the 64 MiB of a heap in
    a thread's arena is mapped anew all the same; token budgets for CPUs stay below that.
    Workers without a nanny, and systems without glibc, are left alone.
    """

    name = "gpuclassify-keep-freed-memory"

    def setup(self, worker: Worker) -> None:
        """Raise the allocator's thresholds in the worker's process."""
        if worker.nanny and not keep_freed_memory():
            logger.debug("the allocator of %s has no thresholds to raise", worker.address)


class TorchMemoryFraction(WorkerPlugin):
    """Bound torch's own allocator, so that cuDF's pool beside it is not starved.

    Parameters
    ----------
    fraction : float
        Share of the device's memory in (0, 1].
    """

    name = "gpuclassify-torch-memory-fraction"

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def setup(self, worker: Worker) -> None:
        """Set the bound on the one device that the worker sees."""
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU on worker {worker.address}; install a "
                "CUDA build of torch that fits the driver, or use cluster_type='cpu'"
            )
        torch.cuda.set_per_process_memory_fraction(self.fraction)


def keep_freed_memory() -> bool:
    """Raise glibc's mmap and trim thresholds in this process; False where that cannot be done."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    is_raised = any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS_BYTES)
    return is_raised and bool(mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
