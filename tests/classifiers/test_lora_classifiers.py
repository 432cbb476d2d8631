"""LoRA text classifiers, of an adapter and a base model, give what peft gives."""

import contextlib
import dataclasses
import json
import shutil
import time

import numpy as np
import pandas as pd
import peft
import pytest
import torch
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, VeloraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gpuclassify import DistributedDataClassifier, hub
from gpuclassify.hub import ModelChangedError, ModelNotFoundError
from gpuclassify.models.adapters import LORA_APPLIED, LORA_REFUSED, LORA_WITHOUT_EFFECT
from gpuclassify.models.checkpoint import CheckpointError
from tests.oracle import assert_close, plain_tokenizer, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = sample_texts(6, seed=4, max_words=9)
FRAME = pd.DataFrame({"text": TEXTS})
TARGETS = {"bert": ["query", "value"], "roberta": ["query", "dense"], "llama": ["q_proj", "o_proj"]}
TARGETS |= {"modernbert": ["Wqkv"], "deberta-v2": ["query_proj"], "distilbert": ["q_lin"]}


@pytest.fixture
def base_of(sequence_classifier, tmp_path):
    """A base model, whose head is of another number of labels or not there at all."""

    def make(architecture, has_head):
        model = shutil.copytree(sequence_classifier(architecture), tmp_path / "base")
        if not has_head:
            path = model / "model.safetensors"
            config = json.loads((model / "config.json").read_text())
            tensors, head = load_file(path).items(), ("classifier.", "score.")
            kept = {name: tensor for name, tensor in tensors if not name.startswith(head)}
            save_file(kept, path, metadata={"format": "pt"})
            config = {name: own for name, own in config.items() if "label" not in name}
            (model / "config.json").write_text(json.dumps(config | {"architectures": ["X"]}))
        return model

    return make


def train(base, folder, count=4, modules=None, **settings):
    """Save an adapter with a head, all of whose numbers are random; the network that peft has."""
    torch.manual_seed(3)
    network = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=count, ignore_mismatched_sizes=True
    )
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, modules_to_save=modules, **settings)
    adapted = peft.get_peft_model(network, config)
    with torch.no_grad():
        for own in adapted.parameters():
            if own.requires_grad:
                own.copy_(torch.randn_like(own) * 0.3 if own.ndim > 1 else own + 0.1)
    adapted.save_pretrained(folder)
    again = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=count, ignore_mismatched_sizes=True
    )
    return peft.PeftModel.from_pretrained(again, folder).eval()


def expected(base, network):
    tokenizer = plain_tokenizer(base)
    with torch.no_grad():
        rows = [network(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    return torch.stack(rows).softmax(dim=1).numpy()


def classify(adapter, **options):
    made = DistributedDataClassifier(model=adapter, score_field="s", autocast=False, **options)
    return made(FRAME)


@pytest.mark.parametrize("has_head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("architecture", TARGETS)
def test_scores_are_those_of_peft(base_of, tmp_path, architecture, has_head):
    base, folder = base_of(architecture, has_head), tmp_path / "adapter"
    network = train(base, folder, target_modules=TARGETS[architecture])
    found = classify(folder, base_model=base, labels=["a", "b", "c", "d"])
    assert_close(stacked(found["s"]), expected(base, network))
    assert set(found["preds"]) <= {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "lora_alpha": 3},
        {"use_dora": True},
        {"bias": "lora_only"},
        {"modules": ["pooler", "classifier"]},
        {"rank_pattern": {"query": 2}, "alpha_pattern": {"query": 7}},
        # The first key that matches counts, whatever its prefix.
        {
            "rank_pattern": {r"layer\.0\..*": 2, "1.*query": 3, "query": 5, "y": 6},
            "alpha_pattern": {"^bert.*query": 7, "encoder.layer.1.output.dense": 2.5},
        },
        {"target_modules": r".*\.(?:query|(?:attention|x)\.output\.dense)"},
        {"target_modules": r"(?:.*?(?:layer).*?\bquery\b)|gone", "exclude_modules": ".*[1].*"},
        {"target_modules": "all-linear", "exclude_modules": "pooler.*"},
        {"target_modules": ".*3.*query", "layer_replication": [[0, 2], [0, 2]]},
        {"count": 3},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules": ["pooler", "classifier", "word_embeddings"]},
        {"layers_to_transform": [1], "layers_pattern": "layer"},
        {"exclude_modules": ["pooler.dense"]},
        {"layer_replication": [[0, 2], [0, 1]]},
        {"trainable_token_indices": {"word_embeddings": [5, 6, 7, 8, 9, 10]}},
        {"trainable_token_indices": {"word_embeddings": [5, 6]}},
        {"modules": ["classifier", "token_type_embeddings"]},
        {"count": 50},
        {"target_parameters": ["intermediate.dense.weight"], "target_modules": ["query"]},
        {"use_bdlora": BdLoraConfig(["dense"], ["query"], nblocks=2)},
        {"kasa_config": KasaConfig()},
        {"velora_config": VeloraConfig()},
        {"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0)},
        {"init_lora_weights": False},
    ],
    ids=str,
)
def test_ways_to_adapt_are_pefts(base_of, tmp_path, settings):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    network = train(base, folder, **{"target_modules": ["query", "dense"], **settings})
    found = classify(folder)  # which names its base
    assert_close(stacked(found["s"]), expected(base, network))
    assert found["preds"].str.startswith("LABEL_").all()


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("roberta", ["classifier"]),
        ("llama", ["score"]),
        ("distilbert", ["pre_classifier", "classifier"]),
        ("modernbert", ["head", "classifier"]),
    ],
)
def test_the_head_is_found_by_its_name(base_of, tmp_path, architecture, head, count):
    base, folder = base_of(architecture, has_head=True), tmp_path / "adapter"
    embeddings = {"roberta": "word_embeddings", "distilbert": "word_embeddings"}
    embeddings |= {"llama": "embed_tokens", "modernbert": "tok_embeddings"}
    network = train(
        base,
        folder,
        count,
        head,
        target_modules=TARGETS[architecture],
        trainable_token_indices={embeddings[architecture]: [5]},
    )
    assert_close(stacked(classify(folder)["s"]), expected(base, network))


HANGING = "((((a|b)+)+)+)+c"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_replication": [[0, 2]] * 50_000}, "layer_replication=.* at most 1,000 in all"),
        ({"layer_replication": [[0, 10**6]]}, "layer_replication=.* at most 1,000 in all"),
        ({"layer_replication": [[0, 9]]}, "does not fit the model"),
        ({"layer_replication": [3]}, "layer_replication=.* must be pairs"),
        ({"lora_alpha": 10**400}, r"adapter_config\.json.*beyond those of float64"),
        ({"lora_alpha": 10**300}, "lora_alpha=1000.* a number up to 1,000,000"),
        ({"lora_alpha": "16"}, "lora_alpha='16', which must be a number"),
        ({"r": 0}, "r=0, which must be a whole number"),
        ({"r": 2**40}, "r=1099511627776, which must be a whole number"),
        ({"rank_pattern": {"query": 2.5}}, "rank_pattern="),
        ({"rank_pattern": {f"n{n}": 2 for n in range(6_000)}}, "rank_pattern=.* at most 5,000"),
        ({"alpha_pattern": {f"n{n}": n for n in range(300)}}, "alpha_pattern=.* up to 200"),
        ({"alpha_pattern": ["query"]}, "alpha_pattern="),
        ({"target_modules": "(?=query).*"}, "target_modules .*linear time.*write the modules"),
        ({"rank_pattern": {r"(a)\1": 2}}, "rank_pattern .*linear time"),
        ({"modules_to_save": [HANGING]}, "modules_to_save=.* plain names"),
        ({"layers_pattern": HANGING, "layers_to_transform": [1]}, "layers_pattern=.* plain names"),
        ({"layers_to_transform": [[1]]}, "layers_to_transform="),
        ({"trainable_token_indices": {HANGING: [1]}}, "trainable_token_indices=.* plain names"),
        ({"target_modules": ["query"] * 6_000}, "target_modules=.* up to 5,000 names"),
        ({"target_modules": [7]}, "target_modules="),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_without_bounds_are_refused_at_the_call(base_of, tmp_path, changes, message):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"])
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        DistributedDataClassifier(model=folder).map_frame(FRAME)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_expressions_that_take_exponential_time_elsewhere_are_matched_at_once(
    base_of, tmp_path, field
):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"])
    slow = "((((.|..)+)+)+)+!"
    changes = {"rank_pattern": {slow: 2}} if field == "rank_pattern" else {field: f"query|{slow}"}
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    began = time.monotonic()
    with contextlib.suppress(CheckpointError):  # as target_modules match nothing, tensors are left
        classify(folder)
    assert time.monotonic() - began < 20


def test_an_adapter_runs_in_the_precision_that_is_asked_for(base_of, tmp_path):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    network = train(base, folder, target_modules=["query"])
    made = DistributedDataClassifier(model=folder, score_field="s", dtype="bfloat16")
    assert np.abs(stacked(made(FRAME)["s"]) - expected(base, network)).max() < 0.05


def test_a_tokenizer_beside_the_adapter_is_the_classifiers(base_of, tmp_path):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"])
    made = DistributedDataClassifier(model=folder)
    assert made.model.tokenizer_home.name == str(base)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    made = DistributedDataClassifier(model=folder)
    assert made.model.tokenizer_home.name == str(folder)


def test_a_base_that_changed_or_does_not_fit_is_refused(base_of, tmp_path, sequence_classifier):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"])
    with pytest.raises(CheckpointError, match=r"do not fit .*base_model|does not fit the model"):
        DistributedDataClassifier(model=folder, base_model=sequence_classifier("roberta")).prepare()
    with pytest.raises(ModelNotFoundError) as refusal:
        classify(folder, base_model=tmp_path / "nowhere")
    assert "base_model= takes" in "".join(refusal.value.__notes__)
    made = DistributedDataClassifier(model=folder)
    made(FRAME)
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    with pytest.raises(ModelChangedError, match="base"):
        made.map_frame(FRAME)


def test_an_adapter_beside_the_weights_of_its_base_is_refused(base_of, tmp_path):
    base = base_of("bert", has_head=True)
    train(base, base, target_modules=["query"])
    with pytest.raises(CheckpointError, match="an adapter beside its weights"):
        classify(base)


def test_every_field_of_pefts_configuration_is_known():
    kinds = [LORA_WITHOUT_EFFECT, LORA_APPLIED, set(LORA_REFUSED)]
    assert set().union(*kinds) >= {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert sum(map(len, kinds)) == len(set().union(*kinds))


def test_what_an_older_peft_would_leave_out_is_refused(base_of, tmp_path, monkeypatch):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"], use_dora=True)
    assert len(classify(folder)) == len(FRAME)

    make = peft.LoraConfig.from_peft_type

    def make_without(**settings):
        config = make(**settings)
        del config.use_dora
        return config

    monkeypatch.setattr(peft.LoraConfig, "from_peft_type", staticmethod(make_without))
    with pytest.raises(CheckpointError, match=r"\['use_dora'\]: upgrade peft"):
        classify(folder)


def test_the_revision_of_the_base_that_an_adapter_names_is_taken(base_of, tmp_path, monkeypatch):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"], revision="v2")
    classify(folder)  # a directory has no revisions
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text()) | {"base_model_name_or_path": "some/base"}
    path.write_text(json.dumps(settings))
    asked, resolve = [], hub.resolve

    def note(name, revision=None, **options):
        if str(name) != "some/base":
            return resolve(name, revision, **options)
        asked.append(revision)
        return resolve(base, **options)

    monkeypatch.setattr(hub, "resolve", note)
    classify(folder)
    assert set(asked) == {"v2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "pissa"}, "'pissa', which changed .* path_initial_model_for"),
        ({"init_lora_weights": "loftq"}, "'loftq', which changed"),
        ({"alora_invocation_tokens": [5, 6]}, r"tokens=\[5, 6\], which is not applied"),
        ({"of_the_future": {"mode": "sum"}}, "of_the_future=.* not known here: upgrade"),
        ({"task_type": "CAUSAL_LM"}, "task_type 'CAUSAL_LM'"),
        ({"task_type": None}, "task_type None"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ],
)
def test_other_adapters_are_refused_at_the_call(base_of, tmp_path, changes, message):
    base, folder = base_of("bert", has_head=True), tmp_path / "adapter"
    train(base, folder, target_modules=["query"])
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        classify(folder, base_model=base)
