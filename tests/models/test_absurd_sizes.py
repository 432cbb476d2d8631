"""Numbers that a foreign configuration states are refused before anything is made of them."""

import json
import shutil
import time

import pandas as pd
import pytest

from gpuclassify import DistributedDataClassifier, DomainClassifier, PromptClassifier
from tests.replicas.chat_models import write_chat_model


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


def test_depth_that_models_have_is_read(stating):
    assert len(stating("bert", nested(90))(pd.DataFrame({"text": ["a river"]}))) == 1
