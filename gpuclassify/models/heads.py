"""Torch modules with the published checkpoints' state-dict names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gpuclassify.models.pooling import mean_of_tokens


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
        mean = mean_of_tokens(states, attention_mask).to(states.dtype)
        heads: list[Any] = [getattr(self, f"head_{number}") for number in range(self._count)]
        return torch.cat([head["fc"](mean) for head in heads], dim=1)
