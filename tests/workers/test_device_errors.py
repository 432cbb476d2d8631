"""Which errors say that a GPU is broken, and which do not."""

import pytest
import torch

from gpuclassify.workers.device_errors import BrokenDeviceError, is_broken_device

# What RMM throws for any error that an allocation meets.
RMM_ON_BROKEN_DEVICE = (
    "std::bad_alloc: CUDA error (failed to allocate 512 bytes) at: cuda_async_view_memory_resource"
    ".hpp:95: cudaErrorIllegalAddress an illegal memory access was encountered"
)
# What torch appends to every error that CUDA reports, whatever it is.
TORCH_ADVICE = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with ..."),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        torch.AcceleratorError("CUDA error: misaligned address"),
        torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
        RuntimeError("CUDA driver error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("Fatal CUDA error encountered at: x.cu:42: 700 cudaErrorIllegalAddress an"),
        RuntimeError("CUDA error at: cuda_stream_view.cpp:45: cudaErrorIllegalAddress an illegal"),
        RuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered"),
        RuntimeError(RMM_ON_BROKEN_DEVICE),
        MemoryError(RMM_ON_BROKEN_DEVICE),
        BrokenDeviceError("CUDA error"),
    ],
    ids=str,
)
def test_what_breaks_a_device(error):
    assert is_broken_device(error)
    outer = ValueError("a stage failed")
    outer.__cause__ = error
    assert is_broken_device(outer)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory" + TORCH_ADVICE),
        torch.AcceleratorError("CUDA error: too many resources" + TORCH_ADVICE),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("std::bad_alloc: out_of_memory: CUDA error at: cudaErrorMemoryAllocation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu"),
        RuntimeError("misaligned address in a file of ours"),
        ValueError("CUDA error: an illegal memory access was encountered"),
        MemoryError("cuda"),
    ],
    ids=str,
)
def test_what_does_not(error):
    assert not is_broken_device(error)
