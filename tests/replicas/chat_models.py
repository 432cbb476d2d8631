"""Small random decoders of many architectures, with tokenizers and chat templates as published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.replicas.texts import sample_texts
from tests.replicas.writing import seeded

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As those of Llama 3: white space around a message is lost.
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
    "<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] "
    "{{ message['content'] }} [/INST]{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
# As Qwen 3's: of an answer, thoughts are split off and line breaks at the beginning are lost.
THINKING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}{% set thoughts = '' %}{% if '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]"
    ".lstrip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>assistant\n<think>\n{{ thoughts.strip('\\n') }}\n</think>\n\n"
    "{{ content.lstrip('\\n') }}<|im_end|>\n{% else %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROLS = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
)  # fmt: skip
# By name: transformers' class, the chat template, whether tokens are pieces of words as in
# SentencePiece, and settings in which the architecture differs from Llama's.
ARCHITECTURES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "llama2": ("Llama", INST, True, {}),
    "llama3": ("Llama", LLAMA3, False, {"num_key_value_heads": 2, "rope_theta": 5e5}),
    "qwen2": ("Qwen2", CHATML, False, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", CHATML, False, {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2", GEMMA, True,
        {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 20,
         "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3Text", GEMMA, True,
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 6,
         "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "granite": (
        "Granite", LLAMA3, False,
        {"attention_multiplier": 0.3, "embedding_multiplier": 4.0, "logits_scaling": 0.5,
         "residual_multiplier": 0.7, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", INST, True, {"sliding_window": 48, "num_key_value_heads": 2}),
    "phi3": ("Phi3", CHATML, True, {"pad_token_id": 0, "sliding_window": 64}),
    "smollm3": ("SmolLM3", CHATML, False, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
}  # fmt: skip


def write_chat_model(
    directory: Path, architecture: str = "qwen2", words: Sequence[str] = (), seed: int = 0,
    **settings: Any,
) -> Path:  # fmt: skip
    """Write a small random decoder, float32, with its tokenizer, which knows `words` well."""
    import torch
    import transformers

    name, template, is_metaspace, own = ARCHITECTURES[architecture]
    tokenizer = _tokenizer(is_metaspace, words)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 4096,
        "vocab_size": len(fast), "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.15,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes | own | settings)
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = seeded(lambda: kind(config).float().eval(), seed)
    with torch.no_grad():  # so that norms and heads are told apart from none
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(seed)
                )
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def write_image_reader(directory: Path, architecture: str) -> Path:
    """Write a small random decoder with layers that read images: a "gemma3" or "mistral3"."""
    import torch
    import transformers

    text = "mistral" if architecture == "mistral3" else architecture
    settings = transformers.AutoConfig.from_pretrained(write_chat_model(directory, text)).to_dict()
    images = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        "model_type": "pixtral" if architecture == "mistral3" else "siglip_vision_model",
    }  # fmt: skip
    name = architecture.capitalize()
    config = getattr(transformers, f"{name}Config")(text_config=settings, vision_config=images)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = seeded(lambda: kind(config).float().eval(), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(parameter.mean().item(), 0.15)
    model.save_pretrained(directory)
    return directory


def _tokenizer(is_metaspace: bool, words: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    texts = [*sample_texts(60, max_words=80), *(text for text in words for _ in range(8))]
    settings = {"vocab_size": 700, "special_tokens": list(_CONTROLS), "show_progress": False}
    if is_metaspace:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
        settings["special_tokens"] += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**settings))
    return tokenizer
