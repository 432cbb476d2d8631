"""Causal language model in memory, with LoRA adapters that share its weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from gpuclassify import hub
from gpuclassify.classifiers.questions.lora import (
    decoder_sizes,
    decoder_tensors,
    decoder_without_memory,
    end_ids,
)
from gpuclassify.classifiers.questions.shared_prefix import ATTENTION, RowState, SingleForward
from gpuclassify.inference.device import to_device
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.loading import import_peft, load_adapter, network_config, pretrained
from gpuclassify.models.networks import GuardLayers, last_token
from gpuclassify.models.tokenizer_files import read_tokenizer
from gpuclassify.models.transformers_state import building_lock, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Thing = TypeVar("Thing")

_LOGITS_AT_ONCE = 1_024  # tokens whose logits of the whole vocabulary are in memory


class Decoder:
    """Causal language model on a device, with LoRA adapters; at most one of them is active."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]
    ) -> None:
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.tokenizer = tokenizer  # used to decode; its settings never change
        self.eos_ids = eos_ids  # every token that ends an answer
        self._model = model  # model with the active adapter, one of `_models`
        # Model by adapter. All share the tensors of the base model.
        self._models: dict[str | None, Any] = {None: model}
        self._lock = threading.Lock()
        self._attachments: dict[Hashable, Any] = {}
        self._attaching = threading.RLock()
        head = model.get_output_embeddings()
        self._head_name = next(name for name, part in model.named_children() if part is head)
        self._rows: tuple[tuple[int, ...], nn.Module, nn.Module] = ((), head, nn.Identity())

    def new_tokenizer(self) -> Any:
        """Return a copy of the tokenizer, which the caller may configure."""
        return copy.deepcopy(self.tokenizer)

    def attached(self, key: Hashable, build: Callable[[], Thing]) -> Thing:
        """Return the result of ``build()``, cached under `key` as long as this decoder lives."""
        with self._attaching:
            if key not in self._attachments:
                self._attachments[key] = build()
            return self._attachments[key]

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load the LoRA adapter in `directory` as `name`, unless an adapter of this name is loaded.

        The first adapter becomes active; others do not change the active one.
        """
        if name in self._models:  # no need to wait for the locks below
            return
        peft = import_peft()
        with self._lock, building_lock, quiet_transformers():
            if name in self._models:
                return
            base = self._models[None]
            shell = decoder_without_memory(base.config.to_dict())
            config, tensors = load_adapter(directory, shell, self.device)
            model = copy.deepcopy(base, _memo_of_shared(base))
            adapted = peft.PeftModel(model, config, autocast_adapter_dtype=False)
            peft.set_peft_model_state_dict(adapted, tensors)
            adapted.eval().requires_grad_(False)
            if len(self._models) == 1:
                self._model = model
            self._models[name] = model

    def use(self, name: str | None) -> None:
        """Make the adapter `name` active (None: no adapter). The caller holds the device's lock."""
        with self._lock:
            if name not in self._models:
                known = [one for one in self._models if one is not None]
                raise KeyError(f"no adapter {name!r} among {known}: call add_adapter first")
            self._model = self._models[name]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention: str = "sdpa",
        **extra: object,
    ) -> torch.Tensor:
        """Compute hidden states after the final norm, (rows, width, hidden).

        A mask is needed only for padding on the left, which also needs position ids. `attention` is
        the name of an attention function in transformers, which gets `extra` as keyword arguments.
        """
        with self._lock:
            if self._model.config._attn_implementation != attention:
                self._model.set_attn_implementation(attention)
            outputs = self._model.base_model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
                **extra,
            )
        return outputs.last_hidden_state

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, tokens: tuple[int, ...] | None = None) -> torch.Tensor:
        """Compute logits, float32 (n, vocabulary), of hidden states (n, hidden).

        With `tokens`, returns the logits of these token ids only, (n, tokens).
        """
        if tokens == ():
            return hidden.new_empty((len(hidden), 0), dtype=torch.float32)
        with self._lock:
            head = self._model.get_output_embeddings()
            is_plain = type(head) is nn.Linear
            if tokens is not None and is_plain:
                if self._rows[0] != tokens or self._rows[1] is not head:
                    self._rows = tokens, head, _Rows(head, tokens)
                return self._finished(self._rows[2], hidden)
            logits = self._finished(head, hidden)
            return logits if tokens is None else logits[:, list(tokens)]

    def _finished(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits by the output layer `head`; the model's own code scales and caps them."""
        shell = copy.copy(self._model)
        body, last = shell.base_model_prefix, self._head_name
        shell._modules = {**shell._modules, body: _Given(hidden), last: head}
        return shell(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


class LikelihoodNetwork(nn.Module):
    """Decoder that sums the negative log-likelihoods of each row's tokens."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        super().__init__()
        self._decoder = decoder
        self._context = context

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return sums of negative log-likelihood in nats, and counts of tokens, float32 (rows, 4).

        Columns 0 and 1 are sum and count over all tokens of a row except its first one. Columns 2
        and 3 also leave out the first `context` tokens of each row. Ids and mask are (rows, width),
        padded on the right.
        """
        self._decoder.use(None)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions, state = columns.expand_as(input_ids), SingleForward()
        hidden = self._decoder.forward(
            input_ids, position_ids=positions, attention=ATTENTION, state=state
        )
        is_token = attention_mask[:, 1:] > 0
        nats = hidden.new_zeros(is_token.shape, dtype=torch.float32)
        places = is_token.nonzero()
        for part in places.split(_LOGITS_AT_ONCE):
            row, column = part.T
            logits, targets = self._decoder.logits(hidden[row, column]), input_ids[row, column + 1]
            nats[row, column] = F.cross_entropy(logits, targets, reduction="none")
        masks = is_token, is_token & (columns[1:] >= self._context)
        sums = [(torch.where(mask, nats, 0).sum(1), mask.sum(1).float()) for mask in masks]
        return torch.stack([number for pair in sums for number in pair], dim=1)


class GuardNetwork(nn.Module):
    """Decoder with a LoRA adapter, and a small network on the last hidden state of each text."""

    def __init__(self, decoder: Decoder, adapter: str, layers: GuardLayers) -> None:
        super().__init__()
        self.layers = layers
        self._decoder = decoder
        self._adapter = adapter

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute logits (rows, 1) from ids and mask (rows, width), padded on either side.

        `position_ids` are passed if, and only if, padding is on the left.
        """
        self._decoder.use(self._adapter)
        is_left = position_ids is not None
        hidden = self._decoder.forward(input_ids, attention_mask if is_left else None, position_ids)
        return self.layers(last_token(hidden, attention_mask))


def _memo_of_shared(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return a memo for ``copy.deepcopy``, so that a copied model shares its weight tensors.

    Biases are copied, because peft writes into them; it only replaces weights.
    """
    shared = {id(tensor): tensor for tensor in model.buffers()}
    for name, tensor in model.named_parameters():
        if not name.endswith("bias"):
            shared[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
    return shared


class _Given(nn.Module):
    """Stand-in for a decoder's body that returns given hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden[None]

    def forward(self, *_: object, **__: object) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class _Rows(nn.Module):
    """Output layer that computes logits of some token ids only, float32 (n, tokens)."""

    def __init__(self, head: nn.Linear, tokens: tuple[int, ...]) -> None:
        super().__init__()
        ids = to_device(np.array(tokens), head.weight.device)
        self.weight = head.weight.index_select(0, ids).float()
        self.bias = None if head.bias is None else head.bias.index_select(0, ids).float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight, self.bias)


def check_runs(sizes: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError unless `Decoder` can run a model with this parsed ``config.json``."""
    model = decoder_without_memory(sizes).eval()
    decoder = Decoder(model, SimpleNamespace(), frozenset())
    ids, state = torch.zeros(1, 2, dtype=torch.int64, device="meta"), RowState()
    try:
        hidden = decoder.forward(ids, position_ids=ids, attention=ATTENTION, state=state)
        decoder.logits(hidden[0])
        if len(state.layers) != model.config.num_hidden_layers:
            raise NotImplementedError("its attention is its own code")
    except Exception as err:  # the model's code may raise anything
        raise CheckpointError(
            f"{name} is a {type(model).__name__}, which cannot be asked as other decoders are "
            f"({err}): pass one such as Llama, Qwen, Gemma, Granite, Mistral, Phi-3 or SmolLM"
        ) from err


def load_decoder(directory: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load the causal language model and tokenizer in `directory`, in this dtype, onto a device."""
    from transformers import AutoModelForCausalLM

    owner = str(directory)
    sizes = decoder_sizes(hub.read_json_file(directory / "config.json"), owner)
    tokenizer = read_tokenizer(owner, directory)
    eos_ids = end_ids(sizes, directory, tokenizer)
    with building_lock, quiet_transformers():
        config = network_config(sizes, owner)
        model = pretrained(
            AutoModelForCausalLM, owner, directory, dtype, config, select=decoder_tensors
        )
    return Decoder(model.to(device).eval().requires_grad_(False), tokenizer, eos_ids)
