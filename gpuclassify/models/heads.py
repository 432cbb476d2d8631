"""Torch modules with the published checkpoints' state-dict names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
