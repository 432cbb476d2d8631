"""Bad input: a clear error at the call, and nothing lost for text that is only unusual."""

import json
import os
import shutil

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gpuclassify import DistributedDataClassifier, DomainClassifier, FineWebEduClassifier
from gpuclassify.hub import ModelNotFoundError
from gpuclassify.models.checkpoint import CheckpointError
from tests.oracle import assert_close, probabilities, raw_outputs, stacked

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def domain(checkpoint):
    def make(**options):
        settings = {"model": checkpoint("domain"), "score_field": "s", "autocast": False}
        return DomainClassifier(**{**settings, **options})

    return make


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a checkpoint of that family, to be damaged."""

    def copy(family="domain"):
        return shutil.copytree(checkpoint(family), tmp_path / family)

    return copy


def call(classifier, text="a text"):
    """What a user does first: plan with a Dask frame. Nothing may run."""
    return classifier(dd.from_pandas(pd.DataFrame({"text": [text]}), npartitions=1))


def edit_json(path, **changes):
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_tensors(model, edit):
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


# Columns.


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_missing_text_column_is_named_beside_the_columns_there(domain, is_lazy):
    frame = pd.DataFrame({"texts": ["a"], "id": [1]})
    frame = dd.from_pandas(frame, npartitions=1) if is_lazy else frame
    message = r"no text column 'text'; columns are \['texts', 'id'\].*Did you mean 'texts'"
    with pytest.raises(ValueError, match=message):
        domain()(frame)
    assert "domain_pred" in domain(text_field="texts")(frame).columns


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "int64"),
        ([1.0, np.nan], "float64"),
        ([True, False], "bool"),
        ([1, 2], "category"),
        (pd.to_datetime(["2024-01-01", "2024-01-02"]), "datetime64[ns]"),
    ],
)
def test_a_text_column_that_holds_no_strings_is_refused_with_its_type(domain, values, dtype):
    frame = pd.DataFrame({"text": pd.Series(values, dtype=dtype)})
    for each in (frame, dd.from_pandas(frame, npartitions=1)):
        with pytest.raises(TypeError, match=r"column 'text' holds .*not strings: convert it with"):
            domain()(each)


def test_two_text_columns_of_one_name_are_refused(domain):
    frame = pd.DataFrame([["a", "b"]], columns=["text", "text"])
    with pytest.raises(ValueError, match="2 columns are called 'text': rename all but one"):
        domain()(frame)


def test_an_output_column_that_is_there_already_is_kept_unless_told_otherwise(domain):
    frame = pd.DataFrame({"text": ["river", "oven"], "domain_pred": ["mine", "too"], "id": [1, 2]})
    lazy = dd.from_pandas(frame, npartitions=1)
    with pytest.raises(ValueError, match=r"already has \['domain_pred'\].*overwrite=True"):
        domain()(lazy)
    replaced = domain(overwrite=True)(lazy).compute(scheduler="sync")
    assert list(replaced.columns) == ["text", "domain_pred", "id", "s"]
    assert set(replaced.domain_pred) <= set(domain().labels)


@pytest.mark.parametrize("name", ["domain_pred", "s"])
def test_two_outputs_of_one_name_are_refused(domain, name):
    options = {"confidence_field": name}
    with pytest.raises(ValueError, match=rf"need different names; given twice: \['{name}'\]"):
        call(domain(**options))


def test_an_output_never_replaces_the_text(domain):
    with pytest.raises(ValueError, match="'text' is a column that is read, and stays"):
        call(domain(label_field="text", overwrite=True))


# Checkpoints.


def without(name):
    return lambda model: (model / name).unlink()


def edited(path, **changes):
    return lambda model: edit_json(model / path, **changes)


CLASSES = {"domain": DomainClassifier, "fineweb-edu": FineWebEduClassifier}
DAMAGES = [
    ("domain", without("config.json"), r"has no config\.json; it has .*model\.safetensors"),
    ("domain", without("model.safetensors"), r"has no model\.safetensors.*config\.json"),
    (
        "domain",
        lambda model: os.truncate(model / "model.safetensors", 50_000),
        r"model\.safetensors is a truncated or corrupt",
    ),
    ("domain", edited("config.json", id2label=None, label2id=None), "has no id2label"),
    (
        "domain",
        edited("backbone/config.json", hidden_size=64),
        r"word_embeddings\.weight .* or name the right base",
    ),
]


@pytest.mark.parametrize(("family", "damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_at_the_call(broken, family, damage, message):
    model = broken(family)
    damage(model)
    with pytest.raises((ValueError, ModelNotFoundError), match=message):
        call(CLASSES[family](model=model))


@pytest.mark.parametrize(("family", "head"), [("domain", "fc"), ("fineweb-edu", "classifier")])
def test_missing_and_misshaped_tensors_are_named_at_the_call(broken, family, head):
    model = broken(family)
    edit_tensors(model, lambda tensors: tensors.update({f"{head}.bias": torch.zeros(99)}))
    message = rf"have another shape: {head}.bias \(99,\) instead of \((26|1),\)"
    with pytest.raises(CheckpointError, match=message):
        call(CLASSES[family](model=model))
    edit_tensors(model, lambda tensors: tensors.pop(f"{head}.weight"))
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: {head}.weight"):
        call(CLASSES[family](model=model))


def test_an_architecture_that_transformers_does_not_know_is_refused_when_loading(broken):
    model = broken("fineweb-edu")
    edit_json(model / "config.json", model_type="no-such-architecture")
    with pytest.raises(CheckpointError, match=r"'no-such-architecture'.*upgrade transformers"):
        call(FineWebEduClassifier(model=model)).compute(scheduler="sync")


def test_pickled_weights_are_refused_and_the_message_says_how_to_convert(broken):
    model = broken("fineweb-edu")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="only as pickles") as caught:
        call(FineWebEduClassifier(model=model))
    snippet = str(caught.value).partition("trust:\n")[2].partition("\nand pass")[0]
    exec(snippet.replace('"pytorch_model.bin"', repr(str(model / "pytorch_model.bin")))
         .replace('"model.safetensors"', repr(str(model / "model.safetensors"))))  # fmt: skip
    call(FineWebEduClassifier(model=model, autocast=False)).compute(scheduler="sync")


@pytest.mark.parametrize("architecture", ["deberta-v2", "bert", "gpt2", "llama", "roberta"])
@pytest.mark.parametrize("has_settings", [True, False])
def test_a_checkpoint_without_a_vocabulary_fails_naming_its_files(
    sequence_classifier, tmp_path, architecture, has_settings
):
    model = shutil.copytree(sequence_classifier(architecture), tmp_path / "model")
    kept = {"config.json", "model.safetensors", *(["tokenizer_config.json"] * has_settings)}
    for path in model.iterdir():
        if path.name not in kept:
            path.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer of .* loads from its files"):
        call(DistributedDataClassifier(model=model)).compute(scheduler="sync")


@pytest.mark.parametrize("added", ["[ACME]", "river bank"])
def test_tokens_beyond_the_embedding_are_refused_at_the_call(checkpoint, tmp_path, added):
    model = shutil.copytree(checkpoint("fineweb-edu"), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = tokenizer.get_vocab_size()
    tokenizer.add_tokens([added])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=rf"ids up to {rows}, and .*embedding of {rows} rows"):
        call(FineWebEduClassifier(model=model))


def test_tokens_beyond_the_embedding_are_refused_for_a_tokenizer_in_python(
    sequence_classifier, tmp_path
):
    model = shutil.copytree(sequence_classifier("bert"), tmp_path / "model")
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *map(str, range(5, rows + 1))]
    (model / "vocab.txt").write_text("\n".join(tokens))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    with pytest.raises(CheckpointError, match=rf"ids up to {rows}, and .*embedding of {rows} rows"):
        call(DistributedDataClassifier(model=model)).compute(scheduler="sync")


@pytest.mark.parametrize("change", [None, {"type": "Precompiled", "precompiled_charsmap": "AAAA"}])
def test_a_damaged_tokenizer_is_refused_at_the_call(checkpoint, tmp_path, change):
    model = shutil.copytree(checkpoint("fineweb-edu"), tmp_path / "model")
    description = json.loads((model / "tokenizer.json").read_text())
    text = json.dumps(description | {"normalizer": change}) if change else "{"
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged, or no tokenizer"):
        call(FineWebEduClassifier(model=model))


def test_a_category_model_is_no_education_model(checkpoint):
    with pytest.raises(CheckpointError, match=r"26 outputs.*use DistributedDataClassifier"):
        call(FineWebEduClassifier(model=checkpoint("domain")))


def test_more_tokens_than_positions_are_refused_at_the_call(checkpoint):
    with pytest.raises(ValueError, match=r"max_seq_length=600, but .* positions for 512"):
        call(FineWebEduClassifier(model=checkpoint("fineweb-edu"), max_seq_length=600))


# Unusual text: no error, and the contract is kept.


def agrees(domain, checkpoint, texts, read_as=None, **frame_options):
    frame = pd.DataFrame({"text": pd.Series(texts, **frame_options)})
    before = frame.copy(deep=True)
    found = domain()(frame)
    expected = raw_outputs(checkpoint("domain"), read_as or [text[:2000] for text in texts])
    assert_close(stacked(found.s), probabilities(expected))
    pd.testing.assert_frame_equal(found[["text"]], before, check_exact=True)
    return found


@pytest.mark.parametrize("dtype", ["str", object])
def test_nul_and_control_characters_are_text(domain, checkpoint, dtype):
    texts = ["river\x00oven", "\x00", "\x01\x1f\x7f", "\u2028line\ufeff", "e\u0301 \U0010ffff"]
    agrees(domain, checkpoint, texts, dtype=dtype)


def test_a_megabyte_without_max_chars_is_cut_by_tokens(domain, checkpoint):
    text = "naïve 你好 " * 80_000
    found = domain(max_chars=None)(pd.DataFrame({"text": [text]}))
    expected = raw_outputs(checkpoint("domain"), [text[:20_000]], 512)
    assert_close(stacked(found.s), probabilities(expected))


def test_lone_surrogates_are_read_as_replacements_and_kept(domain, checkpoint):
    texts = ["river \ud800 oven", "\udfff", "plain", "pair \U0001f600"]
    read_as = ["river \ufffd oven", "\ufffd", "plain", "pair \U0001f600"]
    found = agrees(domain, checkpoint, texts, read_as, dtype=object)
    assert [list(map(ord, text)) for text in found.text] == [list(map(ord, t)) for t in texts]


@pytest.mark.parametrize("value", [7, 1.5, b"bytes", ["a"], {"a": 1}])
def test_a_non_string_in_an_object_column_fails_naming_row_and_type(domain, value):
    texts = pd.Series(["a", None, value], dtype=object, index=[5, 6, 6])
    frame = pd.DataFrame({"text": texts})
    message = rf"row 2 \(index label 6\) of column 'text' holds a {type(value).__name__}, not a str"
    with pytest.raises(TypeError, match=message):
        domain()(frame)
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_map(lambda part: part, [frame], meta=frame.iloc[:0])
        with pytest.raises(TypeError, match=message):
            domain()(lazy).compute(scheduler="sync")


@pytest.mark.parametrize("null", [None, np.nan, pd.NA, pd.NaT])
def test_every_null_of_an_object_column_is_null(domain, null):
    frame = pd.DataFrame({"text": pd.Series(["river", null], dtype=object)})
    found = domain()(frame)
    assert found.domain_pred.isna().tolist() == [False, True]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_every_arrow_string_is_text(domain, kind):
    texts = ["river", "oven" * 900, None]
    expected = domain()(pd.DataFrame({"text": pd.Series(texts, dtype="str")}))
    found = domain()(pd.DataFrame({"text": pd.Series(texts, dtype=pd.ArrowDtype(kind))}))
    assert found.dtypes["domain_pred"] == pd.ArrowDtype(kind)
    assert pa.array(found.domain_pred).to_pylist() == pa.array(expected.domain_pred).to_pylist()


def test_any_name_is_good_for_an_output_column(domain):
    found = domain(label_field="self")(pd.DataFrame({"text": ["river"]}))
    assert list(found.columns) == ["text", "self", "s"]


def test_a_multi_index_is_unchanged(domain):
    index = pd.MultiIndex.from_tuples([("a", 1), ("a", 1), ("b", 2)], names=["x", "y"])
    frame = pd.DataFrame({"text": ["river", None, "oven"]}, index=index)
    pd.testing.assert_index_equal(domain()(frame).index, index, exact=True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"min_confidence": "0.5"}, TypeError, "min_confidence='0.5' is a str"),
        ({"min_confidence": True}, TypeError, "is a bool"),
        ({"min_score": [0.5]}, TypeError, "min_score"),
        ({"min_score": {1: 0.5}}, TypeError, "is not a label"),
        ({"device": "cudaa"}, ValueError, "device='cudaa'"),
        ({"device": "gpu"}, ValueError, "device='gpu' is not auto, cpu, mps, cuda"),
        ({"device": None}, ValueError, "device=None"),
        ({"cache_dir": 3}, TypeError, "cache_dir=3"),
        ({"base_model": ""}, TypeError, "base_model=''"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused_at_the_constructor(arguments, error, words):
    with pytest.raises(error, match=words):
        DomainClassifier(**arguments)


def test_a_file_in_place_of_a_directory_is_told(checkpoint, monkeypatch):
    directory = checkpoint("domain")
    monkeypatch.chdir(directory.parent)
    for name in (directory / "config.json", f"{directory.name}/config.json"):
        with pytest.raises(FileNotFoundError, match=r"config\.json.* a file"):
            DomainClassifier(model=name)(pd.DataFrame({"text": ["a"]}))
