"""Models of one's own, in the form of either generation, against the plain modules."""

import pickle
import re

import cloudpickle
import dask.dataframe as dd
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from gpuclassify import curator
from gpuclassify.curator import crossfit
from tests.curator.conftest import FRAME, TEXTS, read_output
from tests.oracle import assert_close, probabilities, raw_outputs, stacked

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LABELS = ["Low", "Medium", "High"]
BASE_CLASS = """
from nemo_curator.stages.text.classifiers.base import DistributedDataClassifier

class MyCustomClassifier(DistributedDataClassifier):
    def __init__(self, cache_dir=None, label_field="my_pred", **kwargs):
        super().__init__(
            model_identifier="my-org/model",
            cache_dir=cache_dir,
            label_field=label_field,
            score_field="quality_prob",
            max_chars=3000,
            max_seq_length=512,
            model_inference_batch_size=256,
            **kwargs,
        )

classifier = MyCustomClassifier(filter_by=["High", "Medium"])
"""
STAGE = """
import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification

from nemo_curator.backends.base import WorkerMetadata
from nemo_curator.stages.text.models.model import ModelStage


class ClassifierStage(ModelStage):
    def __init__(self, model_identifier: str, label_field: str = "label", **kwargs):
        super().__init__(model_identifier=model_identifier, unpack_inference_batch=True, **kwargs)
        self.label_field = label_field

    def outputs(self):
        return ["data"], [self.label_field]

    def setup(self, _: WorkerMetadata | None = None) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(
            self.model_identifier, cache_dir=self.cache_dir, local_files_only=True
        )
        self.model.eval().to("cuda")

    def process_model_output(self, outputs, model_input_batch=None):
        logits = outputs.logits.cpu().numpy()
        return {"predictions": np.argmax(logits, axis=1)}

    def collect_outputs(self, processed_outputs):
        return {"predictions": np.concatenate([o["predictions"] for o in processed_outputs])}

    def create_output_dataframe(self, df_cpu, collected_output):
        return df_cpu.assign(**{self.label_field: collected_output["predictions"]})
"""
STAGES = """
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.text.io.reader import JsonlReader
from nemo_curator.stages.text.io.writer import JsonlWriter
from nemo_curator.stages.text.models.tokenizer import TokenizerStage

pipeline = Pipeline(name="own")
pipeline.add_stage(JsonlReader(file_paths="content/*.jsonl"))
pipeline.add_stage(TokenizerStage(model_identifier="my-org/model", max_seq_length=12))
pipeline.add_stage(ClassifierStage("my-org/model", model_inference_batch_size=16))
pipeline.add_stage(JsonlWriter(path="out/"))
results = pipeline.run()
"""
CROSSFIT = """
import os
from dataclasses import dataclass

import torch
import torch.nn as nn
from crossfit.backend.torch.hf.model import HFModel
from transformers import AutoModel, AutoTokenizer

from nemo_curator.classifiers.base import (
    DistributedDataClassifier,
    _run_classifier_helper,
)
from nemo_curator.datasets import DocumentDataset


@dataclass
class OwnConfig:
    base_model: str = "my-org/base"
    fc_dropout: float = 0.2


class OwnModule(nn.Module):
    def __init__(self, config, out_dim):
        super().__init__()
        self.model = AutoModel.from_pretrained(config.base_model)
        self.fc_dropout = nn.Dropout(config.fc_dropout)
        self.fc = nn.Linear(self.model.config.hidden_size, out_dim)

    def forward(self, batch):
        features = self.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        return torch.softmax(self.fc(self.fc_dropout(features))[:, 0, :], dim=1)


class OwnModel(HFModel):
    def __init__(self, config, out_dim, model_path):
        self.config = config
        self.out_dim = out_dim
        self.model_path = model_path
        super().__init__(self.config.base_model, max_mem_gb=8)

    def load_model(self, device="cuda"):
        model = OwnModule(self.config, self.out_dim).to(device)
        model.load_state_dict(torch.load(self.model_path, map_location="cpu"), strict=True)
        return model.eval()

    def load_tokenizer(self):
        return AutoTokenizer.from_pretrained(self.config.base_model)

class OwnClassifier(DistributedDataClassifier):
    def __init__(self, labels, out_dim=None, filter_by=None, text_field="text"):
        out_dim = out_dim or len(labels)
        self.text_field = text_field
        self.prob_column = "prob"
        super().__init__(
            model=OwnModel(OwnConfig(), out_dim, "model0.pth"),
            labels=labels,
            filter_by=filter_by,
            batch_size=64,
            out_dim=out_dim,
            pred_column="pred",
            max_chars=6000,
            device_type="cuda",
            autocast=True,
        )

    def _run_classifier(self, dataset):
        df = _run_classifier_helper(
            df=dataset.df,
            model=self.model,
            labels=self.labels,
            max_chars=self.max_chars,
            batch_size=self.batch_size,
            label_col=self.pred_column,
            text_field=self.text_field,
            prob_col=self.prob_column,
        )
        return DocumentDataset(df)
"""


def test_the_base_class_takes_any_model(run_script, checkpoint):
    folder = checkpoint("quality")
    classifier = run_script(BASE_CLASS, {"my-org/model": folder})["classifier"]

    scores = probabilities(raw_outputs(folder, TEXTS))
    expected = FRAME.assign(my_pred=[classifier.labels[row] for row in scores.argmax(axis=1)])
    is_kept = expected["my_pred"].isin(["High", "Medium"])
    kept = classifier(FRAME)
    assert kept[expected.columns].to_dict("list") == expected[is_kept].to_dict("list")
    assert_close(stacked(kept["quality_prob"]), scores[is_kept])


@pytest.fixture
def own_stage(run_script, sequence_classifier):
    """The class of the script, and its model."""
    folder = str(sequence_classifier("bert", labels=("a", "b", "c")))
    return run_script(STAGE)["ClassifierStage"], folder


def test_a_stage_of_ones_own_gives_what_the_plain_module_gives(
    run_script, sequence_classifier, tmp_path
):
    folder = sequence_classifier("bert", labels=("a", "b", "c"))
    run_script(STAGE + STAGES, {"my-org/model": folder})

    expected = raw_outputs(folder, TEXTS, 12).argmax(axis=1)
    found = read_output(tmp_path / "out")
    assert found.columns.tolist() == ["text", "id", "label"]
    assert found["label"].tolist() == expected.tolist()
    assert len(set(expected)) > 1


def test_a_stage_runs_lazily_and_passes_nulls_by(own_stage):
    kind, folder = own_stage
    mapper = kind(folder, label_field="at").as_mapper()
    with_null = pd.concat([FRAME, pd.DataFrame({"text": [None], "id": [-1]})])
    lazy = mapper(dd.from_pandas(with_null, npartitions=3, sort=False))
    found = lazy.compute(scheduler="sync")
    assert found["at"].iloc[:-1].tolist() == raw_outputs(folder, TEXTS).argmax(axis=1).tolist()
    assert pd.isna(found["at"].iloc[-1])
    assert lazy.dtypes.equals(found.dtypes)


def test_stages_of_equal_code_and_settings_are_the_same_mapper_without_their_token(own_stage):
    kind, folder = own_stage
    one, same, other = (
        kind(folder, label_field=name, hf_token="hf_secret") for name in ("x", "x", "y")
    )
    tokenizer = curator.TokenizerStage(folder, hf_token="hf_secret")
    mapper = one.as_mapper(tokenizer)
    assert mapper == same.as_mapper() != other.as_mapper()
    ddf = dd.from_pandas(FRAME, npartitions=2)
    assert mapper(ddf)._name == same.as_mapper()(ddf)._name
    assert pickle.loads(cloudpickle.dumps(mapper)).source.label_field == "x"
    assert "model" not in vars(one)  # which setup loaded on a copy
    assert repr(mapper).startswith("ClassifierStage(model=")
    assert "hf_secret" not in f"{one!r} {tokenizer!r} {mapper!r}"
    assert b"hf_secret" not in cloudpickle.dumps((one, tokenizer))


def test_columns_that_zeros_do_not_show_are_declared(own_stage):
    kind, folder = own_stage

    class Picky(kind):
        def process_model_output(self, outputs, model_input_batch=None):
            assert outputs.abs().sum() > 0, "no outputs"
            return super().process_model_output(outputs)

    class Declared(Picky):
        new_columns = {"label": "int64"}

    with pytest.raises(TypeError, match=r"(?s)Picky does not show .*no outputs.*new_columns"):
        Picky(folder).as_mapper()(FRAME)
    assert Declared(folder).as_mapper()(FRAME)["label"].notna().all()


def test_a_tokenizer_that_would_be_another_one_is_refused(own_stage):
    kind, folder = own_stage
    pipeline = curator.Pipeline("p").add_stage(curator.TokenizerStage("other/model"))
    with pytest.raises(ValueError, match="follows the TokenizerStage of other/model"):
        pipeline.add_stage(kind(folder))
    assert pipeline.stages == [curator.TokenizerStage("other/model")]  # as before the call
    left = curator.TokenizerStage(folder, padding_side="left")
    with pytest.raises(ValueError, match="pass the same side to both"):
        curator.Pipeline("p").add_stage(left).add_stage(kind(folder))
    curator.Pipeline("p").add_stage(left).add_stage(kind(folder, padding_side="left"))


@pytest.fixture
def own_classifier(run_script, sequence_classifier, tmp_path):
    """The script's names, with its weights saved as it loads them, and the plain module."""
    folder = sequence_classifier("bert")
    scope = run_script(CROSSFIT, {"my-org/base": folder})
    torch.manual_seed(4)
    module = scope["OwnModule"](scope["OwnConfig"](), 3).eval()
    torch.save(module.state_dict(), tmp_path / "model0.pth")
    return scope, module, folder


def expected_probabilities(module, folder, max_tokens=None):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cut = {"return_tensors": "pt", "truncation": True, "max_length": max_tokens}
    with torch.inference_mode():
        return torch.cat([module(tokenizer(text, **cut)) for text in TEXTS]).numpy()


def test_a_model_of_crossfit_gives_what_the_plain_module_gives(own_classifier):
    scope, module, folder = own_classifier
    dataset = curator.DocumentDataset.from_pandas(FRAME, npartitions=2)

    found = scope["OwnClassifier"](LABELS)(dataset=dataset).df.compute(scheduler="sync")

    expected = expected_probabilities(module, folder)
    assert_close(stacked(found["prob"]), expected)
    names = [LABELS[row] for row in expected.argmax(axis=1)]
    assert found["pred"].tolist() == names
    kept = scope["OwnClassifier"](LABELS, filter_by=names[:1])(dataset=dataset)
    assert kept.df["pred"].compute(scheduler="sync").tolist() == [
        name for name in names if name == names[0]
    ]


def test_a_model_says_how_much_it_reads_and_need_not_say_how_it_runs(own_classifier, monkeypatch):
    scope, module, folder = own_classifier
    del scope["OwnClassifier"]._run_classifier
    monkeypatch.setattr(scope["OwnModel"], "max_seq_length", lambda self: 7, raising=False)
    found = scope["OwnClassifier"](LABELS)(curator.DocumentDataset.from_pandas(FRAME)).to_pandas()
    expected = expected_probabilities(module, folder, 7)
    assert_close(stacked(found["prob"]), expected)
    assert (expected != expected_probabilities(module, folder)).any()
    generative = type("Generative", (crossfit.HFModel,), {"load_model": None})
    with pytest.raises(TypeError, match="model_output_type='string', and outputs are numbers"):
        generative("owner/model", model_output_type="string")


def test_as_many_outputs_as_labels(own_classifier):
    scope = own_classifier[0]
    with pytest.raises(ValueError, match=re.escape("out_dim=1, and there are 3 labels")):
        scope["OwnClassifier"](LABELS, out_dim=1)
    run = scope["_run_classifier_helper"]
    model = scope["OwnModel"](scope["OwnConfig"](), 3, "model0.pth")
    with pytest.raises(ValueError, match=r"gives 3 outputs a text, and 2 labels"):
        run(FRAME, model, labels=LABELS[:2], batch_size=8, label_col="pred")
