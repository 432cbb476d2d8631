"""Tiny checkpoints have the published layouts, and load like downloads."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaTokenizer,
)

from gpuclassify.questions.template import parse_template
from tests.replicas import (
    ARCHITECTURES,
    FAMILIES,
    FAMILY_LABELS,
    category_config,
    education_config,
    safety_template,
    sample_texts,
    write_checkpoint,
    write_sequence_classifier,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CATEGORIES = ("domain", "multilingual-domain", "quality", "content-type")
EDUCATION = ("fineweb-edu", "fineweb-mixtral-edu", "fineweb-nemotron-edu")
TEXTS = sample_texts(50, seed=5)
ODD_TEXTS = [
    "",
    " lead  and trail ",
    "tab\tnew\nline\r\n\n  end",
    "e\u0301 \u00e9 Ωmega ﬁne",
    "☃ never seen 🦄",
    "[MASK] <mask> [SEP] <s> [PAD] <|endoftext|>",
    "``quoted'' it's - a_b",
]
TEMPLATE = parse_template(safety_template(), "the small prompt")
CODE = "O([1-9]|1[0-3])"
ANSWER = re.compile(rf"safe|unsafe\n{CODE}(,{CODE})*")
ADAPTERS = ("defensive", "permissive")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: write_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    root = tmp_path_factory.mktemp("architectures")
    return {name: write_sequence_classifier(root / name, name) for name in ARCHITECTURES}


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def digests(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.parametrize(
    ("family", "base_model", "size_bytes"),
    [
        ("domain", "microsoft/deberta-v3-base", 1607),
        ("multilingual-domain", "microsoft/mdeberta-v3-base", 1608),
        ("quality", "microsoft/deberta-v3-base", 281),
        ("content-type", "microsoft/deberta-v3-base", 799),
    ],
)
def test_category_config_has_the_published_size(family, base_model, size_bytes):
    text = category_config(FAMILY_LABELS[family], base_model)
    assert len(text.encode()) == size_bytes


def test_education_config_has_the_published_size():
    assert len(education_config().encode()) == 804


@pytest.mark.parametrize("family", CATEGORIES)
def test_category_config_holds_published_keys_and_no_sizes(checkpoints, family):
    labels = FAMILY_LABELS[family]
    assert read_json(checkpoints[family] / "config.json") == {
        "base_model": "backbone",
        "config_path": None,
        "fc_dropout": 0.2,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "model_type": "deberta-v2",
        "pretrained": True,
    }


@pytest.mark.parametrize("family", CATEGORIES)
def test_category_weights_have_the_published_keys_in_float32(checkpoints, family):
    layer = "model.encoder.layer.{}."
    modules = ["model.embeddings.LayerNorm", "model.encoder.LayerNorm", "fc"]
    for number in range(2):
        modules += [
            layer.format(number) + part
            for part in (
                "attention.self.query_proj",
                "attention.self.key_proj",
                "attention.self.value_proj",
                "attention.output.dense",
                "attention.output.LayerNorm",
                "intermediate.dense",
                "output.dense",
                "output.LayerNorm",
            )
        ]
    keys = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    keys |= {"model.embeddings.word_embeddings.weight", "model.encoder.rel_embeddings.weight"}
    weights = load_file(checkpoints[family] / "model.safetensors")
    config = read_json(checkpoints[family] / "backbone" / "config.json")
    assert set(weights) == keys
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert weights["fc.weight"].shape == (len(FAMILY_LABELS[family]), config["hidden_size"])
    assert weights["model.encoder.rel_embeddings.weight"].shape[0] == 2 * config["position_buckets"]
    with safe_open(checkpoints[family] / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("family", CATEGORIES)
def test_category_tokenizer_has_the_published_files_and_ids(checkpoints, family):
    directory = checkpoints[family]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    size = len(tokenizer)
    tokens = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(tokens) == [0, 1, 2, 3, size - 1]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 3)
    assert (tokenizer.mask_token_id, tokenizer.padding_side) == (size - 1, "right")
    assert read_json(directory / "added_tokens.json") == {"[MASK]": size - 1}
    assert (directory / "special_tokens_map.json").stat().st_size == 286
    config = read_json(directory / "tokenizer_config.json")
    assert config["tokenizer_class"] == "DebertaV2Tokenizer"
    longest = 1024 if family in ("quality", "content-type") else 512
    assert config["model_max_length"] == tokenizer.model_max_length == longest
    ids = tokenizer("river valley")["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert 300 <= size <= 2000


@pytest.mark.parametrize("family", EDUCATION)
def test_education_tokenizer_has_the_published_files_and_ids(checkpoints, family):
    directory = checkpoints[family]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(tokens) == [0, 100, 101, 102, 103]
    assert tokenizer("River VALLEY")["input_ids"] == tokenizer("river valley")["input_ids"]
    assert tokenizer.model_max_length == 512
    assert (directory / "special_tokens_map.json").stat().st_size == 695
    vocabulary = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == vocabulary
    assert not (directory / "added_tokens.json").exists()


@pytest.mark.parametrize("family", EDUCATION)
def test_education_checkpoint_loads_whole_and_spreads_its_scores(checkpoints, family):
    directory = checkpoints[family]
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(loading.values())
    keys = set(load_file(directory / "model.safetensors"))
    assert {"bert.embeddings.position_embeddings.weight", "bert.pooler.dense.weight"} <= keys
    assert {key for key in keys if not key.startswith("bert.")} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert (model.config.problem_type, model.config.num_labels) == ("regression", 1)
    batch = AutoTokenizer.from_pretrained(directory)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits.squeeze(-1)
    assert -4 < scores.min() < 1 and 4 < scores.max() < 9
    assert 10 <= (scores >= 2.5).sum() <= 40
    assert len(scores.round(decimals=3).unique()) == len(TEXTS)


@pytest.mark.parametrize("name", [*FAMILIES, *ARCHITECTURES])
def test_transformers_tokenizer_equals_the_raw_one(request, name):
    fixture = "checkpoints" if name in FAMILIES else "classifiers"
    directory = request.getfixturevalue(fixture)[name]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    raw = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.is_fast
    texts = [*TEXTS, *ODD_TEXTS]
    assert tokenizer(texts)["input_ids"] == [raw.encode(text).ids for text in texts]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_loads_whole_and_answers_variedly(classifiers, architecture):
    directory = classifiers[architecture]
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(loading.values())
    assert model.config.model_type == architecture
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    assert model.config.vocab_size == len(tokenizer)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
        alone = [model(**tokenizer([text], return_tensors="pt")).logits for text in TEXTS]
    assert (tuple(logits.shape), logits.dtype) == ((len(TEXTS), 3), torch.float32)
    assert len(logits.argmax(dim=1).unique()) == 3
    assert 0.7 < logits.std() < 3
    torch.testing.assert_close(torch.cat(alone), logits, atol=1e-4, rtol=1e-4)


def test_same_arguments_give_the_same_bytes_in_another_process(tmp_path, checkpoints):
    families = ["domain", "fineweb-edu"]
    script = (
        "import sys, torch; torch.rand(3); from tests.replicas import write_checkpoint; "
        "[write_checkpoint(f'{sys.argv[1]}/{family}', family) for family in sys.argv[2:]]"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path), *families]
    subprocess.run(command, check=True, env=environment)
    for family in families:
        assert digests(tmp_path / family) == digests(checkpoints[family])


@pytest.fixture(scope="module")
def tokenizer(safety_models):
    return AutoTokenizer.from_pretrained(safety_models.base)


def decoder(models, adapter=None):
    base = AutoModelForCausalLM.from_pretrained(models.base, local_files_only=True)
    return (PeftModel.from_pretrained(base, getattr(models, adapter)) if adapter else base).eval()


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_the_decoder_is_configured_as_published(safety_models):
    config = read_json(safety_models.base / "config.json")
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
    generation = read_json(safety_models.base / "generation_config.json")
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert "do_sample" not in generation and "pad_token_id" not in generation


def test_the_decoder_loads_whole_and_is_float32(safety_models):
    model, loading = AutoModelForCausalLM.from_pretrained(
        safety_models.base, output_loading_info=True
    )
    assert not any(loading.values())
    weights = load_file(safety_models.base / "model.safetensors")
    assert shapes(weights) == shapes(model.state_dict())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    with safe_open(safety_models.base / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_tokenizer_is_a_llama_tokenizer_with_bytes_for_the_rest(tokenizer, safety_models):
    assert isinstance(tokenizer, LlamaTokenizer) and tokenizer.is_fast
    assert tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<0x0A>"]) == [0, 1, 2, 13]
    assert (tokenizer.pad_token, tokenizer.unk_token_id) == (None, 0)
    assert tokenizer.model_max_length > 1e29
    assert tokenizer("river\n")["input_ids"] == [1, tokenizer.vocab["▁river"], 13]
    raw = Tokenizer.from_file(str(safety_models.base / "tokenizer.json"))
    assert raw.get_vocab_size() == len(tokenizer) == decoder(safety_models).config.vocab_size
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


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_has_the_layout_that_peft_writes(safety_models, adapter):
    config = read_json(getattr(safety_models, adapter) / "adapter_config.json")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    assert sorted(config["target_modules"]) == sorted(names)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.05)
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["bias"], config["use_rslora"], config["inference_mode"]) == ("none", False, True)
    assert config["base_model_name_or_path"].startswith("/")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    expected = get_peft_model_state_dict(
        get_peft_model(decoder(safety_models), settings), save_embedding_layers=False
    )
    tensors = load_file(getattr(safety_models, adapter) / "adapter_model.safetensors")
    assert shapes(tensors) == shapes(expected)
    assert "base_model.model.lm_head.lora_A.weight" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_answers_follow_the_grammar_and_vary(safety_models, tokenizer, adapter):
    model = decoder(safety_models, adapter)
    found = []
    for text in TEXTS[:30]:
        batch = tokenizer(TEMPLATE.head + text + TEMPLATE.tail, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**batch, max_new_tokens=30, do_sample=False, pad_token_id=0)
        new_ids = ids[0, batch["input_ids"].shape[1] :]
        found.append(tokenizer.decode(new_ids, skip_special_tokens=True).strip())
    grammatical = [answer for answer in found if ANSWER.fullmatch(answer)]
    assert len(grammatical) >= 0.9 * len(found)
    assert 0.4 <= found.count("safe") / len(found) <= 0.75
    assert len({answer.split(",")[0] for answer in grammatical}) >= 4


def test_guard_has_the_published_layout(safety_models):
    text = (safety_models.guard / "config.json").read_text()
    assert text == '{\n  "dropout": 0.7,\n  "input_dim": 64\n}'
    assert len(text.replace("64", "4096")) == 41  # bytes of the published file
    assert shapes(load_file(safety_models.guard / "model.safetensors")) == {
        "input_layer.weight": (64, 64),
        "input_layer.bias": (64,),
        "hidden_layer_0.weight": (2000, 64),
        "hidden_layer_0.bias": (2000,),
        "hidden_layer_1.weight": (500, 2000),
        "hidden_layer_1.bias": (500,),
        "hidden_layer_2.weight": (1, 500),
        "hidden_layer_2.bias": (1,),
    }
