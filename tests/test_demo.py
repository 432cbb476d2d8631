"""The demonstration: its documents, its cached model, and the job that it runs."""

import functools
import io
import json
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from examples.demo import corpus, run, training
from examples.demo.corpus import AREAS, Document, collect_documents, split_documents
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
def docstrings():
    return collect_documents(max_documents=700)


def test_two_processes_collect_the_same_documents_in_the_same_order(docstrings):
    program = (
        "import json; from examples.demo.corpus import collect_documents;"
        "print(json.dumps([[d.text, d.area, d.module] for d in"
        " collect_documents(max_documents=700)]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(output) == [[d.text, d.area, d.module] for d in docstrings]


def test_every_area_contributes_its_equal_share(docstrings):
    assert Counter(d.area for d in docstrings) == dict.fromkeys(AREAS, 700 // len(AREAS))


def test_the_longest_prefix_decides_the_area():
    assert corpus._area_of("numpy.ma.core") == "Data_Tables"
    assert corpus._area_of("numpy.linalg._linalg") == "Mathematics"
    assert corpus._area_of("numpyro") is None


def test_tests_and_vendored_copies_are_left_out_unless_named():
    assert corpus._area_of("pandas.tests.frame") is None
    assert corpus._area_of("pip._vendor.rich.console") is None
    assert corpus._area_of("pip._vendor.requests.api") == "Networking"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_package_and_no_text_stands_in_both_halves(docstrings, seed):
    training, held_out = split_documents(docstrings, seed)
    assert not {d.package for d in training} & {d.package for d in held_out}
    assert not {d.text for d in training} & {d.text for d in held_out}
    assert len(training) + len(held_out) == len(docstrings)


def test_both_halves_hold_every_area_about_evenly(docstrings):
    training, held_out = split_documents(docstrings)
    for area in AREAS:
        share = [d.area for d in training].count(area) / (700 // len(AREAS))
        assert 0.3 < share < 0.7
    assert {d.area for d in held_out} == set(AREAS)


def test_a_held_out_copy_of_a_training_text_is_dropped():
    documents = [
        Document("The same words, everywhere.", "A", "one.module"),
        Document("the same WORDS everywhere", "A", "two.module"),
    ]
    training, held_out = split_documents(documents)
    assert len(training) == 1
    assert held_out == []


@pytest.fixture(scope="module")
def documents():
    generator = np.random.default_rng(0)
    return [
        Document(f"The {' and the '.join(generator.choice(words, 6))}.", area, f"package{n % 5}.m")
        for n in range(40)
        for area, words in WORDS.items()
    ]


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


@pytest.fixture
def quick():
    return Settings(vocabulary=200, width=16, heads=1, steps=2)


def test_a_short_training_learns_the_training_half(documents, tmp_path):
    checkpoint = train(documents, tmp_path / "model", settings=TINY)
    labels = predicted(checkpoint, [document.text for document in documents])
    right = [label == d.area for label, d in zip(labels, documents, strict=True)]
    assert np.mean(right) > 0.9


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


def test_the_whole_demo_runs_the_main_job_and_counts_honestly(tmp_path, monkeypatch):
    quick = functools.partial(
        training.cached_model, cache_dir=tmp_path / "cache", settings=Settings(steps=20)
    )
    monkeypatch.setattr(run, "cached_model", quick)
    monkeypatch.setattr(run, "is_cached", lambda max_documents: False)
    console = Console(file=io.StringIO())
    result = run.run_demo(tmp_path / "demo", console, max_documents=600)
    held_out = pd.concat(
        pd.read_json(file, lines=True) for file in sorted((tmp_path / "demo/input").iterdir())
    )
    labelled = pd.read_parquet(result.output)
    assert labelled["text"].tolist() == held_out["text"].tolist()
    assert result.accuracy == (labelled["area"] == labelled["domain_pred"]).mean()
    assert result.majority_share == held_out["area"].value_counts(normalize=True).max()
    assert result.job.rows_in == result.job.rows_out == len(held_out)
    first, *rest = console.file.getvalue().splitlines()
    assert first.strip() == "collecting docstrings"
    assert any(line.startswith("training on") for line in rest)
    json.dumps(result.as_dict())
