"""Tiny copies of the published safety models: Llama decoder, two LoRA adapters, and a guard."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuclassify.questions.template import SafetyTemplate, parse_template
from tests.replicas.answers import fit_answers
from tests.replicas.texts import documents_of, sample_texts
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import (
    empty_directory,
    fit_head,
    save_tensors,
    seeded,
    token_ids,
    write_json,
)

_CATEGORIES = """\
O1: Storms.
O2: Broken budgets.
O3: Cheating in a match.
O4: Spoiled butter.
O5: Secret patients.
O6: Stolen keys.
O7: False theorems.
O8: Bought votes.
O9: Hidden numbers.
O10: Shouting.
O11: Forest traps.
O12: Rude words.
O13: Doubtful advice.
"""
_ANSWER_FORMAT = """\
    - First line must read 'safe' or 'unsafe'.
    - If unsafe, a second line must include a comma-separated list of violated categories."""
_OPENING = """\
[INST] Task: Look for unsafe content in 'User' messages with the categories below.

    <BEGIN UNSAFE CONTENT CATEGORIES>
    """
_CLOSING = """
    <END UNSAFE CONTENT CATEGORIES>

    <BEGIN CONVERSATION>

    User: \n
<END CONVERSATION>

    Provide your assessment for User in the conversation above:
"""
_ADAPTED = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NO_LIMIT = int(1e30)  # the published tokenizer sets none
_FIT_CHARS = 2000


@dataclass(frozen=True)
class SafetyModels:
    """Directories of the small safety models.

    Attributes
    ----------
    base : Path
        The decoder with its tokenizer, as ``meta-llama/LlamaGuard-7b``.
    defensive, permissive : Path
        Adapters to it, as ``nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0`` and
        ``-Permissive-1.0``; the safety prompt stands in their model cards.
    guard : Path
        Perceptron on the hidden states of base and defensive adapter, as
        ``nvidia/instruction-data-guard``.
    """

    base: Path
    defensive: Path
    permissive: Path
    guard: Path


def safety_template() -> str:
    """A short safety prompt for an empty document, about 200 tokens of the small models.

    Returns
    -------
    str
        Structured as the published prompt and otherwise unlike it. The document goes after
        ``User: ``.
    """
    return f"{_OPENING}{_CATEGORIES}{_CLOSING}{_ANSWER_FORMAT} [/INST]"


def write_safety_models(
    directory: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    rank: int = 4,
    max_positions: int = 2048,
    texts: Sequence[str] | None = None,
    template: str | None = None,
) -> SafetyModels:
    """Write small random models with the layouts of the published safety models.

    Parameters
    ----------
    directory : path
        Where to write one directory for each model; created if missing.
    seed : int
        Seed of the weights. The same arguments give the same bytes.
    hidden_size, num_layers, num_heads : int
        Sizes of the decoder; `num_heads` divides `hidden_size`.
    rank : int
        Rank of the adapters; published: 16.
    max_positions : int
        ``max_position_embeddings`` of the decoder. It bounds nothing: the decoder runs on.
    texts : sequence of str, optional
        Documents to train the tokenizer on and to fit the last layers to.
    template : str, optional
        The safety prompt that answers are fitted to and that stands in the model cards. Default:
        `safety_template`.

    Returns
    -------
    SafetyModels
        All weights are float32. After the prompt for a document the decoder with either adapter
        writes ``safe`` or ``unsafe`` and a line of category codes, in nearly all cases.

    Raises
    ------
    ValueError
        If the sizes do not suit each other, the texts hold no words, or the template is no
        complete safety prompt.
    FileExistsError
        If the directory is not empty.
    """
    documents = documents_of(texts)
    text = safety_template() if template is None else template
    prompt = parse_template(text, "the text passed as template=")
    # The tokenizer knows the words of the prompt and of the answers as well.
    known = (prompt.text, "safe unsafe") * (2 + len(documents) // 25)
    tokenizer = trained_tokenizer("llama-guard", documents + known)
    sizes = (hidden_size, num_layers, num_heads, max_positions)
    config = decoder_config(tokenizer.get_vocab_size(), *sizes)
    decoder = random_decoder(config, 5 * seed)
    adapters = {
        name: random_adapter(decoder, rank, 5 * seed + number)
        for number, name in enumerate(("defensive", "permissive"), 1)
    }
    merged = {name: adapted(decoder, adapter).model for name, adapter in adapters.items()}
    path = empty_directory(directory)
    models = SafetyModels(*(path / name for name in ("base", *adapters, "guard")))
    for folder in vars(models).values():
        folder.mkdir()
    decoders = [(merged[name], update_of(adapters[name], "lm_head")) for name in adapters]
    head = fit_answers(decoders, tokenizer, _prompts(documents, prompt), 5 * seed + 3)
    decoder.lm_head.weight.data = head.round(decimals=3)
    save_decoder(decoder, config, models.base)
    write_tokenizer(models.base, "llama-guard", tokenizer, _NO_LIMIT, "right")
    shown = f"{prompt.head}{{message}}{prompt.tail}"
    for name, adapter in adapters.items():
        save_adapter(adapter, path / name)
        _write_card(path / name, f"{name} safety adapter", f"```\n{shown}\n```\n")
    ids = token_ids(tokenizer, documents, max_positions)
    _write_guard(models.guard, merged["defensive"], ids, 5 * seed + 4)
    return models


def _prompts(documents: Sequence[str], prompt: SafetyTemplate) -> list[str]:
    """Whole prompts with single documents, and a few with many of them, which are long."""
    texts = [*documents[:48], *sample_texts(48, seed=1)][:48]  # a fit needs so many
    texts += ["\n".join(texts[start : start + 16]) for start in range(0, 48, 8)]
    return [prompt.head + text[:_FIT_CHARS] + prompt.tail for text in texts]


def _write_card(path: Path, name: str, text: str = "") -> None:
    card = f"# Small {name}\n\nRandom weights for tests.\n" + (text and f"\n{text}")
    (path / "README.md").write_text(card, encoding="utf-8")


def _write_guard(path: Path, decoder: Any, ids: Sequence[Any], seed: int) -> None:
    """Write a perceptron whose scores lie on both sides of one half."""
    import torch
    from torch.nn.functional import normalize

    size = decoder.config.hidden_size
    names = ("input_layer", "hidden_layer_0", "hidden_layer_1", "hidden_layer_2")
    widths = itertools.pairwise((size, size, 2000, 500, 1))
    sizes = dict(zip(names, widths, strict=True))
    layers = seeded(
        lambda: torch.nn.ModuleDict({n: torch.nn.Linear(*sizes[n]) for n in names}).float(), seed
    )

    def outputs_of(row: Any) -> Any:
        vector = normalize(decoder(row).last_hidden_state[0, -1].float(), dim=0)
        for name in names[:-1]:
            vector = layers[name](vector).relu()
        return layers[names[-1]](vector)

    fit_head(layers[names[-1]], outputs_of, list(ids))
    save_tensors(layers.state_dict(), path / "model.safetensors")
    config = json.dumps({"dropout": 0.7, "input_dim": size}, indent=2)
    (path / "config.json").write_text(config, encoding="utf-8")
    _write_card(path, "instruction data guard")


def decoder_config(
    vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, max_positions: int
) -> dict[str, Any]:
    """The content of config.json in the layout of LlamaGuard; ValueError if sizes do not fit."""
    if hidden_size % (2 * num_heads):
        raise ValueError(
            f"hidden_size={hidden_size}, num_heads={num_heads}: every head takes an even share, so "
            f"hidden_size must be a multiple of {2 * num_heads}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": hidden_size * 43 // 16,
        "max_position_embeddings": max_positions,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.35.2",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def random_decoder(config: dict[str, Any], seed: int) -> Any:
    """A ``LlamaForCausalLM`` in float64 whose hidden states tell documents apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    deviation = config["hidden_size"] ** -0.5
    settings = LlamaConfig(**config | {"initializer_range": deviation})
    decoder = seeded(lambda: LlamaForCausalLM(settings).float().eval(), seed)
    # Embeddings that outweigh the layers let the last token show in every hidden state.
    decoder.model.embed_tokens.weight.data /= deviation
    return decoder.double()


def random_adapter(decoder: Any, rank: int, seed: int) -> dict[str, tuple[Any, Any]]:
    """Factors A (rank, in) and B (out, rank), float32, for each layer that LoRA changes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    # The update 2 B A then deviates by 0.3 of what the weights of the layers do.
    deviation = (0.15 * decoder.config.hidden_size**-0.5) ** 0.5 * rank**-0.25
    adapter = {}
    for name, part in decoder.named_modules():
        if name.endswith((*_ADAPTED, "lm_head")):
            outputs, inputs = part.weight.shape
            down = torch.randn(rank, inputs, generator=generator) * deviation
            up = torch.randn(outputs, rank, generator=generator) * deviation
            adapter[name] = (down, up)
    return adapter


def update_of(adapter: dict[str, tuple[Any, Any]], name: str) -> Any:
    """What an adapter adds to a layer's weight, float64 (out, in)."""
    down, up = adapter[name]
    return 2 * up.double() @ down.double()  # lora_alpha / r is 2


def adapted(decoder: Any, adapter: dict[str, tuple[Any, Any]]) -> Any:
    """A copy of a decoder with an adapter merged into it."""
    merged = copy.deepcopy(decoder)
    for name in adapter:
        merged.get_submodule(name).weight.data += update_of(adapter, name)
    return merged


def save_decoder(decoder: Any, config: dict[str, Any], path: Path) -> None:
    """Write weights in float32, config.json and generation_config.json."""
    tensors = {name: tensor.float() for name, tensor in decoder.state_dict().items()}
    save_tensors(tensors, path / "model.safetensors")
    write_json(path / "config.json", config)
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}
    write_json(path / "generation_config.json", generation | {"transformers_version": "4.35.2"})


def save_adapter(adapter: dict[str, tuple[Any, Any]], path: Path) -> None:
    """Write an adapter's two files as PEFT 0.8 does."""
    tensors = {}
    for name, factors in adapter.items():
        for letter, factor in zip("AB", factors, strict=True):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = factor
    save_tensors(tensors, path / "adapter_model.safetensors")
    rank = len(adapter["lm_head"][0])
    config: dict[str, Any] = {
        "alpha_pattern": {},
        "auto_mapping": None,
        # The published ones name a directory of the machine that trained them.
        "base_model_name_or_path": "/training/models/llama-guard-of-another-machine",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": [*(name.split(".")[1] for name in _ADAPTED), "lm_head"],
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    write_json(path / "adapter_config.json", config)
