"""What oneDNN can do on this machine."""

import functools

import torch


@functools.cache
def prepacks(dtype):
    """Whether weights of a type can be rearranged; those in bfloat16 not without AVX512."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), None)
    except (AttributeError, RuntimeError):
        return False
    return True
