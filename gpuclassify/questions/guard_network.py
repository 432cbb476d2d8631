"""The network that reads a decoder's last state for signs of poisoned instructions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from gpuclassify.models.networks import last_token
from gpuclassify.questions.decoder import Decoder

WEIGHTS = "model.safetensors"


class GuardHead(nn.Module):
    """Four linear layers on a normalised vector.

    The layout of ``nvidia/instruction-data-guard``, whose inner sizes are fixed.

    Parameters
    ----------
    input_dim : int
        Size of the decoder's states.
    """

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.input_layer = nn.Linear(input_dim, input_dim)
        self.hidden_layer_0 = nn.Linear(input_dim, 2000)
        self.hidden_layer_1 = nn.Linear(2000, 500)
        self.hidden_layer_2 = nn.Linear(500, 1)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Logits (rows, 1) from states (rows, input_dim)."""
        hidden = F.normalize(state, dim=-1)
        for layer in (self.input_layer, self.hidden_layer_0, self.hidden_layer_1):
            hidden = F.relu(layer(hidden))
        return self.hidden_layer_2(hidden)


class GuardNetwork(nn.Module):
    """A decoder's last state, read by a `GuardHead` in float32. The decoder is shared with others.

    Parameters
    ----------
    decoder : Decoder
    adapter : str
        The decoder's adapter that is to be active.
    head : GuardHead
    """

    def __init__(self, decoder: Decoder, adapter: str, head: GuardHead) -> None:
        super().__init__()
        self.head = head
        self._decoder = decoder
        self._adapter = adapter

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (rows, 1) from ids and mask (rows, width), padded on either side.

        One pass of the decoder without its last layer; of its states only the last one is kept.
        """
        self._decoder.use(self._adapter)
        is_left = position_ids is not None
        hidden = self._decoder.forward(input_ids, attention_mask if is_left else None, position_ids)
        return self.head(last_token(hidden, attention_mask))


def guard_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a `GuardHead` of this ``config.json`` needs."""
    with torch.device("meta"):
        head = GuardHead(config["input_dim"])
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def load_guard_head(directory: Path, device: torch.device) -> GuardHead:
    """The head in `directory`, in float32 on `device`."""
    config = json.loads((directory / "config.json").read_text())
    head = GuardHead(config["input_dim"])
    head.load_state_dict(load_file(directory / WEIGHTS))
    return head.float().to(device).eval().requires_grad_(False)
