"""A decoder loads with adapters that share its weights, or says what is wrong with them."""

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import config as lora_config
from peft.tuners.lora.config import LoraGAConfig, MontecloraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig

from gpuclassify.classifiers.questions.decoder import load_decoder
from gpuclassify.classifiers.questions.lora import decoder_shapes, decoder_without_memory
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.loading import adapter_shapes
from tests.decoder_oracle import EOS, VOCABULARY, oracle, write_adapter, write_decoder

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    # peft advises against adapters that the package reads, or refuses, here.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:.* changes the base weights of the model"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, base):
    root = tmp_path_factory.mktemp("adapters")
    return {
        "strict": write_adapter(root / "strict", base, 1),
        "nvidia/lenient-1.0": write_adapter(root / "lenient", base, 2),
    }


@pytest.fixture
def decoder(base):
    return load_decoder(base, CPU, torch.float32)


@pytest.fixture
def adapter(adapters, tmp_path):
    """A copy of an adapter, to be spoiled."""
    return shutil.copytree(adapters["strict"], tmp_path / "copy")


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 5, 1])
    return ids, torch.arange(9) < lengths[:, None]


def states_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids, output_hidden_states=True).hidden_states[-1]


def close(output, expected):
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.contract
def test_hidden_states_equal_those_of_peft_one_text_at_a_time(decoder, base, adapters, batch):
    ids, is_token = batch
    for name, directory in adapters.items():
        decoder.add_adapter(name, directory)
        decoder.use(name)
        on_the_right = decoder.forward(ids, is_token.long())
        unmasked = decoder.forward(ids)
        flipped = is_token.flip(1).long()
        positions = (flipped.cumsum(1) - 1).clamp(min=0)
        shifted = torch.stack(
            [row.roll(9 - int(n)) for row, n in zip(ids, is_token.sum(1), strict=True)]
        )
        on_the_left = decoder.forward(shifted, flipped, positions)

        for row, length in enumerate(is_token.sum(1).tolist()):
            expected = states_of(oracle(base, directory), ids[row : row + 1, :length])[0]
            close(on_the_right[row, :length], expected)
            close(unmasked[row, :length], expected)
            close(on_the_left[row, 9 - length :], expected)


def test_adapters_share_the_weights_and_leave_them_as_they_are(decoder, base, adapters, adapter):
    pointers = {tensor.data_ptr() for tensor in decoder._model.state_dict().values()}
    saved = load_file(base / "model.safetensors")
    path = adapter / "adapter_config.json"  # of one that would initialise itself from the weights
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "mica"}))

    for name, directory in {**adapters, "mica": adapter}.items():
        decoder.add_adapter(name, directory)

    state = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in decoder._model.state_dict().items()
        if "lora_" not in name
    }
    assert {tensor.data_ptr() for tensor in state.values()} == pointers
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())


def test_threads_that_add_one_adapter_load_it_once(decoder, adapters, monkeypatch):
    import peft

    loads = []
    load = peft.set_peft_model_state_dict
    monkeypatch.setattr(
        peft, "set_peft_model_state_dict", lambda *args: (loads.append(args[1]), load(*args))
    )
    start = threading.Barrier(8)

    def add(number):
        start.wait()
        name = list(adapters)[number % 2]
        decoder.add_adapter(name, adapters[name])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))

    assert len(loads) == len({id(tensors) for tensors in loads}) == 2


# Adapters that bring more than low-rank updates, or put something else in a weight's place.
WIDE = {
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "block": {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]},
    "more layers": {"layer_replication": [[0, 2], [0, 2]]},
    "other layers": {"layer_replication": [[1, 2], [0, 1], [1, 2]], "modules_to_save": ["norm"]},
    "biases": {"bias": "all"},
    "some biases": {"bias": "lora_only", "use_dora": True},
    "tokens": {"trainable_token_indices": [5, 6, 7]},
    "matrices": {"target_parameters": ["down_proj.weight"], "target_modules": ["q_proj"]},
}
if hasattr(lora_config, "KasaConfig"):  # which peft 0.20 does not have
    WIDE["truncated"] = {"kasa_config": lora_config.KasaConfig()}


def train(directory, base, seed, **settings):
    """Save an adapter all of whose trainable numbers are changed."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], **settings})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for own in model.parameters():
            if own.requires_grad:
                own.add_(torch.randn_like(own) * 0.2)
    model.save_pretrained(directory)


def logits_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits[0]


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_adapters_of_every_kind_on_one_decoder_do_not_disturb_each_other(tmp_path, batch, is_tied):
    sizes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": is_tied}
    base, ids = write_decoder(tmp_path / "base", **sizes), batch[0][:1]
    decoder = load_decoder(base, CPU, torch.float32)
    expected = {None: logits_of(AutoModelForCausalLM.from_pretrained(base), ids)}
    for seed, (name, settings) in enumerate(WIDE.items()):
        train(tmp_path / name, base, seed, **settings)
        expected[name] = logits_of(oracle(base, tmp_path / name), ids)
        decoder.add_adapter(name, tmp_path / name)

    for name in [*expected, *reversed(expected)]:
        decoder.use(name)
        hidden = decoder.forward(ids)[0]
        close(decoder.logits(hidden), expected[name])
        close(decoder.logits(hidden, (5, 9)), expected[name][:, [5, 9]])


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "OLoRA"])
def test_an_adapter_of_changed_weights_is_refused_until_it_is_saved_as_the_refusal_says(
    decoder, base, tmp_path, batch, start
):
    ids = batch[0][:1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=start)
    model = get_peft_model(model, config)
    with torch.no_grad():
        model.peft_config["default"].init_lora_weights = True  # as peft's own guide says
        model.save_pretrained(tmp_path / "start")
        model.peft_config["default"].init_lora_weights = start
        for own in model.parameters():
            if own.requires_grad:
                own.add_(torch.randn_like(own) * 0.2)
    expected = logits_of(model.eval(), ids)
    model.save_pretrained(tmp_path / "as it is")
    convert = {"path_initial_model_for_weight_conversion": str(tmp_path / "start")}
    model.save_pretrained(tmp_path / "converted", **convert)

    with pytest.raises(CheckpointError, match="path_initial_model_for_weight_conversion"):
        decoder.add_adapter("as it is", tmp_path / "as it is")
    decoder.add_adapter("converted", tmp_path / "converted")

    decoder.use("converted")
    close(decoder.logits(decoder.forward(ids)[0]), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alora_invocation_tokens": [5, 6]}, "from these tokens on alone: train a plain LoRA"),
        ({"use_qalora": True}, "GPTQ quantised"),
        ({"monteclora_config": MontecloraConfig()}, "merge_and_unload"),
        ({"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}, "'lora_ga', which"),
    ],
    ids=str,
)
def test_an_adapter_that_would_be_applied_in_part_is_refused(
    decoder, base, tmp_path, settings, message
):
    train(tmp_path, base, 1, task_type="CAUSAL_LM", **settings)
    with pytest.raises(CheckpointError, match=message):
        decoder.add_adapter("it", tmp_path)


def test_every_declared_end_of_an_answer_is_one(base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    settings["eos_token_id"] = [7, 9]
    (model / "generation_config.json").write_text(json.dumps(settings))

    assert load_decoder(model, CPU, torch.float32).eos_ids == {EOS, 7, 9}


def test_another_model_and_tensors_or_files_that_are_missing_are_named(base, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:5].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError) as error:
        load_decoder(model, CPU, torch.float32)

    assert "1 tensors are missing: model.layers.1.self_attn.q_proj.weight" in str(error.value)
    assert "lm_head.weight (5, 32) instead of (64, 32)" in str(error.value)
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="loads from its files"):
        load_decoder(model, CPU, torch.float32)
    (model / "config.json").write_text(BertConfig(architectures=["BertModel"]).to_json_string())
    with pytest.raises(CheckpointError, match="model_type 'bert' and is a BertModel"):
        load_decoder(model, CPU, torch.float32)


def test_tensors_of_an_adapter_that_do_not_fit_are_named_and_leave_no_trace(
    decoder, base, adapters, adapter, batch
):
    prefix = "base_model.model.model.layers.0"

    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors["base_model.model.lm_head.lora_A.weight"]
    tensors[f"{prefix}.mlp.up_proj.lora_B.weight"] = torch.zeros(3, 4)
    tensors[f"{prefix}.mlp.up_proj.lora_C.weight"] = torch.zeros(3, 4)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        decoder.add_adapter("strict", adapter)

    assert "1 tensors are missing: base_model.model.lm_head.lora_A.weight" in str(error.value)
    assert f"{prefix}.mlp.up_proj.lora_B.weight (3, 4) instead of (48, 4)" in str(error.value)
    assert f"no part of the architecture: {prefix}.mlp.up_proj.lora_C.weight" in str(error.value)
    decoder.add_adapter("strict", adapters["strict"])
    decoder.use("strict")
    close(decoder.forward(batch[0]), states_of(oracle(base, adapters["strict"]), batch[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_modules": ["query_key_value"]}, "does not fit the model"),
        ({"peft_type": "IA3"}, "peft_type 'IA3', and only 'LORA'"),
    ],
)
def test_an_adapter_for_other_layers_or_of_another_kind_is_refused(
    decoder, adapter, change, message
):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(CheckpointError, match=message):
        decoder.add_adapter("strict", adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_an_adapter_lacks_is_named_and_pickles_are_no_replacement(
    decoder, adapter, name
):
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / name).unlink()

    with pytest.raises(CheckpointError, match=f"has no {name}"):
        decoder.add_adapter("strict", adapter)


def test_without_peft_the_error_says_how_to_get_it(decoder, adapters, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpuclassify\[safety\]'"):
        decoder.add_adapter("strict", adapters["strict"])


# What a decoder and its adapters must hold is known from their configurations alone.


def read_json(path):
    return json.loads(path.read_text())


def saved_shapes(path):
    return {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_shapes_are_those_of_the_files(tmp_path, key_heads, is_tied):
    base = write_decoder(tmp_path / "base", key_heads, tie_word_embeddings=is_tied)
    targets = ["q_proj", "k_proj", "down_proj"] if is_tied else ["v_proj", "lm_head"]
    adapter = write_adapter(tmp_path / "adapter", base, 1, targets)

    sizes = read_json(base / "config.json")
    network = decoder_without_memory(sizes)
    shapes = adapter_shapes(read_json(adapter / "adapter_config.json"), network)

    assert decoder_shapes(sizes) == saved_shapes(base / "model.safetensors")
    assert shapes == saved_shapes(adapter / "adapter_model.safetensors")


def test_settings_of_other_versions_of_peft_are_no_hindrance(tmp_path):
    base = write_decoder(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, 1)
    settings = read_json(adapter / "adapter_config.json")
    sizes = read_json(base / "config.json")
    expected = adapter_shapes(settings, decoder_without_memory(sizes))
    of_2024 = ("peft_type", "r", "lora_alpha", "target_modules", "task_type", "lora_dropout")

    older = {name: settings[name] for name in of_2024}
    newer = settings | {"a_setting_of_the_future": None}

    assert adapter_shapes(older, decoder_without_memory(sizes)) == expected
    with pytest.warns(UserWarning, match="a_setting_of_the_future"):
        assert adapter_shapes(newer, decoder_without_memory(sizes)) == expected
