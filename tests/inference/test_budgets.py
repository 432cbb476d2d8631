"""Measurements are kept in small files, which processes share and may lose."""

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from gpuclassify.inference.batch_memory import MOST_SAFETY_PERCENT, BatchMemory, unmeasured_limits
from gpuclassify.inference.budgets import (
    BudgetStore,
    budget_key,
    default_folder,
    find_budget,
)
from gpuclassify.inference.memory import BatchLimits, ScoreRule, cpu_limits

CUDA = torch.device("cuda")
BATCH_MEMORY = BatchMemory(1_000_000, 25_000)
SETTINGS = {
    "model": "owner/name@0123abc",
    "precision": "torch.bfloat16",
    "path": "packed",
    "widest": 512,
    "device_name": "NVIDIA H100",
    "total_bytes": 80 * 2**30,
}


@pytest.fixture
def store(tmp_path):
    return BudgetStore(tmp_path / "not" / "yet" / "there")


@pytest.fixture
def key():
    return budget_key(**SETTINGS)


def only_file(store):
    (path,) = store.folder.iterdir()
    return path


def own_levels(caplog):
    return [r.levelname for r in caplog.records if r.name.startswith("gpuclassify")]


class Gpu:
    """A device whose batches take 25,000 bytes a token, and which counts what it runs."""

    is_counted = True
    name = "NVIDIA H100"
    total_bytes = 8 * 2**30

    def __init__(self):
        self.probes = []
        self.free = 2**30

    def free_bytes(self):
        return self.free

    def held_bytes(self):
        return 2**28

    def probe(self, rows, width):
        self.probes.append((rows, width))

    def peak_bytes(self, action):
        action()
        rows, width = self.probes[-1]
        return 25_000 * rows * width


def find(gpu, store, **changes):
    options = {"model": "a", "precision": "bfloat16", "path": "packed", **changes}
    widest = options.pop("widest", 512)
    return find_budget(CUDA, gpu.probe, widest, memory=gpu, store=store, **options)


# Files.


def test_what_was_kept_is_found_again_by_an_equal_key_in_a_file_that_a_person_can_read(store, key):
    assert store.load(key) is None

    store.save(key, BATCH_MEMORY)

    assert BudgetStore(store.folder).load(dict(reversed(key.items()))) == BATCH_MEMORY
    content = json.loads(only_file(store).read_text())
    assert content == {"key": key, "batch_memory": asdict(BATCH_MEMORY)}
    assert content["key"]["model"] == "owner/name@0123abc"
    assert content["key"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", SETTINGS)
def test_another_model_precision_path_length_or_device_is_another_file(store, key, name):
    other = SETTINGS[name] * 2 if isinstance(SETTINGS[name], int) else SETTINGS[name] + " "
    store.save(key, BATCH_MEMORY)

    assert store.load(budget_key(**{**SETTINGS, name: other})) is None


@pytest.mark.parametrize("name", ["torch", "cuda", "transformers", "gpuclassify"])
def test_another_version_of_anything_that_matters_is_another_file(store, key, name):
    other = {**key, name: f"{key[name]}.post1"}
    store.save(key, BATCH_MEMORY)
    assert store.load(other) is None

    store.save(other, BatchMemory(5, 6))

    assert len(list(store.folder.iterdir())) == 2
    assert store.load(key) == BATCH_MEMORY


def test_a_model_whose_name_is_no_text_has_a_file_too(store):
    key = budget_key(**{**SETTINGS, "model": os.fsdecode(b"/models/\xff\xfe")})

    store.save(key, BATCH_MEMORY)

    assert store.load(key) == BATCH_MEMORY


NUMBERS = asdict(BATCH_MEMORY)


def broken(key):
    return {
        "empty": b"",
        "cut short": json.dumps({"key": key, "batch_memory": NUMBERS}).encode()[:-10],
        "not text": b"\xff\xfe\x00",
        "not an object": b"[1, 2]",
        "too deep": b"[" * 100_000,
        "null": b"null",
        "another key": json.dumps({"key": {**key, "model": "b"}, "batch_memory": NUMBERS}).encode(),
        "no batch_memory": json.dumps({"key": key}).encode(),
        "a number missing": json.dumps({"key": key, "batch_memory": {"fixed_bytes": 1}}).encode(),
        "a number more": json.dumps({"key": key, "batch_memory": {**NUMBERS, "x": 1}}).encode(),
        **{
            f"{name} = {value}": json.dumps(
                {"key": key, "batch_memory": {**NUMBERS, name: value}}
            ).encode()
            for name, value in [
                ("token_bytes", 0),
                ("token_bytes", -5),
                ("token_bytes", 2.5),
                ("token_bytes", True),
                ("token_bytes", "25000"),
                ("token_bytes", None),
                ("token_bytes", float("nan")),
                ("fixed_bytes", -1),
                ("safety_percent", 99),
                ("safety_percent", MOST_SAFETY_PERCENT + 1),
            ]
        },
    }


@pytest.mark.parametrize("kind", broken({}))
def test_a_broken_file_is_as_good_as_none_and_is_replaced(store, key, kind, caplog):
    store.save(key, BatchMemory(1, 1))
    only_file(store).write_bytes(broken(key)[kind])

    with caplog.at_level(logging.DEBUG):
        assert store.load(key) is None
    assert own_levels(caplog) == ["DEBUG"]
    store.save(key, BATCH_MEMORY)
    assert store.load(key) == BATCH_MEMORY


def test_a_directory_in_a_files_place_stays_and_stops_nobody(store, key):
    store.save(key, BATCH_MEMORY)
    path = only_file(store)
    path.unlink()
    (path / "mine").mkdir(parents=True)

    assert store.load(key) is None
    store.save(key, BATCH_MEMORY)

    assert only_file(store) == path  # and no draft beside it
    assert (path / "mine").is_dir()


def test_without_a_folder_or_with_one_that_cannot_be_made_nothing_is_kept(tmp_path, key, caplog):
    (tmp_path / "file").write_text("in the way")
    for folder in (None, tmp_path / "file" / "budgets"):
        with caplog.at_level(logging.DEBUG):
            BudgetStore(folder).save(key, BATCH_MEMORY)

        assert BudgetStore(folder).load(key) is None
    assert set(own_levels(caplog)) <= {"DEBUG"}


def test_what_is_known_is_never_made_smaller(store, key):
    store.save(key, BatchMemory(100, 20, 300))

    store.save(key, BatchMemory(50, 30, 100))

    assert store.load(key) == BatchMemory(100, 30, 300)


# Several at once.


def test_threads_that_write_and_read_at_once_see_whole_files_only(store, key):
    start = threading.Barrier(6)
    store.save(key, BATCH_MEMORY)

    def work(number):
        start.wait()
        for percent in range(100, 200):
            store.save(key, BatchMemory(1_000_000, 25_000, percent + number))
            found = store.load(key)
            assert found is not None
            assert found.token_bytes == 25_000

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert only_file(store).suffix == ".json"


# Where.


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == tmp_path / ".cache" / "gpuclassify" / "budgets"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert default_folder() == tmp_path / "elsewhere" / "gpuclassify" / "budgets"


def test_the_folder_is_where_each_system_has_its_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert default_folder() == tmp_path / "Local" / "gpuclassify" / "budgets"

    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert default_folder() == tmp_path / "Library" / "Caches" / "gpuclassify" / "budgets"


def test_a_user_without_a_home_keeps_nothing(monkeypatch, key):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")

    def no_home(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)

    assert default_folder() is None


# Budgets.


def test_a_model_is_measured_by_the_first_process_and_never_by_a_later_one(store):
    first, later = Gpu(), Gpu()

    budget = find(first, store)
    again = find(later, store)

    assert first.probes == [(4, 512), (4, 512), (16, 512)]
    assert later.probes == []
    find(later, store, path="padded")
    assert later.probes
    assert budget.batch_memory == again.batch_memory == BatchMemory(0, 25_000)


def test_a_lost_or_broken_file_is_measured_again(store):
    find(Gpu(), store)
    only_file(store).write_text("{")

    gpu = Gpu()
    assert find(gpu, store).batch_memory == BatchMemory(0, 25_000)
    assert gpu.probes
    assert find(Gpu(), store).batch_memory == BatchMemory(0, 25_000)


def test_a_model_that_nothing_identifies_is_measured_and_not_kept(store):
    gpu = Gpu()

    assert find(gpu, store, model=None).batch_memory == BatchMemory(0, 25_000)
    assert gpu.probes
    assert not store.folder.exists()


def test_limits_are_those_of_the_memory_that_is_free_when_they_are_asked_for(store):
    gpu = Gpu()
    budget = find(gpu, store, score_rule=ScoreRule(12, 512, 2))

    gpu.free = 1_000_000_000
    assert budget.limits().max_tokens == 32_000
    assert budget.limits().max_score_bytes == 800_000_000
    gpu.free = 250_000_000
    assert budget.limits().max_tokens == 8_000
    assert budget.limits().score_rule == ScoreRule(12, 512, 2)


def test_a_correction_reaches_the_next_process(store):
    gpu = Gpu()
    gpu.free = 1_000_000_000
    find(gpu, store).correct(32, 1_000)

    assert find(gpu, store).limits().max_tokens <= 16_000
    assert find(gpu, store, path="padded").limits().max_tokens == 32_000


def test_a_cpu_has_known_limits_and_neither_probes_nor_files(store):
    def probe(rows, width):
        pytest.fail("a probe ran")

    rule = ScoreRule(12, 512, 4)
    found = find_budget(torch.device("cpu"), probe, 512, model="a", score_rule=rule, store=store)

    assert found == cpu_limits(rule) == BatchLimits(1_024, None, rule, 64 * 2**20)
    assert not store.folder.exists()


def test_a_gpu_whose_memory_is_not_counted_has_known_limits(store):
    gpu = Gpu()
    gpu.is_counted = False

    assert find(gpu, store) == unmeasured_limits()
    assert gpu.probes == []


def test_no_environment_variable_is_written(store):
    before = dict(os.environ)

    find(Gpu(), store)
    default_folder()

    assert dict(os.environ) == before


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_measured_once_and_kept(store, sequence_classifier):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(sequence_classifier()).to(CUDA)
    ran = []

    @torch.inference_mode()
    def probe(rows, width):
        ran.append((rows, width))
        model(input_ids=torch.ones(rows, width, dtype=torch.int64, device=CUDA))

    widest = model.config.max_position_embeddings
    first = find_budget(CUDA, probe, widest, model="a", store=store)
    count = len(ran)
    later = find_budget(CUDA, probe, widest, model="a", store=store)

    assert 1 <= count <= 7
    assert len(ran) == count
    assert later.batch_memory == first.batch_memory
    probe(first.limits().rows(widest), widest)
