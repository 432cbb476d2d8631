"""Loading of ``tokenizers.Tokenizer`` from files of strangers, without panics and aborts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.workers.retire import PanicError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Special tokens around a text. Millions of them exhaust the memory, and that ends the process.
_MOST_SPECIAL_TOKENS = 10_000


def load_backend(source: Path | str, name: object) -> Tokenizer:
    """Load a tokenizer that neither cuts nor pads from a file, or from the text of one.

    CheckpointError with the `name` if the tokenizer is damaged or would end the process.
    """
    from tokenizers import Tokenizer

    try:
        with panics_as_errors():
            if isinstance(source, Path):
                backend = Tokenizer.from_file(str(source))
            else:
                backend = Tokenizer.from_str(source)
            backend.no_truncation()
            backend.no_padding()  # to a length that may not fit into memory
            special = max(map(backend.num_special_tokens_to_add, (False, True)))
            if special > _MOST_SPECIAL_TOKENS:
                raise ValueError(f"it puts {special} special tokens around a text")
            with contextlib.suppress(Exception):  # of a text that some tokenizers may not know
                backend.encode("a")
    except Exception as err:  # of any kind
        raise CheckpointError(f"{name} is damaged, or no tokenizer ({err})") from err
    return backend


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise PanicError in place of a panic of the tokenizers library.

    A panic is a BaseException, which would pass every handler of errors.
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
