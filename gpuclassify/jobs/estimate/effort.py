"""What a model asks of a machine: parameters, arithmetic and memory, without its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.hub.headers import WEIGHTS
from gpuclassify.models.checkpoint import OWN_MODULE, Checkpoint
from gpuclassify.safety.lora import ADAPTER_WEIGHTS, LoraCheckpoint

if TYPE_CHECKING:
    import torch

# Architectures whose layers are attention and a feed-forward network of two matrices, or of three
# where a gate is multiplied in. Others (mixtures of experts, convolutions, state spaces) are not
# reckoned: a wrong number is worse than none.
PLAIN = {
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "gpt2", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
GATED = {
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "modernbert", "phi3", "qwen2", "qwen3",
    "smollm3",
}  # fmt: skip
# What configurations call their sizes; the first one that is there counts.
_NAMES = {
    "width": ("hidden_size", "dim", "n_embd"),
    "layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "inner": ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim"),
}
_STATES_A_LAYER = (
    6  # of a token's width, alive together: input, residual, three projections, result
)


@dataclass(frozen=True)
class Network:
    """Sizes of a stack of equal transformer layers.

    Attributes
    ----------
    kind : str
        ``model_type`` of transformers.
    width, inner, layers, heads : int
        Of states, of the feed-forward network, and how many there are.
    key_heads, head_width : int
        Heads that have keys and values of their own, and the width of each.
    is_gated : bool
        Whether the feed-forward network has a third matrix.
    buckets : int
        Of relative positions that are scored apart, as DeBERTa does; else 0.
    """

    kind: str
    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    is_gated: bool = False
    buckets: int = 0

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers: embeddings and heads are left out."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        attention = 2 * self.width * (queries + keys)
        feed_forward = (3 if self.is_gated else 2) * self.width * self.inner
        return self.layers * (attention + feed_forward)

    def operations(self, lengths: np.ndarray, shared: int = 0) -> np.ndarray:
        """Floating-point operations of one forward pass over each text, float64 (texts,).

        Counted as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
        Clusters Using Megatron-LM" (2021), appendix: matrix products alone, two operations for each
        multiply and add. Every token is multiplied with all weights of the layers, and each layer
        needs ``4 n^2 d`` for the scores and weighted sums of n tokens with heads of d numbers in
        all. Attention to earlier tokens alone is counted in full, as there.

        DeBERTa (He et al., 2021) adds two relative-position scores a layer, each ``2 n m d``, where
        m, the positions that occur, is the smaller of ``2 n - 1`` and twice the buckets.

        Parameters
        ----------
        lengths : ndarray of int, shape (texts,)
            Tokens of each text, without padding.
        shared : int
            Tokens with which all texts begin, and which are run once for all of them.
        """
        n = np.asarray(lengths, dtype=np.float64)
        own = np.maximum(n - shared, 0)
        wide = self.layers * self.heads * self.head_width
        total = 2 * own * self.layer_weights + 4 * own * n * wide
        if self.buckets:
            positions = np.minimum(np.maximum(2 * n - 1, 0), 2 * self.buckets)
            total += 2 * (2 * own * positions * wide)
        return total


def read_network(checkpoint: Checkpoint) -> Network | None:
    """The network that a checkpoint's configuration describes; None if it is of another kind."""
    sizes = checkpoint.sizes
    kind = str(sizes.get("model_type", ""))
    if checkpoint.layout == OWN_MODULE or kind not in PLAIN | GATED:
        return None
    found = {name: _first(sizes, names) for name, names in _NAMES.items()}
    if found["inner"] is None and found["width"] is not None:
        found["inner"] = 4 * found["width"]  # as GPT-2 means by none
    if None in found.values():
        return None
    own = {name: int(value) for name, value in found.items() if value is not None}
    head_width = sizes.get("head_dim") or own["width"] // own["heads"]
    return Network(
        kind,
        **own,
        key_heads=int(sizes.get("num_key_value_heads") or own["heads"]),
        head_width=int(head_width),
        is_gated=kind in GATED,
        buckets=_buckets(sizes),
    )


def count_parameters(checkpoint: Checkpoint, cache_dir: str | None = None) -> dict[str, int]:
    """Elements of all tensors by where they are, from the headers of the weights.

    Empty where there are none to read. Mappers that share a decoder name the same place.
    """
    files: list[tuple[hub.Identity, str]] = [(checkpoint.identity, WEIGHTS)]
    if isinstance(checkpoint, LoraCheckpoint):
        files = [(checkpoint.base, WEIGHTS), (checkpoint.adapter, ADAPTER_WEIGHTS)]
        if checkpoint.identity != checkpoint.adapter:
            files.append((checkpoint.identity, WEIGHTS))
    counts = {}
    with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError, ValueError):
        for identity, name in files:
            shapes = hub.read_tensor_shapes(identity, name, cache_dir=cache_dir)
            place = f"{identity.name}@{identity.revision}/{name}"
            counts[place] = sum(int(np.prod(shape)) for shape in shapes.values())
        return counts
    return {}


def batch_bytes(network: Network, device: torch.device, dtype: torch.dtype) -> int:
    """About what the largest batch takes beside the weights.

    The tokens that a batch holds at most, with the states of one layer, and for attention that
    materialises its scores what `gpuclassify.inference` allows for them. A GPU with less free
    memory gets smaller batches.
    """
    from gpuclassify.inference.batch_memory import GPU_MAX_TOKENS, GPU_SCORE_BYTES
    from gpuclassify.inference.memory import CPU_MAX_TOKENS, CPU_SCORE_BYTES

    is_gpu = device.type == "cuda"
    numbers = _STATES_A_LAYER * network.width + 2 * network.inner
    tokens = GPU_MAX_TOKENS if is_gpu else CPU_MAX_TOKENS
    scores = (GPU_SCORE_BYTES if is_gpu else CPU_SCORE_BYTES) if network.buckets else 0
    return tokens * numbers * dtype.itemsize + scores


def _first(sizes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(sizes[name]) for name in names if sizes.get(name) is not None), None)


def _buckets(sizes: Mapping[str, Any]) -> int:
    if not sizes.get("relative_attention"):
        return 0
    buckets = int(sizes.get("position_buckets") or -1)
    longest = int(sizes.get("max_relative_positions") or -1)
    if buckets > 0:
        return buckets
    return longest if longest > 0 else int(sizes.get("max_position_embeddings") or 512)
