"""What batches take: measured on a few, planned for the memory that is free, kept in files."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from weakref import finalize

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpuclassify.inference.batching import cut_batches
from gpuclassify.inference.memory import (
    GPU_SCORE_BYTES,
    GPU_SHARE,
    MOST_SAFETY_PERCENT,
    PROBE_TOKENS,
    BatchMemory,
    BudgetStore,
    LimitMemory,
    MeasuredBudget,
    ScoreRule,
    budget_key,
    default_folder,
    find_budget,
    halve_on_oom,
    measure_batch_memory,
    plan_limits,
    unmeasured_limits,
)

CUDA = torch.device("cuda")
GIB = 2**30
FREE = st.integers(0, 200 * GIB)
BATCH_MEMORIES = st.builds(
    BatchMemory,
    st.integers(0, 4 * GIB),
    st.integers(1, 2**26),
    st.integers(100, MOST_SAFETY_PERCENT),
)


class FakeGpu:
    """A device that other programs use too, and a model whose batches take as much as is told."""

    is_counted = True
    name = "Fake 8 GB"
    total_bytes = 8 * GIB

    def __init__(self, batch_bytes):
        self.batch_bytes = batch_bytes
        self.taken_bytes = GIB  # by other programs
        self.model_bytes = 0
        self.ran = []
        self._peak = 0

    def free_bytes(self):
        return self.total_bytes - self.taken_bytes - self.model_bytes

    def held_bytes(self):
        return self.model_bytes

    def forward(self, rows, width):
        needed = self.batch_bytes(rows, width)
        if needed > self.free_bytes():
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.ran.append((rows, width))
        self._peak = max(self._peak, needed)

    def peak_bytes(self, action):
        self._peak = 0
        action()
        return self._peak

    def measure(self, widest):
        return measure_batch_memory(self.forward, widest, self.peak_bytes)


def run_partition(gpu, run, lengths):
    """As the engine does; how many times memory ran out."""
    failures = []
    for start, stop in cut_batches(lengths, run.current):
        width = int(lengths[start:stop].max())

        def step(first, last, width=width):
            gpu.forward(last - first, width)

        def remember(rows, width=width):
            failures.append(rows)
            run.lower(rows, width)

        halve_on_oom(step, 0, stop - start, remember)
    return len(failures)


# Measuring.


@pytest.mark.parametrize("widest", [1, 64, 512, 5_000, 100_000])
@pytest.mark.parametrize(("fixed", "token"), [(0, 30_000), (10**8, 30_000), (10**6, 7)])
def test_what_every_batch_takes_and_what_tokens_take_are_told_apart(widest, fixed, token):
    gpu = FakeGpu(lambda rows, width: fixed + token * rows * width)

    assert gpu.measure(widest) == BatchMemory(fixed, token)
    assert max(rows * width for rows, width in gpu.ran) <= PROBE_TOKENS
    assert len(gpu.ran) == 3


@given(st.integers(1, 3_000), st.integers(0, 10**8), st.integers(1, 40_000), st.integers(0, 40))
def test_planned_bytes_are_enough_for_batches_as_wide_as_measured(widest, fixed, token, pair):
    """Also where attention takes memory for each pair of tokens."""
    gpu = FakeGpu(lambda rows, width: fixed + rows * width * (token + pair * width))

    batch_memory = gpu.measure(widest)

    rows, width = gpu.ran[-1]
    for more in (1, 2, 7):
        assert batch_memory.size_bytes(rows * width * more) >= gpu.batch_bytes(rows * more, width)


@pytest.mark.parametrize("most_tokens", [5_000, 300, 1])
def test_a_probe_that_does_not_fit_is_halved_until_it_does(most_tokens):
    token = 7 * GIB // most_tokens
    gpu = FakeGpu(lambda rows, width: token * rows * width)

    assert gpu.measure(512) == BatchMemory(0, token)
    assert all(rows * width <= most_tokens for rows, width in gpu.ran)


def test_a_token_that_does_not_fit_and_a_defect_are_errors():
    with pytest.raises(torch.OutOfMemoryError):
        FakeGpu(lambda rows, width: 9 * GIB).measure(512)

    def defect(rows, width):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="assert"):
        FakeGpu(defect).measure(512)


class CountedTensors(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, until they are gone."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self._known.discard(key)
        self.now -= size

    def peak_bytes(self, action):
        self.peak = self.now
        before = self.now
        action()
        return self.peak - before


SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "pad_token_id": 0,
}
MODELS = {
    "bert": transformers.BertConfig(**SIZES),
    "deberta": transformers.DebertaV2Config(
        **SIZES, relative_attention=True, position_buckets=32, pos_att_type=["c2p", "p2c"]
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_real_models_take_is_planned_for_batches_of_every_shape(name):
    model = transformers.AutoModelForSequenceClassification.from_config(MODELS[name]).eval()

    def forward(rows, width):
        ids = torch.ones(rows, width, dtype=torch.int64)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        model(input_ids=ids, attention_mask=mask)

    with torch.inference_mode(), CountedTensors() as counted:
        batch_memory = measure_batch_memory(forward, 128, counted.peak_bytes)
        for rows, width in [(200, 128), (1_000, 16), (60, 100), (16, 128), (40, 3), (2, 50)]:
            taken = counted.peak_bytes(lambda r=rows, w=width: forward(r, w))
            planned = batch_memory.size_bytes(rows * width)
            assert planned >= 0.98 * taken
            if width == 128:
                assert planned <= 1.05 * taken


# Planning.


@given(
    BATCH_MEMORIES, FREE, st.lists(st.integers(1, 9_000), min_size=1, max_size=60), st.booleans()
)
@settings(max_examples=300)
def test_no_batch_is_planned_for_more_than_its_share_unless_it_is_one_row(
    batch_memory, free, lengths, is_packed
):
    limits = replace(plan_limits(batch_memory, free), is_packed=is_packed)
    lengths = -np.sort(-np.array(lengths))

    for start, stop in cut_batches(lengths, lambda: limits):
        rows = stop - start
        width = int(lengths[start])
        tokens = int(lengths[start:stop].sum()) if is_packed else rows * width
        assert rows == 1 or batch_memory.size_bytes(tokens) <= GPU_SHARE * free


@given(BATCH_MEMORIES, FREE, st.integers(1, 3_000), st.integers(1, 64))
def test_scores_stay_within_the_share_too(batch_memory, free, width, heads):
    rule = ScoreRule(heads, 512, 2)

    rows = plan_limits(batch_memory, free, rule).rows(width)

    assert rows == 1 or rule.size_bytes(rows, width) <= min(GPU_SHARE * free, GPU_SCORE_BYTES)


@given(BATCH_MEMORIES, FREE, FREE)
def test_more_free_memory_never_means_smaller_batches(batch_memory, one, other):
    less, more = sorted([one, other])

    assert plan_limits(batch_memory, less).max_tokens <= plan_limits(batch_memory, more).max_tokens


@given(BATCH_MEMORIES, st.integers(0, 200 * GIB))
def test_as_much_is_planned_as_fits(batch_memory, usable):
    tokens = batch_memory.most_tokens(usable)

    assert tokens == 0 or batch_memory.size_bytes(tokens) <= usable
    assert batch_memory.size_bytes(tokens + 1) >= usable - batch_memory.safety_percent // 100


# Learning.


@given(BATCH_MEMORIES, st.integers(2, 200_000), FREE)
def test_after_a_failure_half_of_that_batch_is_planned_or_less(batch_memory, tokens, more):
    free = batch_memory.size_bytes(tokens) + more

    corrected = batch_memory.after_failure(tokens, free)

    assert batch_memory.safety_percent <= corrected.safety_percent <= MOST_SAFETY_PERCENT
    if corrected.safety_percent < MOST_SAFETY_PERCENT:
        assert plan_limits(corrected, free).max_tokens <= tokens // 2


@given(BATCH_MEMORIES, FREE, st.integers(1, 200_000))
def test_a_failure_for_which_others_are_to_blame_corrects_nothing(batch_memory, free, tokens):
    assume(batch_memory.size_bytes(tokens) > free)

    assert batch_memory.after_failure(tokens, free) == batch_memory


def test_only_a_correction_is_saved():
    saved, gpu = [], FakeGpu(None)
    budget = MeasuredBudget(BatchMemory(0, 2**20), gpu, save=saved.append)

    gpu.taken_bytes = 7 * GIB
    budget.correct(10, 500)  # 5,000 MiB where 1,024 are free
    assert saved == []

    gpu.taken_bytes = 0
    budget.correct(10, 500)
    assert saved == [BatchMemory(0, 2**20, 263)]  # 80% of 8,192 MiB for 2,500 tokens
    assert budget.limits().max_tokens <= 2_500


@given(BATCH_MEMORIES, FREE, st.integers(0, 100 * GIB))
def test_what_is_planned_is_what_is_held_and_one_batch(batch_memory, free, held):
    gpu = FakeGpu(None)
    gpu.model_bytes, gpu.taken_bytes = held, gpu.total_bytes - held - free
    budget = MeasuredBudget(batch_memory, gpu)

    limits = budget.limits()
    assert limits.planned_bytes == held + batch_memory.size_bytes(limits.max_tokens)
    if limits.max_tokens > 1:  # one token has to be tried, whatever is free
        assert limits.planned_bytes <= held + free


def test_corrections_by_several_threads_end_at_the_largest():
    gpu = FakeGpu(None)
    gpu.taken_bytes = 0
    budget = MeasuredBudget(BatchMemory(0, 2**20), gpu)
    start = threading.Barrier(4)

    def correct(width):
        start.wait()
        for _ in range(100):
            budget.correct(10, width)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(correct, [400, 500, 600, 700]))

    assert budget.batch_memory == BatchMemory(0, 2**20).after_failure(4_000, 8 * GIB)


# All of it, on a device of our own.

LENGTHS = -np.sort(-np.random.default_rng(0).integers(5, 513, 3_000))


def test_memory_that_vanishes_during_a_run_is_survived_and_no_fault_of_what_was_measured():
    gpu = FakeGpu(lambda rows, width: 200_000 * rows * width)
    saved = []
    budget = MeasuredBudget(gpu.measure(512), gpu, save=saved.append)
    run = LimitMemory().for_run("a", lambda: budget)
    run.current()
    gpu.taken_bytes = 6 * GIB

    gpu.ran.clear()
    assert run_partition(gpu, run, LENGTHS) == 2  # a quarter of the memory
    assert sum(rows for rows, _ in gpu.ran) == len(LENGTHS)
    assert saved == []


def test_a_model_that_takes_more_than_was_measured_runs_out_of_memory_in_one_process_only():
    def batch_bytes(rows, width):
        tokens = rows * width
        return 200_000 * (tokens + 2 * max(0, tokens - PROBE_TOKENS))

    gpu, kept = FakeGpu(batch_bytes), []
    first = MeasuredBudget(gpu.measure(512), gpu, save=kept.append)
    memory = LimitMemory()

    assert run_partition(gpu, memory.for_run("a", lambda: first), LENGTHS) > 0
    assert run_partition(gpu, memory.for_run("a", lambda: first), LENGTHS) == 0
    later = MeasuredBudget(kept[-1], gpu)
    assert run_partition(gpu, LimitMemory().for_run("a", lambda: later), LENGTHS) == 0


# What is kept in files.

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


def gpu_of(token_bytes):
    return FakeGpu(lambda rows, width: token_bytes * rows * width)


def find(gpu, store, **changes):
    options = {"model": "a", "precision": "bfloat16", "path": "packed", **changes}
    widest = options.pop("widest", 512)
    return find_budget(CUDA, gpu.forward, widest, memory=gpu, store=store, **options)


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


@pytest.mark.parametrize(
    ("system", "is_set", "folder"),
    [
        ("Linux", True, "elsewhere"),
        ("Linux", False, ".cache"),
        ("Windows", False, "Local"),
        ("Darwin", False, "Library/Caches"),
    ],
)
def test_the_folder_is_where_each_system_has_its_caches(
    monkeypatch, tmp_path, system, is_set, folder
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere") if is_set else "")
    monkeypatch.setattr("platform.system", lambda: system)
    assert default_folder() == tmp_path / folder / "gpuclassify" / "budgets"


def test_a_user_without_a_home_keeps_nothing(monkeypatch, key):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")

    def no_home(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)

    assert default_folder() is None


# Budgets.


def test_a_model_is_measured_by_the_first_process_and_never_by_a_later_one(store):
    first, later = gpu_of(25_000), gpu_of(25_000)

    budget = find(first, store)
    again = find(later, store)

    assert first.ran == [(4, 512), (4, 512), (16, 512)]
    assert later.ran == []
    find(later, store, path="padded")
    assert later.ran
    assert budget.batch_memory == again.batch_memory == BatchMemory(0, 25_000)


def test_a_model_that_nothing_identifies_is_measured_and_not_kept(store):
    gpu = gpu_of(25_000)

    assert find(gpu, store, model=None).batch_memory == BatchMemory(0, 25_000)
    assert gpu.ran
    assert not store.folder.exists()


def test_a_correction_reaches_the_next_process(store):
    gpu = gpu_of(25_000)
    gpu.taken_bytes = gpu.total_bytes - 1_000_000_000
    find(gpu, store).correct(32, 1_000)

    assert find(gpu, store).limits().max_tokens <= 16_000
    assert find(gpu, store, path="padded").limits().max_tokens == 32_000


def test_a_gpu_whose_memory_is_not_counted_has_known_limits(store):
    gpu = gpu_of(25_000)
    gpu.is_counted = False

    assert find(gpu, store) == unmeasured_limits()
    assert gpu.ran == []


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
