"""What a decoder and its adapters must hold is known from their configurations alone."""

import json

import pytest
from safetensors.torch import load_file

from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.questions.lora import adapter_shapes, decoder_shapes
from tests.decoder_oracle import write_adapter, write_decoder

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def saved_shapes(path):
    return {name: tuple(tensor.shape) for name, tensor in load_file(path).items()}


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_shapes_are_those_of_the_files(tmp_path, key_heads, is_tied):
    base = write_decoder(tmp_path / "base", key_heads, tie_word_embeddings=is_tied)
    targets = ["q_proj", "k_proj", "down_proj"] if is_tied else ["v_proj", "lm_head"]
    adapter = write_adapter(tmp_path / "adapter", base, 1, targets)

    sizes = read(base / "config.json")
    shapes = adapter_shapes(read(adapter / "adapter_config.json"), sizes)

    assert decoder_shapes(sizes) == saved_shapes(base / "model.safetensors")
    assert shapes == saved_shapes(adapter / "adapter_model.safetensors")


def test_settings_of_other_versions_of_peft_are_no_hindrance(tmp_path):
    base = write_decoder(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, 1)
    settings = read(adapter / "adapter_config.json")
    expected = adapter_shapes(settings, read(base / "config.json"))
    of_2024 = ("peft_type", "r", "lora_alpha", "target_modules", "task_type", "lora_dropout")

    older = {name: settings[name] for name in of_2024}
    newer = settings | {"a_setting_of_the_future": None}

    assert adapter_shapes(older, read(base / "config.json")) == expected
    with pytest.warns(UserWarning, match="a_setting_of_the_future"):
        assert adapter_shapes(newer, read(base / "config.json")) == expected


def test_layers_that_the_decoder_lacks_are_named(tmp_path):
    base = write_decoder(tmp_path / "base")
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["query_key_value"]}

    with pytest.raises(CheckpointError, match="query_key_value"):
        adapter_shapes(settings, read(base / "config.json"))
