"""Small random Llama decoders and LoRA adapters, with the layouts of published ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gpuclassify.testing.files import write_json
from gpuclassify.testing.weights import save_tensors, seeded

_ADAPTED = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


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
