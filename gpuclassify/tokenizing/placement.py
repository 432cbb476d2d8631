"""Where texts are tokenized: what ``tokenizer="auto"``, ``"host"`` and ``"gpu"`` mean."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gpuclassify import hub
from gpuclassify.frames import backend_of
from gpuclassify.models.checkpoint import Checkpoint
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.wordpiece_rules import NotEligibleError, read_rules

if TYPE_CHECKING:
    from gpuclassify.tokenizing.gpu_wordpiece import GpuWordPiece
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

# Whether "auto" means the GPU wherever it can tokenize. Nothing has been measured on a GPU yet, so
# that it means the host; `python -m benchmarks.tokenizing --device cuda` gives the numbers.
IS_GPU_FASTER = False

_HOST = 'pass tokenizer="host"'
_found: WeakKeyDictionary[TextTokenizer, GpuWordPiece | NotEligibleError] = WeakKeyDictionary()
_finding = threading.Lock()


def check_library(options: ModelOptions, frame: Any) -> None:
    """Raise TypeError if the GPU is to tokenize a frame that is not on it."""
    if options.tokenizer == "gpu" and not _is_cudf(frame):
        raise TypeError(
            'tokenizer="gpu" tokenizes columns of cudf frames, and this frame is one of pandas: '
            'move it with ddf.to_backend("cudf"), or in a Pipeline with backend="cudf", or '
            f"{_HOST}"
        )


def check_tokenizer(options: ModelOptions, checkpoint: Checkpoint) -> None:
    """Raise if the GPU is to tokenize and the checkpoint's files say that it cannot.

    They may not say: then the first partition tells, with the tokenizer itself.

    Raises
    ------
    NotEligibleError
    """
    home = checkpoint.tokenizer or checkpoint.identity
    description = hub.read_text(home, "tokenizer.json", cache_dir=options.cache_dir)
    if description is None:
        return
    from tokenizers import Tokenizer

    try:
        read_rules(Tokenizer.from_str(description))
    except NotEligibleError as err:
        raise refused(options, err) from err


def is_for_gpu(options: ModelOptions, frame: Any, device_type: Callable[[], str]) -> bool:
    """Whether a worker leaves the texts of `frame` on the GPU, for a tokenizer that runs there.

    Raises
    ------
    TypeError, ValueError
        It must, and the frame or the model is not on a GPU.
    """
    if options.tokenizer == "gpu":
        check_library(options, frame)
        if device_type() != "cuda":
            raise ValueError(
                f'tokenizer="gpu" makes tokens on a CUDA device, and device={options.device!r} is '
                f"another one here: {_HOST}"
            )
        return True
    is_considered = options.tokenizer == "auto" and IS_GPU_FASTER and not options.has_windows
    return is_considered and _is_cudf(frame) and device_type() == "cuda"


def gpu_tokenizer(on_host: TextTokenizer) -> GpuWordPiece:
    """What stands in for `on_host` on the GPU; built and compared with it once.

    Raises
    ------
    NotEligibleError
        Nothing does.
    """
    with _finding:
        if on_host not in _found:
            _found[on_host] = _build(on_host)
        found = _found[on_host]
    if isinstance(found, NotEligibleError):
        raise NotEligibleError(*found.args)
    return found


def refused(options: ModelOptions, reason: object) -> NotEligibleError:
    """The error for a model whose texts the GPU shall tokenize and cannot, for this reason."""
    return NotEligibleError(
        f'tokenizer="gpu" does not suit {options.model}: {reason} (tokenizer="host")'
    )


def _build(on_host: TextTokenizer) -> GpuWordPiece | NotEligibleError:
    if on_host.backend is None:
        return NotEligibleError("its tokenizer is written in Python: tokenize on the host")
    if on_host.cuts_left:
        return NotEligibleError("it cuts texts on the left: tokenize on the host")
    from gpuclassify.tokenizing.gpu_wordpiece import GpuWordPiece

    try:
        return GpuWordPiece(on_host.backend, on_host.max_tokens)
    except NotEligibleError as err:
        return NotEligibleError(*err.args)  # without its traceback


def _is_cudf(frame: Any) -> bool:
    return backend_of(frame).__name__.endswith(".cudf")


__all__ = ["NotEligibleError", "check_library", "check_tokenizer", "gpu_tokenizer", "is_for_gpu"]
