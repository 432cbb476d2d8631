"""What a run did, in counts and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class RunStats:
    """What a run did, in counts and seconds.

    Attributes
    ----------
    rows, null_rows, folded_rows : int
        Rows given, rows without text, and rows whose text another row of the partition has too.
    truncated_texts, shared_texts, windows : int
        Distinct texts that were cut to the model's length, those whose tokens another mapper had
        made, and their windows: as many as distinct texts, unless long ones have more.
    folded_windows : int
        Windows that were not run, because another one of the partition has the same tokens.
    tokens, padded_tokens : int
        Real tokens, and tokens that the model's layers ran, padding included.
    batches, out_of_memory : int
    rescued_texts : int
        Texts whose outputs were not finite at first and were recomputed alone in float32.
    prefix_tokens : int
        Tokens of prompts that were not run, because a prefix run once stands for them.
    decode_steps : int
        Forward passes that continued answers after a batch's first one.
    tokenize_seconds : float
        On a thread of its own, ahead of the model.
    wait_tokens_seconds, wait_device_seconds : float
        In which this run had nothing to do, because no tokens were ready, or because another thread
        of the process was using the device. On a GPU, which may still be at work on what it was
        given before, the first is an upper bound of how long the device was idle.
    model_seconds : float
    """

    rows: int = 0
    null_rows: int = 0
    folded_rows: int = 0
    truncated_texts: int = 0
    shared_texts: int = 0
    windows: int = 0
    folded_windows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    out_of_memory: int = 0
    rescued_texts: int = 0
    prefix_tokens: int = 0
    decode_steps: int = 0
    tokenize_seconds: float = 0.0
    wait_tokens_seconds: float = 0.0
    wait_device_seconds: float = 0.0
    model_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)
