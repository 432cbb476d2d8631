"""Tiny decoders and adapters, and what plain transformers and peft make of them.

Nothing here uses gpuclassify, so that agreement with it is evidence.
"""

import functools

import torch
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

logging.disable_progress_bar()

VOCABULARY = 64
BOS, EOS = 1, 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def write_decoder(directory, key_heads=2, **settings):
    """A random Llama with a tokenizer whose tokens are the words ``w3`` to ``w63``."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    config = LlamaConfig(
        num_key_value_heads=key_heads,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **sizes | settings,
    )
    torch.manual_seed(key_heads)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[EOS] *= 1.5  # so that a good part of the answers end
    model.save_pretrained(directory)
    words = {"<unk>": 0, "<s>": BOS, "</s>": EOS} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory


def write_adapter(directory, base, seed, targets=TARGETS, **settings):
    """A random LoRA adapter for the decoder in `base`."""
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.05,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path="/a/trainer/of/long/ago",
        **settings,
    )
    model = PeftModel(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory, save_embedding_layers=False)
    return directory


@functools.cache
def oracle(base, adapter, dtype=torch.float32):
    """The decoder in `base` with an adapter of its own, by peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).eval()


def greedy(model, prompt, max_new_tokens):
    """The tokens that ``generate`` puts after one prompt, of which nothing is padding."""
    ids = torch.tensor([[int(token) for token in prompt]])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    return output[0, ids.shape[1] :].tolist()


def text_of(tokens):
    """What the tokenizer makes of new tokens."""
    return " ".join(f"w{token}" for token in tokens if token > EOS)
