"""Tiny checkpoints have the published layouts, load like downloads and answer variedly."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaV2Model,
)

from tests.replicas import (
    ARCHITECTURES,
    FAMILIES,
    FAMILY_LABELS,
    category_config,
    education_config,
    sample_texts,
    write_checkpoint,
    write_sequence_classifier,
)

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


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def category_outputs(directory, texts):
    """Hidden states and logits at [CLS] by the classes that the published code uses."""
    config = read_json(directory / "config.json")
    backbone = DebertaV2Model(AutoConfig.from_pretrained(directory / config["base_model"])).eval()
    weights = load_file(directory / "model.safetensors")
    own = {key[len("model.") :]: value for key, value in weights.items() if key[:6] == "model."}
    backbone.load_state_dict(own, strict=True)
    batch = AutoTokenizer.from_pretrained(directory)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = backbone(**batch).last_hidden_state[:, 0]
    return hidden, hidden @ weights["fc.weight"].T + weights["fc.bias"]


def test_importing_loads_no_framework():
    probe = (
        "import os, sys; before = dict(os.environ); import tests.replicas; "
        "assert before == dict(os.environ); "
        "assert not {'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


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


def test_published_labels_are_counted_and_alphabetical():
    assert len(FAMILY_LABELS["domain"]) == 26
    assert list(FAMILY_LABELS["domain"]) == sorted(FAMILY_LABELS["domain"])
    assert FAMILY_LABELS["quality"] == ("High", "Medium", "Low")
    assert len(FAMILY_LABELS["content-type"]) == 11


@pytest.mark.parametrize("family", CATEGORIES)
def test_backbone_config_matches_the_published_fields(checkpoints, family):
    config = read_json(checkpoints[family] / "backbone" / "config.json")
    expected = {
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": 512,
        "max_relative_positions": -1,
        "model_type": "deberta-v2",
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["position_buckets"] > 0
    assert config["vocab_size"] == len(AutoTokenizer.from_pretrained(checkpoints[family]))


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


@pytest.mark.parametrize("family", CATEGORIES)
def test_category_outputs_are_ordinary_and_varied(checkpoints, family):
    hidden, logits = category_outputs(checkpoints[family], TEXTS)
    assert 0.5 < hidden.std() < 2
    assert 0.7 < logits.std() < 3 and logits.abs().max() < 12
    wanted = {3: 3, 11: 6, 26: 8}[logits.shape[1]]
    assert len(logits.argmax(dim=1).unique()) >= wanted
    assert (torch.pdist(logits) > 1e-2).all()


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


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "gpt2", "deberta-v2"])
def test_longest_input_of_the_tokenizer_fits_the_model(classifiers, architecture):
    directory = classifiers[architecture]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    batch = tokenizer("word " * 2000, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] == tokenizer.model_max_length == 512
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        assert torch.isfinite(model(**batch).logits).all()


def test_padding_side_is_written_and_leaves_a_decoder_its_scores(tmp_path):
    logits = {}
    for side in ("left", "right"):
        directory = write_sequence_classifier(tmp_path / side, "llama", padding_side=side)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer.padding_side == side
        batch = tokenizer(["river", "river valley storm"], padding=True, return_tensors="pt")
        padded = batch["attention_mask"][0] == 0
        assert padded[0 if side == "left" else -1] and not padded.all()
        model = AutoModelForSequenceClassification.from_pretrained(directory)
        with torch.no_grad():
            logits[side] = model(**batch).logits
    torch.testing.assert_close(logits["left"], logits["right"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        (None, ["no", "yes"]),
        ("single_label_classification", ["a", "b", "c", "d"]),
        ("multi_label_classification", ["toxic", "rude"]),
        ("regression", ["score"]),
    ],
)
def test_problem_type_and_labels_reach_the_config(tmp_path, problem_type, labels):
    directory = write_sequence_classifier(tmp_path / "m", problem_type=problem_type, labels=labels)
    config = AutoConfig.from_pretrained(directory)
    assert config.problem_type == problem_type
    assert config.id2label == dict(enumerate(labels))
    assert config.label2id == {label: number for number, label in enumerate(labels)}


def test_regression_of_any_architecture_is_centred_between_the_grades(tmp_path):
    directory = write_sequence_classifier(
        tmp_path / "m", "roberta", num_labels=1, problem_type="regression"
    )
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    batch = AutoTokenizer.from_pretrained(directory)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits
    assert 1.5 < scores.mean() < 3.5 and scores.std() > 0.7


def test_config_overrides_reach_the_model(tmp_path):
    directory = write_sequence_classifier(
        tmp_path / "m", "bert", num_hidden_layers=3, max_position_embeddings=64
    )
    model = AutoModel.from_pretrained(directory)
    assert len(model.encoder.layer) == 3
    assert AutoTokenizer.from_pretrained(directory).model_max_length == 64


@pytest.mark.parametrize("family", ["domain", "fineweb-edu"])
def test_sizes_and_positions_are_the_callers(tmp_path, family):
    directory = write_checkpoint(
        tmp_path / "m", family, hidden_size=48, num_layers=3, num_heads=6, max_positions=64
    )
    config = AutoConfig.from_pretrained(
        directory if family in EDUCATION else directory / "backbone"
    )
    assert (config.hidden_size, config.num_hidden_layers) == (48, 3)
    assert (config.num_attention_heads, config.max_position_embeddings) == (6, 64)
    assert AutoTokenizer.from_pretrained(directory).model_max_length == 64


def test_labels_replace_the_published_ones(tmp_path):
    directory = write_checkpoint(tmp_path / "m", "quality", labels=["good", "bad"])
    _, logits = category_outputs(directory, TEXTS)
    assert logits.shape == (50, 2)
    assert read_json(directory / "config.json")["id2label"] == {"0": "good", "1": "bad"}


def test_tokenizer_is_trained_on_the_texts_given(tmp_path, checkpoints):
    texts = ["zebrafish wriggle past zebrafish", "quince jam", "a quince and a zebrafish"] * 5
    directory = write_checkpoint(tmp_path / "m", texts=texts)
    own = AutoTokenizer.from_pretrained(directory)
    assert own.tokenize("zebrafish") == ["▁zebrafish"]
    default = AutoTokenizer.from_pretrained(checkpoints["domain"])
    assert len(default.tokenize("zebrafish")) > 1


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


@pytest.mark.parametrize("architecture", ["xlm-roberta", "gpt2"])
def test_same_arguments_give_the_same_classifier(tmp_path, classifiers, architecture):
    again = write_sequence_classifier(tmp_path / "m", architecture)
    assert digests(again) == digests(classifiers[architecture])


def test_seed_changes_weights_and_leaves_the_tokenizer(tmp_path, checkpoints):
    other = digests(write_checkpoint(tmp_path / "m", "domain", seed=1))
    first = digests(checkpoints["domain"])
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_families_of_one_layout_have_different_weights(checkpoints):
    files = {digests(directory)["model.safetensors"] for directory in checkpoints.values()}
    assert len(files) == len(FAMILIES)


def test_random_state_of_the_caller_is_untouched(tmp_path):
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(4), random.random()
    torch.manual_seed(3)
    random.seed(3)
    write_checkpoint(tmp_path / "a")
    write_sequence_classifier(tmp_path / "b")
    assert torch.equal(torch.rand(4), expected[0])
    assert random.random() == expected[1]


@pytest.mark.parametrize("write", [write_checkpoint, write_sequence_classifier])
def test_directory_that_holds_something_is_refused(tmp_path, write):
    (tmp_path / "note.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=r"not empty \(it holds 'note.txt'\)"):
        write(tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        write(tmp_path / "note.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


@pytest.mark.parametrize("write", [write_checkpoint, write_sequence_classifier])
def test_missing_and_empty_directories_are_filled_and_returned(tmp_path, write):
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "new" / "deep"):
        assert write(str(directory)) == directory
        assert (directory / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "domains"}, "unknown family 'domains': choose one of domain, multilingual"),
        ({"labels": ["a", "b", "a"]}, r"labels \['a'\] occur more than once"),
        ({"labels": []}, "at least one label"),
        ({"texts": [" "]}, "texts holds no words"),
        ({"family": "fineweb-edu", "labels": ["a", "b"]}, "one output, got 2 labels"),
    ],
)
def test_bad_checkpoint_arguments_are_named_and_nothing_is_written(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "m", **arguments)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "brt"}, "architecture='brt' is not known: choose one of 'bert'"),
        ({"padding_side": "both"}, "padding_side='both'.*'left', 'right'"),
        ({"problem_type": "ranking"}, "problem_type='ranking'.*'regression'"),
        ({"num_labels": 0}, "at least one label"),
    ],
)
def test_bad_classifier_arguments_are_named_and_nothing_is_written(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_sequence_classifier(tmp_path / "m", **arguments)
    assert not (tmp_path / "m").exists()


def test_sample_texts_repeat_by_seed_and_extend_by_count():
    assert sample_texts(20, seed=4) == sample_texts(40, seed=4)[:20]
    assert sample_texts(20, seed=4) != sample_texts(20, seed=5)
    assert sample_texts(0) == []


@pytest.mark.parametrize("bounds", [(1, 120), (1, 1), (7, 7), (50, 400)])
def test_sample_texts_keep_to_the_word_bounds(bounds):
    lengths = [
        len(text.split()) for text in sample_texts(200, min_words=bounds[0], max_words=bounds[1])
    ]
    assert bounds[0] <= min(lengths) <= max(lengths) <= bounds[1]
    if bounds[0] < bounds[1]:
        assert min(lengths) < 1.3 * bounds[0] and max(lengths) > 0.8 * bounds[1]


def test_sample_texts_hold_many_scripts_and_line_breaks():
    joined = "".join(sample_texts(200))
    assert set("é京한🚀\u200d\n,?") <= set(joined)
    assert len(set(sample_texts(200))) > 180


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5)])
def test_impossible_word_bounds_are_refused(low, high):
    with pytest.raises(ValueError, match=f"min_words={low}, max_words={high}"):
        sample_texts(3, min_words=low, max_words=high)
