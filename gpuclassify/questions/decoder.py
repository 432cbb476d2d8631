"""A decoder in memory, with adapters that share its weights."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.loading import building_lock, quiet_transformers
from gpuclassify.models.tensors import refuse_wrong_tensors
from gpuclassify.questions.lora import check_is_llama, import_peft, load_adapter

_VOCABULARIES = ("tokenizer.json", "tokenizer.model")

Thing = TypeVar("Thing")


class Decoder:
    """A causal language model on its device, evaluating in one precision. Safe for threads.

    Its weights are in memory once, and low-rank adapters that are added to it take turns. They are
    not merged into the weights: merged ones could not share them.

    Attributes
    ----------
    device : torch.device
    dtype : torch.dtype
    tokenizer : transformers tokenizer
        For decoding and its declarations; never configured.
    eos_ids : frozenset of int
        Every token that ends an answer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.tokenizer = tokenizer
        declared = [s.eos_token_id for s in (model.config, model.generation_config, tokenizer)]
        several = [[eos] if isinstance(eos, int) else eos or [] for eos in declared]
        self.eos_ids = frozenset().union(*several)
        self._model = model
        self._adapted: Any = None
        self._inner_names: dict[str, str] = {}  # peft's own, because it refuses dots in names
        self._active: str | None = None
        # Adding an adapter replaces modules, which no forward may be running through.
        self._lock = threading.Lock()
        self._attachments: dict[Hashable, Any] = {}
        self._attaching = threading.RLock()

    def new_tokenizer(self) -> Any:
        """A tokenizer of the caller's own, free to be configured."""
        return copy.deepcopy(self.tokenizer)

    def attached(self, key: Hashable, build: Callable[[], Thing]) -> Thing:
        """What ``build()`` made for `key` the first time; it stays as long as this decoder does."""
        with self._attaching:
            if key not in self._attachments:
                self._attachments[key] = build()
            return self._attachments[key]

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load the LoRA adapter in `directory` under `name`, once; its weights become `dtype`.

        The active adapter stays the active one; the first that is added becomes it. CheckpointError
        says what is missing or does not fit this model.
        """
        if name in self._inner_names:  # without waiting for a forward, or for another model's load
            return
        peft = import_peft()
        with self._lock, building_lock, quiet_transformers():
            if name in self._inner_names:
                return
            config, tensors = load_adapter(directory, self._model.config.to_dict(), self.device)
            inner = f"adapter{len(self._inner_names)}"
            if self._adapted is None:
                self._adapted = peft.PeftModel(
                    self._model, config, inner, autocast_adapter_dtype=False
                )
                self._active = name
            else:
                self._adapted.add_adapter(inner, config, autocast_adapter_dtype=False)
            peft.set_peft_model_state_dict(self._adapted, tensors, inner)
            self._adapted.eval().requires_grad_(False)
            self._inner_names[name] = inner

    def use(self, name: str) -> None:
        """Make the adapter `name` the active one. The caller holds the device's lock."""
        with self._lock:
            if name not in self._inner_names:
                known = list(self._inner_names)
                raise KeyError(f"no adapter {name!r} among {known}: call add_adapter first")
            if name != self._active:
                self._adapted.set_adapter(self._inner_names[name], inference_mode=True)
                self._active = name

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention: str = "sdpa",
        **extra: Any,
    ) -> torch.Tensor:
        """Hidden states after the final norm, (rows, width, hidden), by the active adapter.

        Padding on the left needs the mask and position ids. With padding on the right, tokens
        before it come out right without a mask, which is faster. `attention` is the name of an
        attention function that transformers knows, and `extra` is handed to that function.
        """
        with self._lock:
            if self._model.config._attn_implementation != attention:
                self._model.set_attn_implementation(attention)
            outputs = self._model.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
                **extra,
            )
        return outputs.last_hidden_state

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the last layer makes of hidden states (n, hidden): float32 (n, vocabulary)."""
        with self._lock:
            return self._model.lm_head(hidden).float()


def load_decoder(directory: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load the Llama model and the tokenizer in `directory` as `dtype` onto `device`.

    CheckpointError says which tensors or files are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_is_llama(json.loads((directory / "config.json").read_text()), str(directory))
    # Without a vocabulary transformers makes a tokenizer to which every word is unknown.
    if not any((directory / name).exists() for name in _VOCABULARIES):
        raise CheckpointError(
            f"{directory} has no {' or '.join(_VOCABULARIES)}: save the tokenizer beside the "
            "model with tokenizer.save_pretrained"
        )
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with building_lock, quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(directory, **local)
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below with all their names
            output_loading_info=True,
            **local,
        )
    refuse_wrong_tensors(
        str(directory),
        report["missing_keys"],
        [f"{name} {tuple(a)} instead of {tuple(b)}" for name, a, b in report["mismatched_keys"]],
        [],  # transformers itself ignores what it does not know
    )
    return Decoder(model.to(device).eval().requires_grad_(False), tokenizer)
