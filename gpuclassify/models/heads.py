"""Torch modules with the published checkpoints' state-dict names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class PooledHeads(nn.Module):
    """A backbone with several linear layers on the mean of its tokens.

    The layout of ``nvidia/prompt-task-and-complexity-classifier``: tensors ``backbone.*`` and
    ``head_0.fc.*`` onwards, without dropout.

    Parameters
    ----------
    backbone : nn.Module
        A transformers encoder.
    sizes : sequence of int
        Outputs of each head, in the heads' order.
    """

    def __init__(self, backbone: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.backbone = backbone
        width: Any = backbone.config.hidden_size  # type: ignore[union-attr]
        for number, size in enumerate(sizes):
            self.add_module(f"head_{number}", nn.ModuleDict({"fc": nn.Linear(width, size)}))
        self._count = len(sizes)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: Any
    ) -> torch.Tensor:
        """Logits of all heads side by side, (rows, sum of sizes), from ids and mask (rows, width).

        Special tokens count in the mean; it is taken in float32 whatever the weights are.
        """
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **extra)
        states = hidden.last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        mean = (states.float() * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        mean = mean.to(states.dtype)
        heads: list[Any] = [getattr(self, f"head_{number}") for number in range(self._count)]
        return torch.cat([head["fc"](mean) for head in heads], dim=1)


class LinearHead(nn.Module):
    """A backbone with one linear layer on its first token.

    The layout of ``nvidia/domain-classifier``, ``nvidia/multilingual-domain-classifier``,
    ``nvidia/quality-classifier-deberta`` and ``nvidia/content-type-classifier-deberta``: tensors
    ``model.*``, ``fc.weight`` and ``fc.bias``, without pooler or activation.

    Parameters
    ----------
    backbone : nn.Module
        A transformers encoder.
    num_labels : int
    dropout : float
        Probability while training; inference drops nothing.
    """

    def __init__(self, backbone: nn.Module, num_labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = backbone
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(backbone.config.hidden_size, num_labels)  # type: ignore[union-attr, arg-type]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: Any
    ) -> torch.Tensor:
        """Logits (rows, labels) from ids and mask (rows, width), padded on either side."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        first = attention_mask.argmax(dim=1)
        rows = torch.arange(len(first), device=first.device)
        return self.fc(self.dropout(hidden.last_hidden_state[rows, first]))
