"""One vector a text from the states of its tokens, whichever side is padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def mean_of_tokens(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean of each row's tokens, special ones included, float32 (rows, width of a state).

    Parameters
    ----------
    states : Tensor, shape (rows, tokens, width of a state)
        Of any precision; summed in float32.
    attention_mask : Tensor of int64, shape (rows, tokens)
        1 for a token, 0 for padding.
    """
    mask = attention_mask.unsqueeze(-1).float()
    return (states.float() * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def first_token(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The state of each row's first token, float32; arguments as in `mean_of_tokens`."""
    return _rows_at(states, attention_mask.argmax(dim=1))


def last_token(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The state of each row's last token, float32; arguments as in `mean_of_tokens`."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return _rows_at(states, (attention_mask * columns).argmax(dim=1))


def _rows_at(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), columns].float()


_POOL = {"mean": mean_of_tokens, "cls": first_token, "last": last_token}


class PooledEmbedding(nn.Module):
    """A backbone whose token states are pooled to one vector a text.

    Parameters
    ----------
    backbone : nn.Module
        A transformers encoder or decoder.
    pooling : {"mean", "cls", "last"}
        The mean of all tokens, or the state of the first or of the last one.
    """

    def __init__(self, backbone: nn.Module, pooling: str) -> None:
        super().__init__()
        self.backbone = backbone
        self._pool = _POOL[pooling]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **extra: Any
    ) -> torch.Tensor:
        """Vectors, float32 (rows, width of a state), from ids and mask (rows, tokens)."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **extra)
        return self._pool(hidden.last_hidden_state, attention_mask)
