"""Running a model's layers without padding.

Before the first layer a batch changes its layout from padded rows to one row of real tokens, and
after the last layer back. Embeddings, pooling and heads see the rectangle they are written for, so
nothing need be known of them; the layers between are transformers' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from gpuclassify.inference.packed.layout import Layout
from gpuclassify.inference.packed.packed_attention import ATTENTION, current_layout, within
from gpuclassify.inference.shared_context import SharedContext


class NotPackableError(ValueError):
    """The model cannot be run without padding."""


class PackedLayers:
    """Runs the layers of a module on real tokens only.

    Parameters
    ----------
    module : nn.Module
        With a transformers model inside.

    Attributes
    ----------
    calls : int
        Of layers in one forward: some architectures call a layer several times.
    is_first_enough : bool
        Whether the head reads nothing but first tokens, so that the last layer runs no others
        after attention. They are NaN to what follows.
    attention : str, optional
        Name of the torch function by which the last batch's texts were attended to.

    Raises
    ------
    NotPackableError
        There is no list of layers.
    """

    def __init__(self, module: nn.Module) -> None:
        models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
        inner = models[0].modules() if models else iter(())
        lists = (part for part in inner if isinstance(part, nn.ModuleList))
        self.layers = next(lists, nn.ModuleList())
        self.calls = 0
        self.is_first_enough = False
        self._changed_layers = SharedContext(self._change_layers)
        self.attention: str | None = None
        self._configs: list[Any] = list({id(part.config): part.config for part in models}.values())
        if not len(self.layers):
            raise NotPackableError("it has no list of transformers layers")

    @contextlib.contextmanager
    def running(self, lengths: np.ndarray, width: int, device: torch.device) -> Iterator[None]:
        """Within it, one forward of the module runs packed.

        Parameters
        ----------
        lengths : ndarray of int64, shape (texts,)
            Tokens of the batch's texts, which are padded on the right.
        width : int
            Of the padded batch.
        device : torch.device
        """
        layout = Layout(lengths, width, device)
        with self._changed_layers.held(), within(layout):
            yield
            self.attention = layout.attention

    @contextlib.contextmanager
    def _change_layers(self) -> Iterator[None]:
        """Within it, layers change what they take and give, by the layout of the thread's own."""
        with contextlib.ExitStack() as stack:
            for config in self._configs:
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(_pack, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._unpack).remove)
            if self.is_first_enough:
                for part in self.after_attention:
                    stack.callback(part.register_forward_pre_hook(_keep_first).remove)
            yield

    def _unpack(self, _: nn.Module, given: Any, output: Any) -> Any:
        layout = current_layout.get()
        layout.calls += 1
        if layout.calls < self.calls:
            return output
        unpack = layout.unpack_first_tokens if self.is_first_enough else layout.unpack
        return _change(output, unpack)

    @property
    def after_attention(self) -> list[nn.Module]:
        """What takes attention's output and the layer's input in the last layer, if one part does.

        BERT and its kin have it. Where there is none, the last layer runs all tokens.
        """
        output = getattr(getattr(self.layers[-1], "attention", None), "output", None)
        return [output] if isinstance(output, nn.Module) else []

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:
        """Within it, what layers give is appended to the list."""
        seen: list[torch.Tensor] = []

        def note(_: nn.Module, given: Any, output: Any) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output)

        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(note).remove)
            yield seen


def _pack(_: nn.Module, given: Any, named: Any) -> tuple[Any, Any]:
    layout = current_layout.get()
    return _change(given, layout.pack), _change(named, layout.pack)


def _keep_first(_: nn.Module, given: Any) -> Any:
    return _change(given, current_layout.get().first_tokens)


def _change(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` made to the tensors in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_change(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _change(item, change) for name, item in value.items()}
    return value
