"""Tiny safety models have the published layouts, load like downloads and answer variedly."""

import hashlib
import json
import re
import textwrap
from collections import Counter

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import linear, normalize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer
from transformers.utils import logging

from gpuclassify.questions.template import parse_template
from tests.replicas import safety_template, sample_texts, write_safety_models

pytestmark = pytest.mark.usefixtures("one_torch_thread")
logging.disable_progress_bar()

TEXTS = sample_texts(30, seed=5)
TEMPLATE = parse_template(safety_template(), "the small prompt")
CODE = "O([1-9]|1[0-3])"
ANSWER = re.compile(rf"safe|unsafe\n{CODE}(,{CODE})*")
ADAPTERS = ("defensive", "permissive")


@pytest.fixture(scope="module")
def models(safety_models):
    return safety_models


@pytest.fixture(scope="module")
def tokenizer(models):
    return AutoTokenizer.from_pretrained(models.base)


@pytest.fixture(scope="module")
def answers(models, tokenizer):
    """What plain transformers and peft answer to whole prompts, by adapter."""
    found = {}
    for name in (*ADAPTERS, None):
        model = decoder(models, name)
        found[name] = [answer(model, tokenizer, text) for text in TEXTS]
    return found


def decoder(models, adapter=None):
    base = AutoModelForCausalLM.from_pretrained(models.base, local_files_only=True)
    return (PeftModel.from_pretrained(base, getattr(models, adapter)) if adapter else base).eval()


def answer(model, tokenizer, text, max_new_tokens=30, template=TEMPLATE):
    batch = tokenizer(template.head + text + template.tail, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(
            **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
    new_ids = ids[0, batch["input_ids"].shape[1] :]
    return tokenizer.decode(new_ids, skip_special_tokens=True).strip()


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def digests(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_each_model_has_the_published_files(models):
    parent = models.base.parent
    assert [path.name for path in vars(models).values()] == ["base", *ADAPTERS, "guard"]
    files = {str(path.relative_to(parent)) for path in parent.rglob("*") if path.is_file()}
    decoder_files = "config.json generation_config.json model.safetensors special_tokens_map.json "
    decoder_files += "tokenizer.json tokenizer_config.json"
    adapter_files = "README.md adapter_config.json adapter_model.safetensors"
    assert files == {
        *(f"base/{name}" for name in decoder_files.split()),
        *(f"{adapter}/{name}" for adapter in ADAPTERS for name in adapter_files.split()),
        *(f"guard/{name}" for name in ("README.md", "config.json", "model.safetensors")),
    }


def test_the_decoder_is_configured_as_published(models):
    config = read_json(models.base / "config.json")
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    small = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    assert {key: config[key] for key in (*published, *small, *heads)} == published | small | heads
    others = "initializer_range pretraining_tp rope_scaling torch_dtype transformers_version"
    others = {*others.split(), "use_cache", "vocab_size"}
    assert set(config) == {*published, *small, *heads, *others}
    generation = read_json(models.base / "generation_config.json")
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert "do_sample" not in generation and "pad_token_id" not in generation


def test_the_decoder_loads_whole_and_is_float32(models):
    model, loading = AutoModelForCausalLM.from_pretrained(models.base, output_loading_info=True)
    assert not any(loading.values())
    weights = load_file(models.base / "model.safetensors")
    assert shapes(weights) == shapes(model.state_dict())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    with safe_open(models.base / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_tokenizer_is_a_llama_tokenizer_with_bytes_for_the_rest(tokenizer, models):
    assert isinstance(tokenizer, LlamaTokenizer) and tokenizer.is_fast
    assert tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<0x0A>"]) == [0, 1, 2, 13]
    assert (tokenizer.pad_token, tokenizer.unk_token_id) == (None, 0)
    assert tokenizer.model_max_length > 1e29
    assert tokenizer("river\n")["input_ids"] == [1, tokenizer.vocab["▁river"], 13]
    raw = Tokenizer.from_file(str(models.base / "tokenizer.json"))
    assert raw.get_vocab_size() == len(tokenizer) == decoder(models).config.vocab_size
    for text in [
        *TEXTS,
        "",
        " lead  and trail ",
        "tab\tnew\r\n\n  end",
        "☃ 🦄",
        "<s> x </s>",
        "e\u0301",
    ]:
        ids = tokenizer(text)["input_ids"]
        assert ids == raw.encode(text).ids and ids[0] == 1
    for text in [*TEXTS, "☃ never seen 🦄", "a\n\n    b"]:
        ids = tokenizer(text)["input_ids"]
        assert 0 not in ids and tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_document_merges_with_the_space_before_it(tokenizer):
    ids = tokenizer(TEMPLATE.head + "river" + TEMPLATE.tail)["input_ids"]
    apart = [tokenizer(part)["input_ids"][1:] for part in (TEMPLATE.head, "river")]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens.count("▁river") == 1
    assert ids[1 : 1 + len(apart[0])] != apart[0]
    for start in ("  river", "\nriver", ", river"):
        assert tokenizer(TEMPLATE.head + start)["input_ids"] != [
            *tokenizer(TEMPLATE.head)["input_ids"],
            *tokenizer(start)["input_ids"][1:],
        ]


def test_the_small_prompt_outweighs_a_short_document(tokenizer):
    assert TEMPLATE.text == safety_template()
    assert 150 <= len(tokenizer(TEMPLATE.text)["input_ids"]) <= 250
    assert len(tokenizer(TEMPLATE.tail)["input_ids"]) > 30


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_model_card_of_an_adapter_holds_the_prompt(models, adapter):
    card = (getattr(models, adapter) / "README.md").read_text(encoding="utf-8")
    assert parse_template(card, "the card") == TEMPLATE
    assert safety_template() not in card  # a placeholder shows where the document goes


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_has_the_layout_that_peft_writes(models, adapter):
    config = read_json(getattr(models, adapter) / "adapter_config.json")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    assert sorted(config["target_modules"]) == sorted(names)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.05)
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["bias"], config["use_rslora"], config["inference_mode"]) == ("none", False, True)
    assert config["base_model_name_or_path"].startswith("/")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    expected = get_peft_model_state_dict(
        get_peft_model(decoder(models), settings), save_embedding_layers=False
    )
    tensors = load_file(getattr(models, adapter) / "adapter_model.safetensors")
    assert shapes(tensors) == shapes(expected)
    assert "base_model.model.lm_head.lora_A.weight" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_answers_follow_the_grammar_and_vary(answers, adapter):
    given = answers[adapter]
    grammatical = [answer for answer in given if ANSWER.fullmatch(answer)]
    assert len(grammatical) >= 0.9 * len(TEXTS)
    assert 0.4 <= given.count("safe") / len(TEXTS) <= 0.75
    assert len({text.split(",")[0] for text in grammatical}) >= 4
    assert sum("," in text for text in grammatical) >= 1
    assert Counter(given).most_common(2)[1][1] >= 2


def test_adapters_change_answers(answers):
    for name in ("permissive", None):
        pairs = zip(answers["defensive"], answers[name], strict=True)
        assert sum(one != other for one, other in pairs) >= 6


def test_answers_end_by_themselves(models, tokenizer):
    model = decoder(models, "defensive")
    long_texts = sample_texts(4, seed=9, min_words=300, max_words=500)
    for text in [*TEXTS[:4], *long_texts]:
        assert answer(model, tokenizer, text, 12) == answer(model, tokenizer, text, 40)


def test_another_prompt_may_be_given(tmp_path):
    longer = re.sub(r"(O\d+:)", rf"\1 {sample_texts(1, min_words=20)[0]}", safety_template())
    models = write_safety_models(tmp_path / "m", template=longer)
    template = parse_template(longer, "the longer prompt")
    for adapter in ADAPTERS:
        card = (getattr(models, adapter) / "README.md").read_text(encoding="utf-8")
        assert parse_template(card, "the card") == template
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    assert len(tokenizer(longer)["input_ids"]) > 500
    model = decoder(models, "defensive")
    given = [answer(model, tokenizer, text, template=template) for text in TEXTS[:15]]
    grammatical = [text for text in given if ANSWER.fullmatch(text)]
    assert len(grammatical) >= 0.9 * len(given)
    assert 0.3 <= given.count("safe") / len(given) <= 0.8
    assert len({text.split(",")[0] for text in grammatical}) >= 3


def guard_score(models, model, tokenizer, text):
    """The published formula, in plain torch."""
    batch = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[-1]
    weights = load_file(models.guard / "model.safetensors")
    vector = normalize(states[:, -1].float(), dim=-1)
    for name in ("input_layer", "hidden_layer_0", "hidden_layer_1"):
        vector = linear(vector, weights[f"{name}.weight"], weights[f"{name}.bias"]).relu()
    name = "hidden_layer_2"
    return linear(vector, weights[f"{name}.weight"], weights[f"{name}.bias"]).sigmoid().item()


def test_guard_has_the_published_layout(models):
    text = (models.guard / "config.json").read_text()
    assert text == '{\n  "dropout": 0.7,\n  "input_dim": 64\n}'
    assert len(text.replace("64", "4096")) == 41  # bytes of the published file
    assert shapes(load_file(models.guard / "model.safetensors")) == {
        "input_layer.weight": (64, 64),
        "input_layer.bias": (64,),
        "hidden_layer_0.weight": (2000, 64),
        "hidden_layer_0.bias": (2000,),
        "hidden_layer_1.weight": (500, 2000),
        "hidden_layer_1.bias": (500,),
        "hidden_layer_2.weight": (1, 500),
        "hidden_layer_2.bias": (1,),
    }


def test_guard_scores_lie_on_both_sides_of_one_half(models, tokenizer):
    model = decoder(models, "defensive")
    scores = torch.tensor([guard_score(models, model, tokenizer, text) for text in TEXTS])
    assert 6 <= (scores >= 0.5).sum() <= 24
    assert scores.std() > 0.15 and scores.max() - scores.min() > 0.6
    assert len(scores.round(decimals=3).unique()) >= 24


SCRIPT = """
    import sys, torch
    torch.rand(3)
    from tests.replicas import write_safety_models
    models = write_safety_models(sys.argv[1])
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from peft import PeftModel
    AutoTokenizer.from_pretrained(models.base)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models.base), models.permissive)
"""


def test_same_arguments_give_the_same_bytes_in_another_process_without_a_network(
    models, tmp_path, run_python
):
    code = textwrap.dedent(SCRIPT).replace("sys.argv[1]", repr(str(tmp_path / "m")))
    one_thread = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    run_python(code, HF_HUB_OFFLINE="1", PYTHONHASHSEED="7", **one_thread)
    assert digests(tmp_path / "m") == digests(models.base.parent)


def test_seed_changes_all_weights_and_leaves_tokenizer_and_random_state(models, tmp_path):
    first = digests(models.base.parent)
    torch.manual_seed(3)
    other = digests(write_safety_models(tmp_path / "m", seed=1).base.parent)
    assert {name for name in first if first[name] != other[name]} == {
        "base/model.safetensors",
        "defensive/adapter_model.safetensors",
        "permissive/adapter_model.safetensors",
        "guard/model.safetensors",
    }
    found = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), found), "the caller's random state is as it was"


def test_sizes_and_texts_are_the_callers(tmp_path):
    texts = ["zebrafish wriggle past zebrafish", "quince jam", "a quince and a zebrafish"] * 5
    models = write_safety_models(
        tmp_path / "m",
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        rank=2,
        max_positions=512,
        texts=texts,
    )
    model = decoder(models, "permissive")
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (48, 3)
    assert (model.config.num_attention_heads, model.config.max_position_embeddings) == (6, 512)
    assert model.peft_config["default"].r == 2 and model.peft_config["default"].lora_alpha == 4
    assert read_json(models.guard / "config.json")["input_dim"] == 48
    tokenizer = AutoTokenizer.from_pretrained(models.base)
    assert tokenizer.tokenize("zebrafish") == ["▁zebrafish"]
    given = [answer(model, tokenizer, text) for text in TEXTS[:15]]
    assert sum(ANSWER.fullmatch(text) is not None for text in given) >= 0.7 * len(given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "hidden_size=64, num_heads=5: .* a multiple of 10"),
        ({"texts": [" "]}, "texts holds no words"),
        ({"template": ""}, "passed as template= holds no complete safety prompt"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_safety_models(tmp_path / "m", **arguments)
    assert not (tmp_path / "m").exists()


def test_a_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not empty"):
        write_safety_models(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
