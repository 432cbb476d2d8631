"""Which device and which precision a model runs in."""

from __future__ import annotations

import torch

from gpuclassify.settings.options import ModelOptions


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

    ``dtype`` decides if given; else ``autocast`` picks bfloat16 on CUDA devices that have it
    natively and float16 on older ones. A CPU runs float32: native bfloat16 is slower on some and
    faster on others, and moves rows over thresholds, so that two machines would disagree.
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
    return torch.float32
