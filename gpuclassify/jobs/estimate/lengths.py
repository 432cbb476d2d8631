"""How long texts are in a classifier's own tokens, and what of them its model runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuclassify import hub
from gpuclassify.frames import backend_of
from gpuclassify.hub.explanations import explained
from gpuclassify.hub.paths import cache_folder
from gpuclassify.models.checkpoint import OWN_MODULE
from gpuclassify.safety.lora import LoraCheckpoint
from gpuclassify.text_mapper import TextMapper

TEXTS_AT_A_TIME = 256  # encodings are alive together


@dataclass(frozen=True)
class Lengths:
    """Tokens of the rows of a frame.

    Attributes
    ----------
    whole : ndarray of int64, shape (texts,)
        Tokens of each text that is not null, cut to `max_chars` and to nothing else; special
        tokens and prompts included.
    windows : ndarray of int64, shape (windows,)
        Tokens of each window that the model runs; as many as texts, unless long ones have more.
    counts : ndarray of int64, shape (texts,)
        Windows of each text.
    is_cut : ndarray of bool, shape (texts,)
        Whether the model reads less than the whole text.
    has_text : ndarray of bool, shape (rows,)
    limit : int
        Most tokens of a window.
    shared : int
        Tokens with which all texts begin and which are run once for all of them.
    """

    whole: np.ndarray
    windows: np.ndarray
    counts: np.ndarray
    is_cut: np.ndarray
    has_text: np.ndarray
    limit: int
    shared: int = 0

    def of_rows(self, window_values: np.ndarray) -> np.ndarray:
        """Sums of the windows' values, float64 (rows,); 0 for a null row."""
        sums = np.zeros(len(self.has_text))
        if len(self.counts):
            starts = np.cumsum(self.counts) - self.counts
            sums[self.has_text] = np.add.reduceat(window_values.astype(np.float64), starts)
        return sums


def measure_lengths(mapper: TextMapper, frame: Any) -> Lengths:
    """Tokenize the mapper's column of text, every row of it, with the mapper's own tokenizer.

    Parameters
    ----------
    mapper : TextMapper
    frame : pandas.DataFrame or cudf.DataFrame
    """
    texts = backend_of(frame).texts(frame, mapper.text_field, None)
    present = [text for text in texts if text is not None]
    most = mapper.options.max_chars
    read = [mapper.model.prompt + text[:most] for text in present]
    is_short = np.array([most is not None and len(text) > most for text in present], dtype=bool)
    has_text = np.array([text is not None for text in texts], dtype=bool)
    measure = _in_prompts if _prompt(mapper) is not None else _in_windows
    return measure(mapper, read, is_short, has_text)


def _in_windows(
    mapper: TextMapper, texts: list[str], is_short: np.ndarray, has_text: np.ndarray
) -> Lengths:
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

    options = mapper.options
    tokenizer = _tokenizer(mapper)
    limit = options.max_seq_length or _longest(mapper, tokenizer)
    overlap = None
    if options.has_windows:
        overlap = limit // 8 if options.window_overlap is None else options.window_overlap
    encode = TextTokenizer(tokenizer, limit, overlap).encode
    has_all = options.has_windows and options.window_aggregation != "first"
    whole, windows, counts = [], [], []
    for start in range(0, len(texts), TEXTS_AT_A_TIME):
        for tokens in encode(texts[start : start + TEXTS_AT_A_TIME]):
            own = [len(window) for window in tokens.windows[: None if has_all else 1]]
            whole.append(tokens.whole_length)
            counts.append(len(own))
            windows += own
    wholes, runs = np.array(whole, dtype=np.int64), np.array(windows, dtype=np.int64)
    return Lengths(
        whole=wholes,
        windows=runs,
        counts=np.array(counts, dtype=np.int64),
        is_cut=is_short if has_all else is_short | (wholes > runs),
        has_text=has_text,
        limit=limit,
    )


def _in_prompts(
    mapper: TextMapper, texts: list[str], is_short: np.ndarray, has_text: np.ndarray
) -> Lengths:
    from gpuclassify.safety.prompt_tokens import PromptTokenizer

    prompt, limit = _prompt(mapper), mapper.options.max_seq_length
    tokenizer = PromptTokenizer(_tokenizer(mapper), prompt.head, prompt.tail, limit)
    tokens = tokenizer(texts)
    whole = tokens.lengths if tokens.whole_lengths is None else tokens.whole_lengths
    return Lengths(
        whole=whole,
        windows=tokens.lengths,
        counts=np.ones(len(texts), dtype=np.int64),
        is_cut=is_short | (whole > tokens.lengths),
        has_text=has_text,
        limit=limit,
        shared=len(tokenizer.prefix),
    )


def _prompt(mapper: TextMapper) -> Any:
    """The prompt that texts are put in, of a classifier that has one."""
    return getattr(mapper.model.checkpoint, "prompt", None)


def _tokenizer(mapper: TextMapper) -> Any:
    """A fresh tokenizer, for which no weights are fetched."""
    from gpuclassify.models.loading import load_tokenizer

    checkpoint = mapper.model.checkpoint
    home = checkpoint.tokenizer or checkpoint.identity
    if isinstance(checkpoint, LoraCheckpoint):
        home = checkpoint.base
    return load_tokenizer(checkpoint, _without_weights(home, mapper.options.cache_dir))


def _without_weights(identity: hub.Identity, cache_dir: str | None) -> Path:
    """A directory with the small files of a model."""
    if identity.is_directory:
        return hub.download(identity, cache_dir=cache_dir)
    from huggingface_hub import snapshot_download

    with explained(identity.name, identity.revision):
        folder = snapshot_download(
            identity.name,
            revision=identity.revision,
            cache_dir=cache_folder(cache_dir),
            token=hub.token_for(identity.name),
            allow_patterns=list(hub.LOADABLE_PATTERNS),
            ignore_patterns=[*hub.PICKLE_PATTERNS, "*.safetensors"],
        )
    return Path(folder)


def _longest(mapper: TextMapper, tokenizer: Any) -> int:
    """Most tokens that the model reads if nobody asks for another length."""
    from gpuclassify.inference.loaded_model import _max_tokens

    checkpoint = mapper.model.checkpoint
    return _max_tokens({} if checkpoint.layout == OWN_MODULE else checkpoint.sizes, tokenizer)
