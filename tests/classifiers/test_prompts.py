"""The prompt classifier against its published rules, written out with plain torch and Python."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from gpuclassify import DistributedDataClassifier, DomainClassifier, PromptTaskComplexityClassifier
from gpuclassify.models.checkpoint import CheckpointError
from tests.loaders import LOADERS
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts, write_checkpoint

ORDER = [
    "prompt_complexity_score", "task_type_1", "task_type_2", "task_type_prob", "creativity_scope",
    "reasoning", "contextual_knowledge", "number_of_few_shots", "domain_knowledge",
    "no_label_reason", "constraint_ct",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("prompts") / "m", "prompt-task-complexity")


@pytest.fixture(scope="module")
def texts():
    return [*sample_texts(40), ""]


def by_hand(directory, text):
    """One document through the published model, rounded at the published places."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    backbone = _backbone(directory / config["base_model"], tensors)
    inputs = plain_tokenizer(directory)(text, truncation=True, max_length=512, return_tensors="pt")
    with torch.no_grad():
        states = backbone(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state[0]
    pooled = states.mean(dim=0)
    logits = {
        name: tensors[f"head_{i}.fc.weight"] @ pooled + tensors[f"head_{i}.fc.bias"]
        for i, name in enumerate(config["target_sizes"])
    }
    task = torch.softmax(logits["task_type"], 0)
    first, second = torch.topk(logits["task_type"], 2).indices.tolist()
    row = {
        "task_type_1": config["task_type_map"][str(first)],
        "task_type_2": config["task_type_map"][str(second)],
        "task_type_prob": round(task[first].item(), 3),
    }
    if round(task[second].item(), 3) < 0.1:
        row["task_type_2"] = "NA"
    for name in ORDER[4:]:
        probabilities = torch.softmax(logits[name], 0).double().numpy()
        value = float(probabilities @ np.array(config["weights_map"][name]))
        row[name] = round(value / config["divisor_map"][name], 4)
    if row["number_of_few_shots"] < 0.05:
        row["number_of_few_shots"] = 0
    row["prompt_complexity_score"] = round(
        0.35 * row["creativity_scope"] + 0.25 * row["reasoning"] + 0.15 * row["constraint_ct"]
        + 0.15 * row["domain_knowledge"] + 0.05 * row["contextual_knowledge"]
        + 0.05 * row["number_of_few_shots"],
        5,
    )  # fmt: skip
    return row, (task[first] - task[second]).item()


def _backbone(directory, tensors):
    module = AutoModel.from_config(AutoConfig.from_pretrained(directory)).float().eval()
    kept = {k.removeprefix("backbone."): v for k, v in tensors.items() if k.startswith("backbone.")}
    module.load_state_dict(kept)
    return module


@pytest.mark.parametrize("loader", LOADERS)
def test_columns_are_the_published_rules(model, texts, loader):
    classifier = PromptTaskComplexityClassifier(model=model, autocast=False, loader=loader)
    found = classifier(pd.DataFrame({"text": texts}))
    assert list(found.columns) == ["text", *ORDER]
    assert found["task_type_1"].nunique() > 3
    assert (found["task_type_2"] == "NA").any()
    assert (found["task_type_2"] != "NA").any()
    for number, text in enumerate(texts):
        expected, margin = by_hand(model, text)
        row = found.iloc[number]
        if margin > 1e-4:
            assert row["task_type_1"] == expected["task_type_1"]
        # A value may fall on the other side of a rounding step, never further.
        assert row["task_type_prob"] == pytest.approx(expected["task_type_prob"], abs=1.1e-3)
        for name in ORDER[4:]:
            assert row[name] == pytest.approx(expected[name], abs=1.1e-4), name
        assert row[ORDER[0]] == pytest.approx(expected[ORDER[0]], abs=1.1e-4)
    assert (found["no_label_reason"] == 0).all()


def test_heads_follow_the_order_of_the_file(tmp_path, texts):
    model = write_checkpoint(tmp_path / "m", "prompt-task-complexity")
    path = model / "config.json"
    config = json.loads(path.read_text())
    sizes = config["target_sizes"]
    swapped = [
        "task_type",
        "creativity_scope",
        "contextual_knowledge",
        "reasoning",
        *list(sizes)[4:],
    ]
    frame = pd.DataFrame({"text": texts})
    before = PromptTaskComplexityClassifier(model=model, autocast=False)(frame)
    path.write_text(json.dumps(config | {"target_sizes": {name: sizes[name] for name in swapped}}))
    after = PromptTaskComplexityClassifier(model=model, autocast=False)(frame)
    assert before["reasoning"].tolist() == after["contextual_knowledge"].tolist()
    assert before["contextual_knowledge"].tolist() == after["reasoning"].tolist()


def test_wrong_checkpoints_and_filters_are_refused(tmp_path, model):
    frame = pd.DataFrame({"text": ["a"]})
    domain = write_checkpoint(tmp_path / "domain")
    with pytest.raises(CheckpointError, match="one head"):
        PromptTaskComplexityClassifier(model=domain)(frame)
    for other in (DomainClassifier, DistributedDataClassifier):
        with pytest.raises(CheckpointError, match="several heads"):
            other(model=model)(frame)
    with pytest.raises(TypeError, match="compare the columns"):
        PromptTaskComplexityClassifier(model=model, filter_by=["Chatbot"])
    broken = write_checkpoint(tmp_path / "broken", "prompt-task-complexity")
    config = json.loads((broken / "config.json").read_text())
    config["weights_map"]["reasoning"] = [1]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"2 weights in weights_map.*'reasoning'"):
        PromptTaskComplexityClassifier(model=broken)(frame)
