"""Texts' lengths in a mapper's own tokens, and how large its weights are.

A stand-in for `mapper.runner` and `mapper.model`, which will answer the two questions below.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuclassify import hub
from gpuclassify.hub.explanations import explained
from gpuclassify.hub.headers import WEIGHTS
from gpuclassify.hub.paths import cache_folder
from gpuclassify.models.checkpoint import OWN_MODULE
from gpuclassify.safety.lora import ADAPTER_WEIGHTS, LoraCheckpoint
from gpuclassify.text_mapper import TextMapper

TEXTS_AT_A_TIME = 256  # encodings are alive together


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of texts.

    Attributes
    ----------
    whole : ndarray of int64, shape (texts,)
        Tokens of each text before any cut, special tokens and prompts included.
    windows : ndarray of int64, shape (windows,)
        Tokens of each window that the model runs; as many as texts, unless long ones have more.
    counts : ndarray of int64, shape (texts,)
        Windows of each text.
    limit : int
        Most tokens of a window.
    """

    whole: np.ndarray
    windows: np.ndarray
    counts: np.ndarray
    limit: int


def weights_bytes(mapper: TextMapper, dtype: Any) -> dict[str, int]:
    """Stand-in for ``mapper.model.weights_bytes(dtype)``: bytes by the file of the weights.

    Mappers that share a decoder name the same file. Empty where there are no headers to read.
    """
    checkpoint = mapper.model.checkpoint
    files: dict[hub.Identity, str] = {}
    if isinstance(checkpoint, LoraCheckpoint):
        files = {checkpoint.base: WEIGHTS, checkpoint.adapter: ADAPTER_WEIGHTS}
    files.setdefault(checkpoint.identity, WEIGHTS)
    # A module of one's own keeps its weights as they are, and torch casts what it reads.
    item_bytes = 4 if checkpoint.layout == OWN_MODULE else dtype.itemsize
    found = {}
    with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError, ValueError):
        for identity, name in files.items():
            shapes = hub.read_tensor_shapes(identity, name, cache_dir=mapper.options.cache_dir)
            place = f"{identity.name}@{identity.revision}/{name}"
            found[place] = item_bytes * sum(int(np.prod(shape)) for shape in shapes.values())
        return found
    return {}


def token_lengths(mapper: TextMapper, texts: list[str]) -> TokenLengths:
    """Stand-in for ``mapper.runner.token_lengths(texts)``: tokenizes here, without weights."""
    from gpuclassify.inference.loaded_model import _max_tokens
    from gpuclassify.models.loading import load_tokenizer
    from gpuclassify.safety.prompt_tokens import PromptTokenizer
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

    options, checkpoint = mapper.options, mapper.model.checkpoint
    home = checkpoint.tokenizer or checkpoint.identity
    if isinstance(checkpoint, LoraCheckpoint):
        home = checkpoint.base
    tokenizer = load_tokenizer(checkpoint, _without_weights(home, options.cache_dir))
    texts = [mapper.model.prompt + text for text in texts]
    prompt = checkpoint.prompt if isinstance(checkpoint, LoraCheckpoint) else None
    if prompt is not None:
        limit = options.max_seq_length
        tokens = PromptTokenizer(tokenizer, prompt.head, prompt.tail, limit)(texts)
        whole = tokens.lengths if tokens.whole_lengths is None else tokens.whole_lengths
        return TokenLengths(whole, tokens.lengths, np.ones(len(texts), dtype=np.int64), limit)
    sizes = {} if checkpoint.layout == OWN_MODULE else checkpoint.sizes
    limit = options.max_seq_length or _max_tokens(sizes, tokenizer)
    overlap = None
    if options.has_windows:
        overlap = limit // 8 if options.window_overlap is None else options.window_overlap
    encode = TextTokenizer(tokenizer, limit, overlap).encode
    most = None if options.has_windows and options.window_aggregation != "first" else 1
    wholes, windows, counts = [], [], []
    for start in range(0, len(texts), TEXTS_AT_A_TIME):
        for own in encode(texts[start : start + TEXTS_AT_A_TIME]):
            wholes.append(own.whole_length)
            counts.append(len(own.windows[:most]))
            windows += [len(window) for window in own.windows[:most]]
    as_array = functools.partial(np.array, dtype=np.int64)
    return TokenLengths(as_array(wholes), as_array(windows), as_array(counts), limit)


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
