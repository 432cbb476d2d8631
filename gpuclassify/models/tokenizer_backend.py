"""Loading of ``tokenizers.Tokenizer`` from untrusted files, without panics and aborts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.workers.retire import PanicError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_LIMIT = 2**31 - 1  # maximum tokens of a text without a limit
# Maximum special tokens around a text. Millions would exhaust memory and end the process.
_MOST_SPECIAL_TOKENS = 10_000


def load_backend(source: Path | str, name: object) -> Tokenizer:
    """Load a tokenizer from ``tokenizer.json`` (Path) or its text, without truncation and padding.

    Raises CheckpointError, which calls the tokenizer `name`, if it is damaged.
    """
    from tokenizers import Tokenizer

    try:
        with panics_as_errors():
            if isinstance(source, Path):
                backend = Tokenizer.from_file(str(source))
            else:
                backend = Tokenizer.from_str(source)
            backend.no_truncation()
            backend.no_padding()  # a padded text may not fit into memory
            special = max(map(backend.num_special_tokens_to_add, (False, True)))
            if special > _MOST_SPECIAL_TOKENS:
                raise ValueError(f"it puts {special} special tokens around a text")
            with contextlib.suppress(Exception):  # only a panic counts: "a" may be unknown
                backend.encode("a")
    except Exception as err:
        raise CheckpointError(f"{name} is damaged, or no tokenizer ({err})") from err
    return backend


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Convert a panic of the tokenizers library (Rust) in the block to PanicError.

    A panic is a BaseException, which handlers of Exception do not catch. Other errors pass.
    """
    try:
        yield
    except BaseException as err:
        if type(err).__name__ != "PanicException":
            raise
        raise PanicError(
            f"the tokenizers library panicked on a text (PanicException: {err}). If it does on "
            "every text, the model's tokenizer.json is damaged: copy or save it again"
        ) from err
