"""Settings of torch that hold for a whole process, changed while a model runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpuclassify.inference.shared_context import SharedContext


class ProcessSetting(SharedContext):
    """A setting that has one value while any thread wants it so, and then again what it had.

    It holds for everything in the process: a model of the user's own that runs on another thread
    meanwhile has it too. What another thread sets meanwhile is lost when the last one is done.

    Parameters
    ----------
    read : callable
        Gives the value.
    write : callable
        Takes a value.
    wanted : object
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], wanted: Any) -> None:
        @contextlib.contextmanager
        def changed() -> Iterator[None]:
            before = read()
            write(wanted)
            try:
                yield
            finally:
                write(before)

        super().__init__(changed)


# cuDNN's attention, torch's first choice on recent GPUs, makes a plan for every shape that it has
# not seen: up to half a second for each batch, since hardly two batches have the same shape.
_no_cudnn_attention = ProcessSetting(
    torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False
)
# cuDNN rounds what float32 convolutions read to TF32, of ten bits, unless it is told not to.
_convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
_exact_convolutions = ProcessSetting(
    functools.partial(getattr, _convolutions, "fp32_precision"),
    functools.partial(setattr, _convolutions, "fp32_precision"),
    "ieee",
)


@contextlib.contextmanager
def gpu_settings(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Within it, a model runs on a GPU without cuDNN's attention, and in float32 if it says so.

    Changes nothing on other devices. In float32, torch refuses to tell the older
    ``torch.backends.cudnn.allow_tf32`` meanwhile: it would speak for recurrent layers too.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
        The precision in which the model runs.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_no_cudnn_attention.held())
            if dtype == torch.float32:
                stack.enter_context(_exact_convolutions.held())
        yield
