"""Count tokens of texts, so that a plan can estimate run time; no weights are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuclassify.mapping.pinned_model import PinnedModel

_TEXTS_AT_A_TIME = 256  # texts tokenized at a time, to limit memory


@dataclass(frozen=True)
class TokenLengths:
    """Numbers of tokens of texts and of their windows, including special tokens and prompts.

    A window is a sequence of tokens that the model reads at once; long texts may have several.
    """

    whole: np.ndarray  # tokens of each text before cutting, int64 (texts,)
    windows: np.ndarray  # tokens of each window that the model runs, int64 (windows,)
    counts: np.ndarray  # windows of each text, int64 (texts,)
    limit: int | None  # maximum tokens of a window; None without a limit


def count_tokens(
    options: Any, model: PinnedModel, texts: list[str], has_all_windows: bool
) -> TokenLengths:
    """Tokenize texts as in a run, and count the tokens of each text and window.

    With `has_all_windows`, all windows of a text are counted, otherwise the first.
    """
    from gpuclassify.models.loading import longest_input
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, all_windows, first_windows

    tokenizer = model.new_tokenizer()
    limit = options.max_seq_length or longest_input(model.checkpoint, tokenizer)
    cut = options.cut_of(limit)
    encode = TextTokenizer(tokenizer, limit, pairing=model.pairing, **cut).encode
    pick = all_windows if has_all_windows else first_windows
    none = np.zeros(0, dtype=np.int64)
    whole, lengths, counts = [none], [none], [none]
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        encoded = encode(model.prompted(texts[start : start + _TEXTS_AT_A_TIME]))
        windows = pick(encoded)
        whole.append(np.array([text.whole_length for text in encoded], dtype=np.int64))
        lengths.append(windows.tokens.lengths)
        counts.append(windows.counts)
    return TokenLengths(
        np.concatenate(whole), np.concatenate(lengths), np.concatenate(counts), limit
    )
