"""Numbers that a foreign configuration states are refused before anything is made of them."""

import functools
import json
import re
import shutil
import time

import numpy as np
import pandas as pd
import pytest
from model2vec import StaticModel
from safetensors.numpy import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.sentence_transformer.modules import Dense
from tokenizers import Tokenizer

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    Embedder,
    Head,
    HeadClassifier,
    PromptClassifier,
)
from gpuclassify.hub.files import MOST_TEXT_BYTES
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.head_network import HeadNetwork
from tests.replicas.annotated import annotated_texts
from tests.replicas.chat_models import write_chat_model
from tests.replicas.writing import edit
from tests.sentence_oracle import quiet, save_sentence_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def nested(depth):
    return f', "more": {"[" * depth}{"]" * depth}'


@pytest.fixture
def stating(checkpoint, sequence_classifier, tmp_path):
    """A classifier of a model whose configuration states something else."""

    def stating(kind, text="", **sizes):
        folder = tmp_path / kind
        if kind == "decoder":
            write_chat_model(folder)
            mapper = PromptClassifier(model=folder, prompt="{text}", answers=["yes", "no"])
        elif kind == "published":
            shutil.copytree(checkpoint("domain"), folder)
            mapper = DomainClassifier(model=folder)
        else:
            shutil.copytree(sequence_classifier(kind), folder)
            mapper = DistributedDataClassifier(model=folder)
        path = folder / "config.json"
        config = json.loads(path.read_text()) | sizes
        if "num_labels" in sizes:
            del config["id2label"], config["label2id"]
        path.write_text(json.dumps(config)[:-1] + text + "}")
        return mapper

    return stating


@pytest.mark.parametrize(
    ("kind", "text", "sizes", "words"),
    [
        ("bert", "", {"num_labels": 500_000_000}, "states num_labels=500,000,000, and the weights"),
        ("bert", "", {"num_hidden_layers": 10**6}, "states num_hidden_layers=1,000,000"),
        ("distilbert", "", {"n_layers": 10**6}, "states n_layers=1,000,000"),
        ("gpt2", "", {"n_layer": 10**6}, "states n_layer=1,000,000"),
        ("decoder", "", {"num_hidden_layers": 10**6}, "states num_hidden_layers=1,000,000"),
        ("bert", nested(150), {}, "nested deeper than 100 levels"),
        ("bert", nested(900), {}, "nested deeper than 100 levels"),
        ("published", nested(900), {}, "nested deeper than 100 levels"),
        ("decoder", nested(100_000), {}, "nested deeper than 100 levels"),
    ],
)
def test_absurd_numbers_are_refused_in_a_moment(stating, kind, text, sizes, words):
    mapper, began = stating(kind, text, **sizes), time.process_time()
    with pytest.raises(ValueError, match=words):
        mapper(pd.DataFrame({"text": ["a river"]}))
    assert time.process_time() - began < 5


EVERY_KIND = {
    "bert": ["config.json"],
    "modernbert": ["config.json"],
    "cross-encoder": ["modules.json", "config_sentence_transformers.json"],
    "sentence": ["config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"],
    "static": ["config.json", "modules.json"],
    "head": ["config.json"],
    "trained": ["config.json", "training.json"],
    "decoder": ["config.json", "generation_config.json"],
}
EVERY_KIND["cross-encoder"] += ["sentence_bert_config.json", "config.json"]
EVERY_KIND["sentence"] += ["sentence_bert_config.json", "config_sentence_transformers.json"]
CONTENTS = {
    "nested": '{"more": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "integer": '{"more": 1' + "0" * 400 + "}",
    "float": '{"more": 1e400}',
    "number": "3",
    "cut": '{"more"',
    "bytes": b"\xff\xfe\x00",
    "large": b" " * (MOST_TEXT_BYTES + 1),
}


@pytest.fixture(scope="module")
def model_of(sequence_classifier, tmp_path_factory):
    """The directory of a tiny model by its kind, and a function that runs a copy of it."""

    @functools.cache
    def write(kind):
        folder = tmp_path_factory.mktemp("strangers") / kind
        bert = sequence_classifier("bert")
        if kind == "cross-encoder":
            with quiet():
                CrossEncoder(str(sequence_classifier("bert", num_labels=1)), device="cpu").save(
                    str(folder)
                )
        elif kind == "sentence":
            save_sentence_model(folder, bert, "mean", Dense(32, 8))
        elif kind == "static":
            backend = Tokenizer.from_file(str(bert / "tokenizer.json"))
            vectors = np.ones((backend.get_vocab_size(), 4), np.float32)
            StaticModel(vectors, backend).save_pretrained(folder)
        elif kind == "head":
            HeadNetwork(((np.ones((1, 32)), np.zeros(1)),), "regression", ("a",)).save(folder)
        elif kind == "trained":
            frame = annotated_texts(60)
            backbone = save_sentence_model(tmp_path_factory.mktemp("backbone") / "model", bert)
            Head.fit(frame, label_field="topic", backbone=backbone).save(folder)
        elif kind == "decoder":
            write_chat_model(folder)
            (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
        else:
            shutil.copytree(sequence_classifier(kind), folder)
        return folder

    return write


def run(kind, folder, backbone):
    frame = pd.DataFrame({"text": ["a river"], "other": ["a market"]})
    if kind == "trained":
        return Head.load(folder)
    mapper = {
        "sentence": lambda: Embedder(model=folder),
        "static": lambda: Embedder(model=folder),
        "head": lambda: HeadClassifier(heads={"a": folder}, backbone=backbone),
        "decoder": lambda: PromptClassifier(model=folder, prompt="{text}", answers=["a", "b"]),
        "cross-encoder": lambda: DistributedDataClassifier(
            model=folder, text_field=["text", "other"]
        ),
    }
    return mapper.get(kind, lambda: DistributedDataClassifier(model=folder))()(frame)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("kind", "file"), [(k, file) for k, of in EVERY_KIND.items() for file in of]
)
def test_a_file_that_is_no_json_of_a_model_is_refused_by_name(
    model_of, tmp_path, kind, file, content
):
    folder = shutil.copytree(model_of(kind), tmp_path / "model")
    assert (folder / file).exists()
    text = CONTENTS[content]
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError) as refusal:
        run(kind, folder, model_of("sentence"))
    assert file in str(refusal.value) and str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "file", "changes"),
    [
        ("bert", "config.json", {"hidden_size": "x"}),
        ("bert", "config.json", {"hidden_size": 10**30}),
        ("bert", "config.json", {"model_type": ["bert"]}),
        ("bert", "config.json", {"architectures": 3}),
        ("bert", "config.json", {"problem_type": ["regression"]}),
        ("bert", "config.json", {"num_labels": float("inf"), "id2label": None, "label2id": None}),
        ("modernbert", "config.json", {"num_attention_heads": 0}),
        ("modernbert", "config.json", {"hidden_size": -4}),
        ("modernbert", "config.json", {"hidden_activation": "acme"}),
        ("modernbert", "config.json", {"layer_types": {"a": 1}}),
        ("cross-encoder", "config_sentence_transformers.json", {"prompts": [1]}),
        ("cross-encoder", "sentence_bert_config.json", {"max_seq_length": -1}),
        ("cross-encoder", "config.json", {"sentence_transformers": 3}),
        ("sentence", "1_Pooling/config.json", {"pooling_mode": 3}),
        ("sentence", "1_Pooling/config.json", {"include_prompt": []}),
        ("sentence", "2_Dense/config.json", {"activation_function": 3}),
        ("sentence", "sentence_bert_config.json", {"max_seq_length": "128"}),
        ("sentence", "config_sentence_transformers.json", {"prompts": {"a": [1]}}),
        ("sentence", "config_sentence_transformers.json", {"truncate_dim": 1.5}),
        ("static", "config.json", {"max_length": [1]}),
        ("head", "config.json", {"problem_type": []}),
        ("head", "config.json", {"backbone": [1]}),
        ("head", "config.json", {"id2label": [[1]]}),
        ("trained", "training.json", {"backbone": 3}),
        ("trained", "training.json", {"settings": {}}),
        ("trained", "training.json", {"reading": {"acme": 3}}),
        ("trained", "training.json", {"labels": 3}),
        ("decoder", "config.json", {"vocab_size": "x"}),
        ("decoder", "config.json", {"layer_types": 3}),
        ("decoder", "generation_config.json", {"eos_token_id": "a"}),
        ("decoder", "generation_config.json", {"eos_token_id": [[1]]}),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused_with_the_models_name(
    model_of, tmp_path, kind, file, changes
):
    folder = shutil.copytree(model_of(kind), tmp_path / "model")
    edit(folder / file, **changes)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as refusal:
        run(kind, folder, model_of("sentence"))
    assert type(refusal.value) in (CheckpointError, ValueError)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("mapping", {"mapping": np.array([0, 10**6])}),
        ("mapping", {"mapping": np.array([0, -1])}),
        ("weights", {"weights": np.ones(3, np.float32)}),
    ],
)
def test_tables_of_a_static_model_have_rows_for_all_tokens(model_of, tmp_path, name, tensors):
    folder = shutil.copytree(model_of("static"), tmp_path / "model")
    count = len(load_file(folder / "model.safetensors")["embeddings"])
    if name == "mapping":
        tensors = {"mapping": np.resize(tensors["mapping"], count)}
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.*{re.escape(str(folder))}"):
        run("static", folder, None)


def test_depth_that_models_have_is_read(stating):
    assert len(stating("bert", nested(90))(pd.DataFrame({"text": ["a river"]}))) == 1
