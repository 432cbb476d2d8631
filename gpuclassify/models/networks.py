"""Torch modules of classifiers and embedders: a backbone (encoder) with heads or pooling.

Their tensors have the names of published checkpoints. Outputs do not depend on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gpuclassify.models.checkpoint import CheckpointError


def mean_of_tokens(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Average the hidden states of each row's tokens, special tokens included, in float32.

    `states` are (rows, tokens, width), the mask (rows, tokens) is 0 for padding, and the result is
    (rows, width). A row without tokens has zeros.
    """
    mask = attention_mask.unsqueeze(-1).float()
    return (states.float() * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def first_token(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the state, float32 (rows, width), of each row's first token that is not padding."""
    return _rows_at(states, attention_mask.argmax(dim=1)).float()


def last_token(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the state, float32 (rows, width), of each row's last token that is not padding."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return _rows_at(states, (attention_mask * columns).argmax(dim=1)).float()


def _rows_at(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), columns]


class FirstTokenHead(nn.Module):
    """Backbone (`model`) with one linear layer (`fc`) on the first token's hidden state."""

    def __init__(self, backbone: nn.Module, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        width: Any = backbone.config.hidden_size  # type: ignore[union-attr]
        self.model = backbone
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, outputs)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: object
    ) -> torch.Tensor:
        """Compute logits (rows, outputs) from token ids and mask, each (rows, tokens).

        Logits have the dtype of the network. `extra` are further arguments of the backbone.
        """
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        columns = attention_mask.argmax(dim=1)
        return self.fc(self.dropout(_rows_at(hidden.last_hidden_state, columns)))


class PooledHeads(nn.Module):
    """A backbone with several classification heads, linear layers on the mean of token states.

    The layout of ``nvidia/prompt-task-and-complexity-classifier``. `sizes` are the heads' numbers
    of outputs.
    """

    def __init__(self, backbone: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.backbone = backbone
        width: Any = backbone.config.hidden_size  # type: ignore[union-attr]
        for number, size in enumerate(sizes):
            self.add_module(f"head_{number}", nn.ModuleDict({"fc": nn.Linear(width, size)}))
        self._count = len(sizes)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: object
    ) -> torch.Tensor:
        """Compute the concatenated logits of all heads, (rows, sum of sizes)."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **extra)
        states = hidden.last_hidden_state
        mean = mean_of_tokens(states, attention_mask).to(states.dtype)
        heads: list[Any] = [getattr(self, f"head_{number}") for number in range(self._count)]
        return torch.cat([head["fc"](mean) for head in heads], dim=1)


class FirstTokenLevels(nn.Module):
    """A backbone with `count` linear heads on the first token's state, of `levels` outputs each.

    The layout of ``PleIAs/celadon``. A head rates a text by the index of its largest output.
    """

    def __init__(self, backbone: nn.Module, count: int, levels: int = 4) -> None:
        super().__init__()
        width: Any = backbone.config.hidden_size  # type: ignore[union-attr]
        self.deberta = backbone
        self.heads = nn.ModuleList(nn.Linear(width, levels) for _ in range(count))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: object
    ) -> torch.Tensor:
        """Compute a level for each head, (rows, heads), whole numbers in the network's dtype."""
        hidden = self.deberta(input_ids=input_ids, attention_mask=attention_mask, **extra)
        first = _rows_at(hidden.last_hidden_state, attention_mask.argmax(dim=1))
        levels = [head(first).argmax(dim=1) for head in self.heads]
        return torch.stack(levels, dim=1).to(first.dtype)


class ScoreAndProbability(nn.Module):
    """A DeBERTa with transformers' pooler, and two linear layers on the pooled first token.

    One gives a score, and the other a probability. The layout of ``utter-project/EuroFilter-v1``.
    """

    def __init__(self, backbone: nn.Module) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        config: Any = backbone.config
        width = getattr(config, "pooler_hidden_size", config.hidden_size)
        self.deberta = backbone
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, width)})
        self.regressor = nn.Linear(width, 1)
        self.binary_classifier = nn.Linear(width, 1)
        self._activation = ACT2FN[getattr(config, "pooler_hidden_act", "gelu")]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: object
    ) -> torch.Tensor:
        """Compute a score and a probability for each text, (rows, 2), in this order."""
        hidden = self.deberta(input_ids=input_ids, attention_mask=attention_mask, **extra)
        first = _rows_at(hidden.last_hidden_state, attention_mask.argmax(dim=1))
        pooled = self._activation(self.pooler["dense"](first))
        return torch.cat([self.regressor(pooled), self.binary_classifier(pooled).sigmoid()], dim=1)


_POOL = {"mean": mean_of_tokens, "cls": first_token, "last": last_token}


class PooledEmbedding(nn.Module):
    """Embedding model: a backbone whose token states are pooled by "mean", "cls" (first) or "last".

    Pooled states go through the attribute `dense`, the identity until layers are assigned.
    """

    def __init__(self, backbone: nn.Module, pooling: str) -> None:
        super().__init__()
        self.backbone = backbone
        self._pool = _POOL[pooling]
        self.dense: nn.Module = nn.Identity()  # float32, like pooled states

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: object
    ) -> torch.Tensor:
        """Compute embeddings, float32 (rows, width), from token ids and mask (rows, tokens)."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **extra)
        return self.dense(self._pool(hidden.last_hidden_state, attention_mask))


class TokenAverage(nn.Module):
    """Static embedding model: the mean of fixed vectors of a text's tokens; zeros if it has none.

    `vectors` are (token ids, width), and the token id `unknown` is ignored. `token_chars` is for
    the tokenizer: if set, it reads at most that many characters of a text per token of the length
    limit. Means go through the attribute `dense`, the identity until layers are assigned.
    """

    def __init__(
        self, vectors: torch.Tensor, unknown: int | None = None, token_chars: int | None = None
    ) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag.from_pretrained(vectors, padding_idx=unknown)
        self.token_chars = token_chars
        self.dense: nn.Module = nn.Identity()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: object
    ) -> torch.Tensor:
        """Compute embeddings, float32 (rows, width), from token ids and mask (rows, tokens)."""
        lengths = attention_mask.sum(1)
        return self.average(input_ids[attention_mask.bool()], lengths.cumsum(0) - lengths)

    def average(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Compute embeddings, float32 (texts, width), from joined token ids and texts' offsets."""
        return self.dense(self.vectors(ids, starts).float())


class GuardLayers(nn.Module):
    """Classification head of ``nvidia/instruction-data-guard``, on a state scaled to length 1."""

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.input_layer = nn.Linear(input_dim, input_dim)
        self.hidden_layer_0 = nn.Linear(input_dim, 2000)
        self.hidden_layer_1 = nn.Linear(2000, 500)
        self.hidden_layer_2 = nn.Linear(500, 1)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Compute logits (rows, 1) from a decoder's hidden states (rows, input_dim)."""
        hidden = F.normalize(state, dim=-1)
        for layer in (self.input_layer, self.hidden_layer_0, self.hidden_layer_1):
            hidden = F.relu(layer(hidden))
        return self.hidden_layer_2(hidden)


def refuse_wrong_outputs(module: nn.Module, outputs: object, rows: int, count: int) -> torch.Tensor:
    """Check the outputs of a network, and return them as a tensor (rows, outputs).

    `outputs` may be a tensor, also of shape (rows,), or an object with a tensor `logits`. Raises
    CheckpointError unless they are for `rows` texts with `count` outputs each (0: any number).
    """
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, torch.Tensor):
        raise CheckpointError(
            f"{type(module).__name__}.forward gives a {type(outputs).__qualname__}: "
            "it must return a tensor (texts, outputs)"
        )
    if logits.shape == (rows,):
        logits = logits[:, None]
    if logits.ndim != 2 or len(logits) != rows:
        raise CheckpointError(
            f"{type(module).__name__}.forward gives a tensor of shape {tuple(logits.shape)} "
            f"for {rows} texts: it must return (texts, outputs)"
        )
    if count and logits.shape[1] != count:
        raise CheckpointError(
            f"{type(module).__name__} gives {logits.shape[1]} outputs a text, and config.json "
            f"names {count} labels: they must be as many"
        )
    return logits
