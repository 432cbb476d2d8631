import hashlib
import json
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from examples.demo import training
from examples.demo.corpus import Document
from examples.demo.training import Settings, cached_model, train, trained_on

TINY = Settings(
    vocabulary=300,
    width=32,
    heads=2,
    steps=120,
    batch_documents=16,
    max_kept_share=0.8,
    learning_rate=5e-3,
)
WORDS = {
    "Cooking": ["onion", "pan", "salt", "boil", "oven", "butter", "pepper", "dough", "stew"],
    "Sailing": ["mast", "sail", "rope", "anchor", "wind", "harbour", "deck", "keel", "tide"],
    "Trains": ["rail", "engine", "platform", "signal", "whistle", "carriage", "ticket", "line"],
}


@pytest.fixture(scope="module")
def documents():
    generator = np.random.default_rng(0)
    return [
        Document(f"The {' and the '.join(generator.choice(words, 6))}.", area, f"package{n % 5}.m")
        for n in range(40)
        for area, words in WORDS.items()
    ]


@pytest.fixture(scope="module")
def checkpoint(documents, tmp_path_factory):
    return train(documents, tmp_path_factory.mktemp("demo") / "model", settings=TINY)


def predicted(checkpoint, texts):
    """Labels by plain transformers, as the model card of the published classifier does it."""
    config = json.loads((checkpoint / "config.json").read_text())
    backbone = AutoModel.from_config(AutoConfig.from_pretrained(checkpoint / config["base_model"]))
    tensors = load_file(checkpoint / "model.safetensors")
    weight, bias = tensors.pop("fc.weight"), tensors.pop("fc.bias")
    backbone.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
    batch = AutoTokenizer.from_pretrained(checkpoint)(
        texts, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False
    )
    with torch.inference_mode():
        states = backbone.eval()(**batch).last_hidden_state
    ids = (states @ weight.T + bias)[:, 0].argmax(dim=1).tolist()
    return [config["id2label"][str(index)] for index in ids]


def test_a_short_training_learns_the_training_half(checkpoint, documents):
    labels = predicted(checkpoint, [document.text for document in documents])
    right = [label == d.area for label, d in zip(labels, documents, strict=True)]
    assert np.mean(right) > 0.9


def test_config_has_the_published_keys_and_form(checkpoint):
    text = (checkpoint / "config.json").read_text()
    config = json.loads(text)
    assert text == json.dumps(config, sort_keys=True, indent=2)
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert config == {
        "base_model": "backbone",
        "config_path": None,
        "fc_dropout": 0.2,
        "id2label": {"0": "Cooking", "1": "Sailing", "2": "Trains"},
        "label2id": {"Cooking": 0, "Sailing": 1, "Trains": 2},
        "model_type": "deberta-v2",
        "pretrained": True,
        "transformers_weights": "model.safetensors",
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }


def test_state_dict_is_the_backbone_under_model_and_a_linear_fc(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    config = AutoConfig.from_pretrained(checkpoint / "backbone")
    expected = {f"model.{name}" for name in AutoModel.from_config(config).state_dict()}
    assert set(tensors) == expected | {"fc.weight", "fc.bias"}
    assert tensors["fc.weight"].shape == (3, TINY.width)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_backbone_differs_from_the_published_one_in_sizes_only(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint / "backbone")
    assert config.model_type == "deberta-v2"
    assert (config.hidden_size, config.num_hidden_layers) == (TINY.width, TINY.layers)
    assert config.relative_attention and config.share_att_key
    assert config.type_vocab_size == 0
    assert not config.position_biased_input


def test_tokenizer_loads_with_the_published_special_tokens(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, len(tokenizer) - 1]
    assert tokenizer.model_max_length == 512
    ids = tokenizer("Salt, and 漢!")["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert 3 in ids
    assert ids == tokenizer("SALT, and 漢!")["input_ids"]


def test_tokenizer_ids_fit_the_embedding(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    rows = tensors["model.embeddings.word_embeddings.weight"].shape[0]
    assert rows == len(AutoTokenizer.from_pretrained(checkpoint)) <= TINY.vocabulary


def test_training_twice_gives_the_same_weights(checkpoint, documents, tmp_path):
    again = load_file(train(documents, tmp_path, settings=TINY) / "model.safetensors")
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        torch.testing.assert_close(again[name], tensor)


def test_global_random_state_and_thread_count_are_left_alone(documents, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    train(documents, tmp_path, settings=Settings(vocabulary=200, width=16, heads=1, steps=2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.get_num_threads() == before[2]


def test_progress_rises_to_one_and_reports_the_loss(documents, tmp_path):
    seen = []
    settings = Settings(vocabulary=200, width=16, heads=1, steps=4)
    train(documents, tmp_path, settings=settings, on_progress=lambda *step: seen.append(step))
    assert [share for share, _ in seen] == [0.25, 0.5, 0.75, 1.0]
    assert all(np.isfinite(loss) for _, loss in seen)


def test_the_time_limit_ends_training_with_a_usable_checkpoint(documents, tmp_path, caplog):
    seen = []
    train(
        documents,
        tmp_path,
        seconds_limit=0.0,
        settings=TINY,
        on_progress=lambda *step: seen.append(step),
    )
    assert len(seen) == 1
    assert "stopped at its time limit" in caplog.text
    assert set(predicted(tmp_path, ["The mast."])) <= set(WORDS)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_areas_are_refused(documents, tmp_path, count):
    with pytest.raises(ValueError, match="needs two or more"):
        train(documents[:count], tmp_path)


@pytest.fixture
def quick():
    return Settings(vocabulary=200, width=16, heads=1, steps=2)


def test_the_cache_answers_the_second_call(documents, tmp_path, quick):
    first = cached_model(documents, cache_dir=tmp_path, settings=quick)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    seen = []
    second = cached_model(
        documents, cache_dir=tmp_path, settings=quick, on_progress=lambda *step: seen.append(step)
    )
    assert second == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert seen == []


def test_other_settings_code_and_libraries_have_their_own_cache(
    documents, tmp_path, quick, monkeypatch
):
    other = Settings(vocabulary=200, width=16, heads=1, steps=1)
    keys = {
        training._digest(None, quick),
        training._digest(None, other),
        training._digest(600, quick),
    }
    with monkeypatch.context() as patch:
        patch.setattr(training, "version", lambda name: "0.0")
        keys.add(training._digest(None, quick))
    (tmp_path / "training.py").write_text("# other code")
    monkeypatch.setattr(training, "__file__", str(tmp_path / "training.py"))
    keys.add(training._digest(None, quick))
    assert len(keys) == 5


def test_a_package_installed_since_does_not_train_again(documents, tmp_path, quick):
    first = cached_model(documents, cache_dir=tmp_path, settings=quick)
    new = Document("The newest of all masts.", "Sailing", "newcomer.m")
    assert cached_model([*documents[3:], new], cache_dir=tmp_path, settings=quick) == first
    assert trained_on(first) == documents


def test_an_interrupted_training_leaves_nothing_in_the_cache(documents, tmp_path, quick):
    def interrupt(share, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_model(documents, cache_dir=tmp_path, settings=quick, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert (cached_model(documents, cache_dir=tmp_path, settings=quick) / "config.json").is_file()


def test_a_killed_training_is_not_taken_for_a_model(tmp_path):
    program = f"""
import os, signal, sys
from examples.demo.corpus import Document
from examples.demo.training import Settings, cached_model
documents = [Document("A mast and a sail.", "A", "a.m"), Document("A rail, a line.", "B", "b.m")]
settings = Settings(vocabulary=100, width=16, heads=1, steps=1)
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cached_model(documents, cache_dir={str(tmp_path)!r}, settings=settings, on_progress=kill)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name[0] for path in tmp_path.iterdir()] == ["."]
    documents = [
        Document("A mast and a sail.", "A", "a.m"),
        Document("A rail, a line.", "B", "b.m"),
    ]
    settings = Settings(vocabulary=100, width=16, heads=1, steps=1)
    found = cached_model(documents, cache_dir=tmp_path, settings=settings)
    assert (found / "model.safetensors").is_file()
    assert list(tmp_path.iterdir()) == [found]


def test_of_two_trainings_the_first_to_finish_is_kept(documents, tmp_path, quick):
    final = tmp_path / training._digest(None, quick)

    def overtake(share, loss):
        if share == 1.0:
            final.mkdir()
            (final / "config.json").write_text("{}")

    assert cached_model(documents, cache_dir=tmp_path, settings=quick, on_progress=overtake)
    assert [path.name for path in tmp_path.iterdir()] == [final.name]
    assert (final / "config.json").read_text() == "{}"


def test_the_default_cache_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert training.default_cache_dir() == tmp_path / "gpuclassify" / "demo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(training.platform, "system", lambda: "Linux")
    assert training.default_cache_dir() == tmp_path / "home" / ".cache" / "gpuclassify" / "demo"
