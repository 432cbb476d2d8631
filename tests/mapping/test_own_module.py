"""A torch module of one's own: declared, checked before work starts, and run like any other."""

import json
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from gpuclassify import DistributedDataClassifier, ModelMapper
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.models.checkpoint import CheckpointError
from tests.loaders import LOADERS
from tests.oracle import assert_close, plain_tokenizer, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(20, max_words=40), "", "a"]
FRAME = pd.DataFrame({"text": [*TEXTS, None]}, index=[5] * 23)


class Bag(nn.Module, PyTorchModelHubMixin):
    """A bag of embeddings: the smallest module that is none of transformers'."""

    def __init__(self, vocabulary, outputs):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.out = nn.Linear(8, outputs)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        return self.out((self.embed(input_ids) * mask).sum(1) / mask.sum(1))


class DictBag(Bag):
    def forward(self, batch):
        return super().forward(batch["input_ids"], batch["attention_mask"])


class Encoder(nn.Module):
    """A transformers backbone under another name, with a head of its own."""

    def __init__(self, config):
        super().__init__()
        from transformers import CONFIG_MAPPING

        sizes = dict(config["encoder"])
        self.encoder = AutoModel.from_config(CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes))
        self.score = nn.Linear(self.encoder.config.hidden_size, 1)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return self.score(hidden.last_hidden_state[:, 0])[:, 0]


class Labelled(DistributedDataClassifier):
    def build_module(self, config):
        return Bag(config["vocabulary"], config["outputs"])


class Named(ModelMapper):
    new_columns = {"high": "bool", "best": "str", "at": "int64", "all": "list<float32>"}

    def build_module(self, config):
        return Bag(config["vocabulary"], config["outputs"])

    def columns(self, outputs):
        best = outputs.argmax(axis=1)
        names = np.array(["x", "y", "z"])[best]
        return {"all": outputs, "at": best, "best": names, "high": outputs[:, 0] > 0}


class Taking(Labelled):
    def build_module(self, config):
        return DictBag(config["vocabulary"], config["outputs"])


class Tied(Labelled):
    """Whose module has its weights under a second name too, as encoders with a decoder have."""

    def build_module(self, config):
        module = super().build_module(config)
        module.reader = module.out
        return module


@pytest.fixture
def saved(tmp_path, sequence_classifier):
    """Writes a Bag as its users would: save_pretrained, and a tokenizer beside it."""
    tokenizer = plain_tokenizer(sequence_classifier("bert"))

    def save(outputs=3, labels=("x", "y", "z"), with_tokenizer=True, **config):
        torch.manual_seed(0)
        module = Bag(len(tokenizer), outputs)
        folder = tmp_path / "bag"
        module.save_pretrained(folder)
        stated = json.loads((folder / "config.json").read_text()) | config
        if labels:
            stated["id2label"] = dict(enumerate(labels))
        (folder / "config.json").write_text(json.dumps(stated))
        if with_tokenizer:
            tokenizer.save_pretrained(folder)
        return folder

    return save


def expected_outputs(folder, texts):
    """The module alone on one text at a time."""
    tokenizer = plain_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    module = Bag(*weights["embed.weight"].shape[:1], len(weights["out.bias"])).eval()
    module.load_state_dict(weights)
    with torch.inference_mode():
        rows = []
        for text in texts:
            batch = tokenizer(text, return_tensors="pt")
            rows.append(module(batch["input_ids"], batch["attention_mask"])[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("loader", LOADERS)
def test_labels_scores_and_filters_come_for_free(saved, frames, loader):
    folder = saved()
    classifier = Labelled(model=folder, score_field="s", loader=loader, autocast=False)
    assert classifier.labels == ["x", "y", "z"]

    found = frames.to_pandas(classifier(frames.lazy(FRAME)))

    expected = torch.from_numpy(expected_outputs(folder, TEXTS)).softmax(1).numpy()
    assert_close(stacked(found["s"].iloc[:-1]), expected)
    assert found["preds"].iloc[:-1].tolist() == ["xyz"[row] for row in expected.argmax(axis=1)]
    assert pd.isna(found["preds"].iloc[-1])
    kept = Labelled(model=folder, filter_by="x")(FRAME)
    assert len(kept) == (expected.argmax(axis=1) == 0).sum()


def test_declared_columns_are_written_and_announced(saved, frames):
    folder = saved(labels=())
    mapper = Named(model=folder, autocast=False)
    lazy = mapper(frames.lazy(FRAME))

    found = frames.to_pandas(lazy)

    outputs = expected_outputs(folder, TEXTS)
    assert list(found.columns) == ["text", "high", "best", "at", "all"]
    assert_close(stacked(found["all"].iloc[:-1]), outputs)
    assert found["high"].iloc[:-1].tolist() == (outputs[:, 0] > 0).tolist()
    assert found["best"].iloc[:-1].tolist() == ["xyz"[row] for row in outputs.argmax(axis=1)]
    assert found["at"].iloc[:-1].tolist() == outputs.argmax(axis=1).tolist()
    assert found.iloc[-1].isna().sum() == 5
    if frames.name == "pandas":
        assert found.dtypes.to_dict() == lazy._meta.dtypes.to_dict()


@pytest.mark.parametrize("first", ["out", "reader"])
def test_a_tensor_with_two_names_is_saved_under_either(saved, first):
    folder = saved()
    expected = torch.from_numpy(expected_outputs(folder, TEXTS)).softmax(1).numpy()
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("out.", f"{first}."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")

    found = Tied(model=folder, score_field="s", autocast=False)(FRAME)

    assert_close(stacked(found["s"].iloc[:-1]), expected)
    save_file({"embed.weight": tensors["embed.weight"]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"4 tensors are missing: out\.bias, out\.wei"):
        Tied(model=folder)(FRAME)


def test_a_module_that_takes_one_dict(saved):
    folder = saved()
    found = Taking(model=folder, unpack_inference_batch=False, score_field="s", autocast=False)(
        FRAME
    )

    expected = torch.from_numpy(expected_outputs(folder, TEXTS)).softmax(1).numpy()
    assert_close(stacked(found["s"].iloc[:-1]), expected)
    with pytest.raises(CheckpointError, match="unpack_inference_batch=False"):
        Taking(model=folder)(FRAME)
    with pytest.raises(CheckpointError, match="unpack_inference_batch=True"):
        Labelled(model=folder, unpack_inference_batch=False)(FRAME)


def test_a_backbone_of_transformers_within_the_module(tmp_path, sequence_classifier):
    source = sequence_classifier("bert")
    sizes = json.loads((source / "config.json").read_text())
    torch.manual_seed(1)
    module = Encoder({"encoder": sizes}).eval()
    folder = tmp_path / "own"
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"encoder": sizes}))

    class Scored(ModelMapper):
        new_columns = {"score": "float32"}

        def build_module(self, config):
            return Encoder(config)

        def columns(self, outputs):
            return {"score": outputs[:, 0]}

    # The tokenizer lies with the base model, as when a module alone was saved.
    mapper = Scored(model=folder, base_model=str(source), autocast=False)
    found = mapper(FRAME)["score"].iloc[:-1].to_numpy()

    tokenizer = plain_tokenizer(source)
    with torch.inference_mode():
        batches = (tokenizer(text, return_tensors="pt") for text in TEXTS)
        expected = [module(batch["input_ids"], batch["attention_mask"]) for batch in batches]
    assert_close(found, torch.cat(expected).numpy())
    assert mapper.model.checkpoint.tokenizer.name == str(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ("x", "y")}, "3 outputs a text, and config.json names 2 labels"),
        ({"outputs": 3, "vocabulary": 12}, "embed.weight"),
        ({"with_tokenizer": False}, "no tokenizer among its files"),
        ({"labels": ()}, "declare new_columns in Labelled"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_at_the_call(saved, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Labelled(model=saved(**changes))(FRAME)


def test_a_wrong_shape_that_only_running_shows_is_refused_in_the_first_partition(saved):
    class Cube(Bag):
        def forward(self, input_ids, attention_mask):
            if input_ids.max().item() < 0:  # needs values, so it cannot run without memory
                return None
            return self.embed(input_ids)

    class Cubic(DistributedDataClassifier):
        def build_module(self, config):
            return Cube(config["vocabulary"], config["outputs"])

    lazy = Cubic(model=saved())(pd.DataFrame({"text": ["a b c"]}).pipe(_lazy))
    with pytest.raises(CheckpointError, match=r"Cube.forward gives .* shape \(\d+, \d+, 8\)"):
        lazy.compute(scheduler="sync")


def _lazy(frame):
    import dask.dataframe as dd

    return dd.from_pandas(frame, npartitions=1)


def test_filters_on_declared_columns_are_refused(saved):
    class Both(Labelled):
        new_columns = {"score": "float32"}

        def columns(self, outputs):
            return {"score": outputs[:, 0]}

    folder = saved()
    assert Both(model=folder)(FRAME)["score"].iloc[:-1].notna().all()
    with pytest.raises(ValueError, match="declares columns of its own"):
        Both(model=folder, filter_by="x")(FRAME)


def test_a_module_that_gives_nan_fails_with_the_row(saved):
    folder = saved()
    weights = load_file(folder / "model.safetensors")
    weights["out.bias"][1] = float("nan")
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(NonFiniteOutputError, match="row 0"):
        Labelled(model=folder)(FRAME)


# What tells one definition, and one setting, from another.


CELL = """
class Own(ModelMapper):
    new_columns = {"r": "float32"}
    def build_module(self, config):
        return Wrapped(config["vocabulary"], config["outputs"])
    def columns(self, outputs):
        return {"r": FACTOR * outputs[:, 0]}
class Wrapped(Bag):
    def forward(self, input_ids, attention_mask):
        return SIGN * super().forward(input_ids, attention_mask)
"""


def test_a_cell_that_is_run_again_gives_the_new_columns(saved):
    """All definitions are alive, lazy, and have the same name in the same module."""
    known = {"__name__": "__main__", "Bag": Bag, "ModelMapper": ModelMapper}
    folder, lazy, values = saved(labels=()), [], []
    for factor, sign in ((1, 1), (100, 1), (1, -1)):
        exec(CELL.replace("FACTOR", str(factor)).replace("SIGN", str(sign)), known)
        lazy.append(known["Own"](model=folder, autocast=False)(_lazy(FRAME[:1])))
        values.append(lazy[-1].compute(scheduler="sync")["r"].item())
    assert np.array(values) / values[0] == pytest.approx([1, 100, -1])
    assert len({each._name for each in lazy}) == 3


class Above(Named):
    """A setting of its own beside the options."""

    new_columns = {"is_above": "bool"}

    def __init__(self, threshold, **options):
        super().__init__(**options)
        self.threshold = threshold

    def columns(self, outputs):
        return {"is_above": outputs[:, 0] > self.threshold}


def test_settings_of_a_constructor_of_ones_own_travel_and_count(saved):
    folder = saved(labels=())
    ddf = _lazy(FRAME.reset_index(drop=True))
    low, high = Above(-100.0, model=folder), Above(100.0, model=folder)

    assert pickle.loads(pickle.dumps(high)).threshold == 100.0
    assert low != high
    first, second = low(ddf), high(ddf)
    assert first._name != second._name
    assert first.compute(scheduler="sync")["is_above"].dropna().all()
    assert not second.compute(scheduler="sync")["is_above"].dropna().any()


class Scaled(Labelled):
    """A module that depends on an option."""

    def build_module(self, config):
        module, factor = super().build_module(config), self.options.batch_size
        module.register_forward_hook(lambda _module, _inputs, output: output * factor)
        return module


def test_a_module_may_depend_on_options(saved):
    folder = saved()
    one, ten = (
        Scaled(model=folder, batch_size=size, score_field="s", autocast=False)(FRAME)
        for size in (1, 10)
    )

    logits = expected_outputs(folder, TEXTS)
    for found, factor in ((one, 1), (ten, 10)):
        expected = torch.from_numpy(logits * factor).softmax(1).numpy()
        assert_close(stacked(found["s"].iloc[:-1]), expected)


class Mixing(Bag):
    """Casts its mask to float, as many modules do."""

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).float()
        return self.out((self.embed(input_ids) * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_a_module_that_mixes_precisions_runs_in_any(saved, options):
    class Mixed(Labelled):
        def build_module(self, config):
            return Mixing(config["vocabulary"], config["outputs"])

    folder = saved()
    found = Mixed(model=folder, score_field="s", **options)(FRAME)

    expected = torch.from_numpy(expected_outputs(folder, TEXTS)).softmax(1).numpy()
    assert_close(stacked(found["s"].iloc[:-1]), expected, tolerance=0.02)


def test_an_unknown_kind_of_column_is_refused_at_the_definition():
    with pytest.raises(TypeError, match=r"'float', which is no kind.* mean 'float32'"):

        class Unknown(ModelMapper):
            new_columns = {"score": "float"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (lambda o: {"high": o[:, 0], "best": ["x"] * len(o)}, "'high' that are no bool"),
        (lambda o: {"high": o[:, 0] > 0, "best": o[:, 0]}, "'best' that are no string"),
        (lambda o: {"high": o[:, :1] > 0, "best": ["x"] * len(o)}, r"shape \(22, 1\) for 'high'"),
        (
            lambda o: {"high": pa.array([True]), "best": pa.array(["x"])},
            "gave 1 values for 'high', and there are 22 texts",
        ),
        (lambda o: {"high": pa.array([True] * len(o))}, r"gave \['high'\], and new"),
    ],
)
def test_columns_that_would_be_changed_to_fit_are_refused(saved, columns, message):
    class Wrong(Named):
        new_columns = {"high": "bool", "best": "str"}

    Wrong.columns = lambda self, outputs: columns(outputs)
    with pytest.raises(ValueError, match=message):
        Wrong(model=saved(labels=()))(FRAME)


def test_a_regression_module_needs_no_labels(saved):
    folder = saved(outputs=1, labels=(), problem_type="regression")
    found = Labelled(model=folder, autocast=False)(FRAME)

    assert_close(found["score"].iloc[:-1], expected_outputs(folder, TEXTS)[:, 0])


@pytest.mark.parametrize(
    ("id2label", "message"),
    [
        ({"0": "x", "2": "z"}, r"ids \[0, 2\]: they must run from 0 to 1"),
        ({"a": "x"}, "must map whole numbers to labels"),
        (["x", "y"], "must map whole numbers to labels"),
        ({"-1": "x"}, "must map whole numbers to labels"),
    ],
)
def test_a_label_map_of_another_form_is_refused(saved, id2label, message):
    folder = saved(id2label=id2label, labels=None)
    with pytest.raises(CheckpointError, match=message):
        Labelled(model=folder)(FRAME)
