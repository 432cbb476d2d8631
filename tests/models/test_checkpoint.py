"""What a checkpoint declares is read as it is, and never guessed."""

import json
import math
import shutil

import pytest

from gpuclassify import hub
from gpuclassify.models.checkpoint import (
    KNOWN_BACKBONES,
    POOLED_HEADS,
    CheckpointError,
    labels_in_order,
    position_limit,
    read_checkpoint,
)
from gpuclassify.models.loading import check_tensors
from tests.replicas import FAMILY_LABELS, category_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def described(directory, **options):
    return read_checkpoint(hub.resolve(str(directory)), **options)


# Labels.


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": {"1": "b", "0": "a", "2": "c"}},
        {"label2id": {"c": 2, "a": 0, "b": 1}},
        {"id2label": {}, "label2id": {"c": 2, "a": 0, "b": 1}},
        {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"wrong": 0}},
    ],
)
def test_labels_come_in_id_order(config):
    assert labels_in_order(config, "name") == ("a", "b", "c")
    many = {"id2label": {str(i): f"label {i}" for i in (10, 9, *range(9), 11)}}
    assert labels_in_order(many, "name") == tuple(f"label {i}" for i in range(12))


@pytest.mark.parametrize(
    ("changes", "labels", "problem_type"),
    [
        ({"id2label": None, "label2id": None}, ("LABEL_0", "LABEL_1"), None),
        ({"id2label": None, "label2id": None, "num_labels": 1}, ("LABEL_0",), "regression"),
        ({"id2label": {"0": "spam"}, "label2id": {"spam": 0}}, ("spam",), "regression"),
    ],
)
def test_what_transformers_leaves_out_is_filled_as_it_does(
    sequence_classifier, tmp_path, changes, labels, problem_type
):
    model = shutil.copytree(sequence_classifier("bert"), tmp_path / "model")
    config = {**json.loads((model / "config.json").read_text()), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    config.pop("problem_type", None)
    (model / "config.json").write_text(json.dumps(config))
    found = described(model)
    assert found.labels == labels
    assert found.problem_type == (problem_type or "single_label_classification")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"0": "a", "2": "b"}, "must run from 0 to 1"),
        ({"0": "a", "00": "b"}, "must run from 0 to 1"),  # one number twice
        ({"0": "a", "\u00b2": "b"}, "must map whole numbers"),  # a superscript
        ({"0": "a", "\u0661": "b"}, "must map whole numbers"),  # a digit of another script
    ],
)
def test_ids_of_labels_that_are_not_0_to_n_are_refused(sequence_classifier, tmp_path, ids, message):
    model = shutil.copytree(sequence_classifier("bert"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"id2label": ids, "label2id": None}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        described(model)


def test_the_prompt_layout_has_its_heads_in_the_order_of_the_file(checkpoint):
    found = described(checkpoint("prompt-task-complexity"))
    assert found.layout == POOLED_HEADS
    assert found.labels == FAMILY_LABELS["prompt-task-complexity"]
    assert [size for _, size in found.heads] == [12, 3, 2, 2, 6, 4, 1, 2]
    assert found.output_count == 32
    check_tensors(found)


def test_a_first_head_that_does_not_fit_the_task_types_is_refused(tmp_path):
    config = {"target_sizes": {"task": 3, "scope": 3}, "task_type_map": {"0": "a", "1": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="2 labels, and its first head 3 outputs"):
        described(tmp_path)


def test_a_configuration_without_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(CheckpointError, match="neither a model_type nor a base_model"):
        described(tmp_path)


# Sizes of the backbone.


@pytest.mark.parametrize(
    "name",
    ["microsoft/deberta-v3-base", "microsoft/DeBERTa-v3-base", "microsoft/mdeberta-v3-base"],
)
def test_known_backbones_are_found_in_any_capitals_without_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(category_config(["a", "b"], base_model=name))
    sizes = described(tmp_path, cache_dir=str(tmp_path / "cache")).sizes
    assert sizes == KNOWN_BACKBONES[name.lower()]
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (768, 12)
    assert sizes["vocab_size"] == (251000 if "mdeberta" in name else 128100)


def test_the_published_tensors_fit_the_known_backbone(tmp_path):
    """The shapes that the published file of 735 MB has, from its documented layout."""
    (tmp_path / "config.json").write_text(
        category_config(FAMILY_LABELS["domain"], base_model="microsoft/deberta-v3-base")
    )
    from tests.models.test_loading import expected_shapes

    shapes = expected_shapes(described(tmp_path))
    assert shapes["model.embeddings.word_embeddings.weight"] == (128100, 768)
    assert shapes["model.encoder.rel_embeddings.weight"] == (512, 768)
    assert shapes["model.encoder.layer.11.output.dense.weight"] == (768, 3072)
    assert shapes["fc.weight"] == (26, 768)
    bytes_in_all = sum(4 * math.prod(shape) for shape in shapes.values())
    assert round(bytes_in_all / 1e6) == 735
    assert not any("pooler" in name or "position_embeddings" in name for name in shapes)


def test_base_model_is_read_beside_the_checkpoint_or_from_the_argument(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint("domain"), tmp_path / "model")
    inside = described(model)
    backbone = shutil.move(model / "backbone", tmp_path / "elsewhere")
    assert described(model, base_model=str(backbone)).sizes == inside.sizes
    (model / "config.json").write_text(
        category_config(FAMILY_LABELS["domain"], base_model=str(backbone))
    )
    assert described(model).sizes == inside.sizes
    check_tensors(described(model))


def test_a_directory_wins_over_a_known_backbone_of_the_same_name(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = tmp_path / "microsoft" / "deberta-v3-base"
    shutil.copytree(checkpoint("domain") / "backbone", local)
    (tmp_path / "config.json").write_text(
        category_config(["a"], base_model="microsoft/deberta-v3-base")
    )
    assert described(tmp_path).sizes["hidden_size"] == 32


def test_a_base_model_without_configuration_is_refused(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json.*pass base_model="):
        described(checkpoint("domain"), base_model=str(tmp_path))


def test_a_base_model_for_a_checkpoint_that_carries_its_sizes_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match=r"has its own sizes and tokenizer.*leave it out"):
        described(checkpoint("fineweb-edu"), base_model="microsoft/deberta-v3-base")


# Positions.


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, (512, True)),
        ({"model_type": "roberta", "max_position_embeddings": 514}, (512, True)),
        (
            {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1},
            (512, True),
        ),
        ({"model_type": "gpt2", "n_positions": 1024}, (1024, True)),
        (
            {"model_type": "llama", "max_position_embeddings": 2048, "rope_theta": 10000},
            (2048, False),
        ),
        (KNOWN_BACKBONES["microsoft/deberta-v3-base"], (None, False)),
        ({"model_type": "t5"}, (None, False)),
        (
            {"model_type": "t5", "n_positions": 512, "relative_attention_num_buckets": 32},
            (None, False),
        ),
        ({"model_type": "bloom", "seq_length": 2048}, (None, False)),
        ({"model_type": "xlnet"}, (None, False)),
        ({"model_type": "mpt", "max_seq_len": 1024, "n_positions": 300}, (1024, True)),
        ({"model_type": "mpt"}, (2048, True)),
        ({"model_type": "jamba", "max_position_embeddings": 514}, (514, False)),
        *(
            ({"model_type": kind, "max_position_embeddings": 514, "pad_token_id": 1}, (512, True))
            for kind in ("esm", "ibert", "layoutlmv3", "lilt", "luke", "markuplm", "xmod", "mpnet")
        ),
    ],
)
def test_position_limits(sizes, expected):
    assert position_limit(sizes) == expected
