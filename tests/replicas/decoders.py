"""Safety models in published layouts: a Llama decoder, two LoRA adapters to it, and a guard.

The random decoder gets a last layer with which it answers in the published grammar: ``safe``, or
``unsafe`` and on a second line one category code or several. Which of these depends on the
document, through the decoder's hidden states.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuclassify.classifiers.questions.safety_template import SafetyTemplate, parse_template
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
    """Directories: the decoder, two adapters with the prompt in their cards, and the guard."""

    base: Path
    defensive: Path
    permissive: Path
    guard: Path


def safety_template() -> str:
    """A short safety prompt, structured as the published one, for an empty document."""
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
    """Write small random models with the layouts of the published safety models, float32.

    After `template`, by default `safety_template`, and a document, the decoder with either adapter
    writes ``safe`` or ``unsafe`` and a line of category codes, in nearly all cases. The same
    arguments give the same bytes. `max_positions` bounds nothing: the decoder runs on.
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
    """The content of config.json in the layout of LlamaGuard."""
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


# The last layer.

_CODES = tuple(f"O{number}" for number in range(1, 14))
_ANSWERS = (
    "safe",
    *(f"unsafe\n{code}" for code in _CODES),
    *(f"unsafe\n{first},{second}" for first, second in itertools.product(_CODES, _CODES)),
)
_SAFE_SHARE = 0.6  # of the answers
_END_SHARE = 0.8  # of the codes after which an answer may end or go on
_GAP = 12.0  # between the logits of tokens that may follow and those of others
_SPREAD = 3.0  # of the logits among tokens that may follow
_VERDICT_SPREAD = 12.0  # the same for the first token, most of which the regression evens out


@dataclass
class _State:
    """A point of the grammar: what may follow, seen after many documents by one decoder."""

    tokens: list[int]
    hidden: Any  # (documents, hidden)
    addition: Any  # of the decoder's adapter to the last layer, (vocabulary, hidden)
    logits: Any  # wanted, (documents, vocabulary)


def fit_answers(
    decoders: Sequence[tuple[Any, Any]], tokenizer: Any, prompts: Sequence[str], seed: int
) -> Any:
    """Fit one last layer to several decoders, by ridge regression on whole prompts with answers.

    Each decoder comes with what its adapter adds to the last layer, (vocabulary, hidden), all in
    float64, so that the last bit of a matrix product does not outlive a rounding of the result.
    `seed` decides which documents get which answers. The weight is without the additions.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    size = (tokenizer.get_vocab_size(), decoders[0][0].config.hidden_size)
    directions = torch.randn(size, generator=generator, dtype=torch.float64)
    end_id = tokenizer.token_to_id("</s>")
    answers = [(*tokenizer.encode(a, add_special_tokens=False).ids, end_id) for a in _ANSWERS]
    states = []
    for decoder, addition in decoders:
        for following, hidden in _hidden_states(decoder, tokenizer, prompts, answers).items():
            tokens = list(following)
            spread = _VERDICT_SPREAD if answers[0][0] in tokens else _SPREAD
            logits = _wanted_logits(hidden, tokens, directions, spread)
            states.append(_State(tokens, hidden, addition, logits))
    # The regression evens out what documents differ by, so shares are set by what it reached.
    _set_shares(states, _ridge(states), {answers[0][0]: _SAFE_SHARE, end_id: _END_SHARE})
    return _ridge(states)


def _hidden_states(
    decoder: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Any]:
    """Hidden states before every token of some answers, by the tokens that may follow."""
    import torch
    from transformers import DynamicCache

    following = defaultdict(set)
    for answer in answers:
        for position, token in enumerate(answer):
            following[answer[:position]].add(token)
    collected = defaultdict(list)
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    shared = [column[0] for column in alike][:-1]  # run once: prompts may be long
    cache = DynamicCache(config=decoder.config)
    with torch.no_grad():
        decoder(torch.tensor([shared]), None, None, cache)  # a parameter that 5.24 renamed
    for number, ids in enumerate(rows):
        # One without a code, one with one and one with two, others after every prompt.
        chosen = [answers[0], answers[1 + number % 13], answers[14 + number * 5 % 169]]
        along = _along(decoder, copy.deepcopy(cache), ids[len(shared) :], chosen)
        for answer, states in zip(chosen, along, strict=True):
            for position, state in enumerate(states[: len(answer)]):
                collected[tuple(sorted(following[answer[:position]]))].append(state)
    return {tokens: torch.stack(collected[tokens]) for tokens in sorted(collected)}


def _along(
    decoder: Any, cache: Any, ids: list[int], answers: Sequence[tuple[int, ...]]
) -> Iterator[Any]:
    """For each answer the hidden states from the prompt's end on, float64 (tokens, hidden).

    The prompt is what `cache` has seen and `ids`.
    """
    import torch

    longest = max(map(len, answers))
    rows = torch.tensor([[*answer, *[0] * (longest - len(answer))] for answer in answers])
    with torch.no_grad():
        read = decoder(torch.tensor([ids]), None, None, cache)
        cache.batch_repeat_interleave(len(answers))
        written = decoder(rows, None, None, cache).last_hidden_state
    for row in written:
        yield torch.cat([read.last_hidden_state[0, -1:], row])


def _wanted_logits(hidden: Any, tokens: list[int], directions: Any, spread: float) -> Any:
    """Logits far apart between grammar and the rest, and spread by document within grammar."""

    wanted = 0.03 * hidden @ directions.T
    wanted[:, tokens] += _GAP
    if len(tokens) > 1:
        choices = (hidden - hidden.mean(0)) @ directions[tokens].T
        wanted[:, tokens] += choices * (spread / choices.std())
    return wanted


def _set_shares(states: Sequence[_State], head: Any, shares: dict[int, float]) -> None:
    """Shift the logits wanted for some tokens so that each wins in its share of documents."""
    import torch

    for state in states:
        reached = state.hidden @ (head + state.addition).T
        for token in shares.keys() & set(state.tokens):
            others = [other for other in state.tokens if other != token]
            if others:
                lead = reached[:, others].amax(1) - reached[:, token]
                state.logits[:, token] += torch.quantile(lead, shares[token])


def _ridge(states: Sequence[_State]) -> Any:
    """The last layer that comes closest to the logits wanted; every state counts the same."""
    import torch

    size = states[0].hidden.shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64)
    moment = torch.zeros(size, states[0].logits.shape[1], dtype=torch.float64)
    for state in states:
        gram += state.hidden.T @ state.hidden / len(state.hidden)
        missing = state.logits - state.hidden @ state.addition.T
        moment += state.hidden.T @ missing / len(state.hidden)
    gram += 1e-5 * gram.trace() / size * torch.eye(size, dtype=torch.float64)
    return torch.linalg.solve(gram, moment).T
