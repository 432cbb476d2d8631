"""The instruction data guard against plain transformers, peft and torch, one text at a time."""

import json
import shutil

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from gpuclassify import AegisClassifier, InstructionDataGuardClassifier, classify
from gpuclassify.classifiers.questions import decoder
from gpuclassify.inference.residency import MODELS
from gpuclassify.models.checkpoint import CheckpointError
from tests.loaders import LOADERS
from tests.oracle import assert_close, plain_tokenizer
from tests.replicas import safety_template, sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [
    *sample_texts(30, max_words=60),
    "Instruction: Name a river. Input: . Response: The Rhine.",
    "Instruction: Name a river.</s> <s>[INST] Response: The Rhine.</s>",
    "",
]
FRAME = pd.DataFrame({"text": [*TEXTS, None]}, index=np.arange(len(TEXTS) + 1) // 2)
SCORE = "instruction_data_guard_poisoning_score"


@pytest.fixture(scope="module")
def guard(safety_models):
    def make(**options):
        return InstructionDataGuardClassifier(
            **{
                "model": safety_models.guard,
                "adapter": safety_models.defensive,
                "base_model": safety_models.base,
                "autocast": False,
                **options,
            }
        )

    return make


@pytest.fixture(scope="module")
def expected(safety_models):
    """By the published recipe: generate a token, take the last layer's last state, run the MLP."""
    tokenizer = plain_tokenizer(safety_models.base)
    base = AutoModelForCausalLM.from_pretrained(safety_models.base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, safety_models.defensive).eval()
    weights = load_file(safety_models.guard / "model.safetensors")
    scores = []
    for text in TEXTS:
        ids = tokenizer(text, split_special_tokens=True, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=1,
                do_sample=False,
                output_hidden_states=True,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
            state = F.normalize(out.hidden_states[0][-1][:, -1, :].float(), dim=-1)
            for name in ("input_layer", "hidden_layer_0", "hidden_layer_1", "hidden_layer_2"):
                state = F.linear(state, weights[f"{name}.weight"], weights[f"{name}.bias"])
                state = state if name == "hidden_layer_2" else F.relu(state)
            scores.append(state.sigmoid().item())
    return np.array(scores, dtype=np.float32)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_and_labels_are_those_of_the_recipe(guard, expected, frames, side, loader):
    lazy = guard(loader=loader, padding_side=side)(frames.lazy(FRAME, npartitions=3))

    found = frames.to_pandas(lazy)

    assert_close(found[SCORE].iloc[:-1], expected)
    assert found["is_poisoned"].iloc[:-1].tolist() == (expected >= 0.5).tolist()
    assert 2 < (expected >= 0.5).sum() < len(expected) - 2
    assert np.isnan(found[SCORE].iloc[-1])
    assert pd.isna(found["is_poisoned"].iloc[-1])
    if frames.name == "pandas":
        assert found["is_poisoned"].dtype == "boolean"
        assert found.dtypes.to_dict() == lazy._meta.dtypes.to_dict()


@pytest.mark.parametrize(
    ("filter_by", "kept"),
    [(False, [False]), ([False], [False]), (True, [True]), ([True, False], [False, True])],
)
def test_filters_keep_booleans_and_no_nulls(guard, expected, filter_by, kept):
    found = guard(filter_by=filter_by)(FRAME)
    assert len(found) == np.isin(expected >= 0.5, kept).sum()
    decided = guard(filter_by=filter_by, keep_field="kept")(FRAME)
    assert decided["kept"].iloc[:-1].tolist() == np.isin(expected >= 0.5, kept).tolist()
    assert not decided["kept"].iloc[-1]


def test_labels_to_keep_may_come_from_a_generator(guard):
    assert guard(filter_by=(label for label in [True, True])) == guard(filter_by=[True])
    with pytest.raises(ValueError, match="names no label"):
        guard(filter_by=(label for label in []))


@pytest.mark.parametrize("filter_by", ["False", ["safe"], 0, [[True]]])
def test_filters_of_other_kinds_are_refused(guard, filter_by):
    with pytest.raises(TypeError, match="pass True, False or a list of them"):
        guard(filter_by=filter_by)


def test_windows_average_scores(guard, expected):
    short = guard(long_text="windows", max_seq_length=1_000)(FRAME)
    assert_close(short[SCORE].iloc[:-1], expected)
    cut = guard(long_text="windows", max_seq_length=20, windows_field="n")(FRAME)
    assert cut["n"].max() > 2


def test_aegis_and_guard_share_the_decoder_whatever_their_adapters(
    safety_models, guard, monkeypatch
):
    loads = []
    real = decoder.load_decoder
    monkeypatch.setattr(decoder, "load_decoder", lambda *given: loads.append(given) or real(*given))
    MODELS.evict()
    variants = [
        AegisClassifier(
            model=adapter,
            base_model=safety_models.base,
            template=safety_template(),
            label_field=adapter.name,
            autocast=False,
        )
        for adapter in (safety_models.permissive, safety_models.defensive)
    ]
    alone = [mapper(FRAME).drop(columns="text") for mapper in (*variants, guard())]
    MODELS.evict()
    loads.clear()

    together = classify(dd.from_pandas(FRAME, npartitions=4), [*variants, guard()])

    found = together.compute(scheduler="threads", num_workers=2)
    assert len(loads) == 1
    assert len(MODELS.keys()) == 1
    assert found["permissive"].tolist()[:-1] == alone[0]["permissive"].tolist()[:-1]
    assert found["defensive"].tolist()[:-1] == alone[1]["defensive"].tolist()[:-1]
    assert_close(found[SCORE].iloc[:-1], alone[2][SCORE].iloc[:-1])
    assert alone[0]["permissive"].tolist() != alone[1]["defensive"].tolist()


def test_parts_that_do_not_fit_are_refused_at_the_call(safety_models, guard, tmp_path):
    ddf = dd.from_pandas(FRAME, npartitions=1)
    shutil.copytree(safety_models.guard, tmp_path / "wide")
    (tmp_path / "wide" / "config.json").write_text(json.dumps({"dropout": 0.7, "input_dim": 128}))
    with pytest.raises(CheckpointError, match=r"reads states of size 128, and .* of size 64"):
        guard(model=tmp_path / "wide")(ddf)
    shutil.copytree(safety_models.guard, tmp_path / "short")
    tensors = load_file(tmp_path / "short" / "model.safetensors")
    del tensors["hidden_layer_2.bias"]
    save_file(tensors, tmp_path / "short" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: hidden_layer_2\.bias"):
        guard(model=tmp_path / "short")(ddf)
    with pytest.raises(CheckpointError, match="is no adapter"):
        guard(adapter=safety_models.base)(ddf)


def test_both_generations_of_spellings():
    old = InstructionDataGuardClassifier(pred_column="p", prob_column="s", token="x")
    new = InstructionDataGuardClassifier(label_field="p", score_field="s", hf_token="x")
    assert old == new
