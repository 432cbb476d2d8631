"""What batches take: measured on a few, planned for the memory that is free, kept in files."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
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
    GPU_UNMEASURED_TOKENS,
    MOST_SAFETY_PERCENT,
    PROBE_TOKENS,
    BatchMemory,
    Budget,
    BudgetFile,
    RunLimits,
    ScoreRule,
    budget_key,
    default_folder,
    find_budget,
    halve_on_oom,
    measure_batch_memory,
    plan_limits,
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


@pytest.fixture(autouse=True)
def budgets(monkeypatch):
    monkeypatch.setattr("gpuclassify.inference.memory.BUDGETS", {})


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


@given(BATCH_MEMORIES, st.integers(0, 200 * GIB))
def test_as_much_is_planned_as_fits(batch_memory, usable):
    tokens = batch_memory.most_tokens(usable)

    assert tokens == 0 or batch_memory.size_bytes(tokens) <= usable
    assert batch_memory.size_bytes(tokens + 1) >= usable - batch_memory.safety_percent // 100


# Learning.


@given(BATCH_MEMORIES, st.integers(2, 200_000), FREE)
def test_after_a_failure_half_of_that_batch_is_planned_or_less(batch_memory, tokens, more):
    free = batch_memory.size_bytes(tokens) + more

    corrected = batch_memory.corrected(tokens, free)

    assert batch_memory.safety_percent <= corrected.safety_percent <= MOST_SAFETY_PERCENT
    if corrected.safety_percent < MOST_SAFETY_PERCENT:
        assert plan_limits(corrected, free).max_tokens <= tokens // 2


@given(BATCH_MEMORIES, FREE, st.integers(1, 200_000))
def test_a_failure_for_which_others_are_to_blame_corrects_nothing(batch_memory, free, tokens):
    assume(batch_memory.size_bytes(tokens) > free)

    assert batch_memory.corrected(tokens, free) == batch_memory


# All of it, on a device of our own.

LENGTHS = -np.sort(-np.random.default_rng(0).integers(5, 513, 3_000))


def test_memory_that_vanishes_during_a_run_is_survived_and_no_fault_of_what_was_measured():
    gpu = FakeGpu(lambda rows, width: 200_000 * rows * width)
    saved = []
    budget = Budget(gpu.measure(512), gpu, save=saved.append)
    run = RunLimits("a", lambda: budget)
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
    first = Budget(gpu.measure(512), gpu, save=kept.append)

    assert run_partition(gpu, RunLimits("a", lambda: first), LENGTHS) > 0
    assert run_partition(gpu, RunLimits("a", lambda: first), LENGTHS) == 0
    later = Budget(kept[-1], gpu)
    assert run_partition(gpu, RunLimits("in another process", lambda: later), LENGTHS) == 0


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
def folder(tmp_path):
    return tmp_path / "not" / "yet" / "there"


@pytest.fixture
def file(folder):
    return BudgetFile(budget_key(**SETTINGS), folder)


def own_levels(caplog):
    return [r.levelname for r in caplog.records if r.name.startswith("gpuclassify")]


def gpu_of(token_bytes):
    return FakeGpu(lambda rows, width: token_bytes * rows * width)


def find(gpu, folder, **changes):
    options = {"model": "a", "precision": "bfloat16", "path": "packed", **changes}
    return find_budget(CUDA, gpu.forward, 512, memory=gpu, folder=folder, **options)


# Files.


def test_what_was_kept_is_found_again_by_an_equal_key_in_a_file_that_a_person_can_read(file):
    assert file.load() is None

    file.save(BATCH_MEMORY)

    assert BudgetFile(dict(reversed(file.key.items())), file.path.parent).load() == BATCH_MEMORY
    content = json.loads(file.path.read_text())
    assert content == {"key": file.key, "batch_memory": asdict(BATCH_MEMORY)}
    assert content["key"]["model"] == "owner/name@0123abc"
    assert content["key"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", SETTINGS)
def test_another_model_precision_path_length_or_device_is_another_file(file, name):
    other = SETTINGS[name] * 2 if isinstance(SETTINGS[name], int) else SETTINGS[name] + " "
    file.save(BATCH_MEMORY)

    assert BudgetFile(budget_key(**{**SETTINGS, name: other}), file.path.parent).load() is None


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
            ]
        },
    }


@pytest.mark.parametrize("kind", broken({}))
def test_a_broken_file_is_as_good_as_none_and_is_replaced(file, kind, caplog):
    file.save(BatchMemory(1, 1))
    file.path.write_bytes(broken(file.key)[kind])

    with caplog.at_level(logging.DEBUG, logger="gpuclassify"):
        assert file.load() is None
    assert own_levels(caplog) == ["DEBUG"]
    file.save(BATCH_MEMORY)
    assert file.load() == BATCH_MEMORY


def test_in_a_folder_that_cannot_be_made_nothing_is_kept(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    file = BudgetFile(budget_key(**SETTINGS), tmp_path / "file" / "budgets")

    with caplog.at_level(logging.DEBUG, logger="gpuclassify"):
        file.save(BATCH_MEMORY)

    assert file.load() is None
    assert set(own_levels(caplog)) == {"DEBUG"}


def test_what_is_known_is_never_made_smaller(file):
    file.save(BatchMemory(100, 20, 300))

    file.save(BatchMemory(50, 30, 100))

    assert file.load() == BatchMemory(100, 30, 300)


# Several at once.


def test_threads_that_write_and_read_at_once_see_whole_files_only(file):
    start = threading.Barrier(6)
    file.save(BATCH_MEMORY)

    def work(number):
        start.wait()
        for percent in range(100, 150):
            file.save(BatchMemory(1_000_000, 25_000, percent + number))
            found = file.load()
            assert found is not None
            assert found.token_bytes == 25_000

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert list(file.path.parent.iterdir()) == [file.path]


# Where.


@pytest.mark.parametrize(
    ("system", "is_set", "folder"),
    [
        ("Linux", True, "elsewhere"),
        ("Linux", False, ".cache"),
        ("Darwin", False, "Library/Caches"),
    ],
)
def test_the_folder_is_where_each_system_has_its_caches(
    monkeypatch, tmp_path, system, is_set, folder
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere") if is_set else "")
    monkeypatch.setattr("platform.system", lambda: system)
    assert default_folder() == tmp_path / folder / "gpuclassify" / "budgets"


# Budgets.


def test_a_model_is_measured_by_the_first_process_and_never_by_a_later_one(folder):
    first, later = gpu_of(25_000), gpu_of(25_000)

    budget = find(first, folder)
    again = find(later, folder)

    assert first.ran == [(4, 512), (4, 512), (16, 512)]
    assert later.ran == []
    find(later, folder, path="padded")
    assert later.ran
    assert budget.known == again.known == BatchMemory(0, 25_000)


def test_what_nothing_identifies_or_counts_is_not_kept(folder):
    gpu = gpu_of(25_000)

    assert find(gpu, folder, model=None).known == BatchMemory(0, 25_000)
    assert gpu.ran
    assert not folder.exists()
    uncounted = gpu_of(25_000)
    uncounted.is_counted = False
    assert find(uncounted, folder).limits().max_tokens == GPU_UNMEASURED_TOKENS
    assert uncounted.ran == []


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_measured_once_and_kept(folder, sequence_classifier):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(sequence_classifier()).to(CUDA)
    ran = []

    @torch.inference_mode()
    def probe(rows, width):
        ran.append((rows, width))
        model(input_ids=torch.ones(rows, width, dtype=torch.int64, device=CUDA))

    widest = model.config.max_position_embeddings
    first = find_budget(CUDA, probe, widest, model="a", folder=folder)
    count = len(ran)
    later = find_budget(CUDA, probe, widest, model="a", folder=folder)

    assert 1 <= count <= 7
    assert len(ran) == count
    assert later.known == first.known
    probe(first.limits().rows(widest), widest)
