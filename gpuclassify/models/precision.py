"""Which device and which precision a model runs in."""

from __future__ import annotations

import torch

from gpuclassify.options import ModelOptions


def pick_device(name: str) -> torch.device:
    """The torch device for the setting `device`: "auto" means CUDA, then MPS, then CPU.

    Raises
    ------
    ValueError
        This process has no such device.
    """
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={name!r}, but torch {torch.__version__} sees no CUDA device here: "
            'run "gpuclassify doctor", or pass device="auto"'
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f'device={name!r}, but there is no MPS device here: pass device="auto"')
    if device.type == "cuda" and device.index is None:
        # "cuda" and "cuda:0" are one device, and a model is loaded once a device.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def pick_dtype(options: ModelOptions, device: torch.device) -> torch.dtype:
    """The precision of weights and activations.

    ``dtype`` decides if given; else ``autocast`` picks bfloat16 where the device has it natively,
    float16 on older CUDA devices, and float32 elsewhere: emulated bfloat16 on a CPU is slower by
    orders of magnitude.
    """
    if options.dtype is not None:
        return getattr(torch, options.dtype)
    if not options.autocast:
        return torch.float32
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    if device.type == "cpu" and has_native_bfloat16():
        return torch.bfloat16
    return torch.float32


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
