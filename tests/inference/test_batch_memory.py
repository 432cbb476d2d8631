"""What batches take is measured on a few, and planned for the memory that is free."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from weakref import finalize

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpuclassify.inference.batch_memory import (
    GPU_MAX_TOKENS,
    GPU_SCORE_BYTES,
    GPU_SHARE,
    MOST_SAFETY_PERCENT,
    PROBE_TOKENS,
    BatchMemory,
    MeasuredBudget,
    measure_batch_memory,
    plan_limits,
    unmeasured_limits,
)
from gpuclassify.inference.batching import cut_batches
from gpuclassify.inference.memory import LimitMemory, ScoreRule, halve_on_oom

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
        self.taken_bytes = GIB
        self.ran = []
        self._peak = 0

    def free_bytes(self):
        return self.total_bytes - self.taken_bytes

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


def test_a_model_whose_tokens_take_nothing_has_a_batch_memory_all_the_same():
    batch_memory = FakeGpu(lambda rows, width: 1_000_000).measure(512)

    assert batch_memory.token_bytes == 1
    assert batch_memory.size_bytes(PROBE_TOKENS) >= 1_000_000


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
    "modernbert": transformers.ModernBertConfig(**SIZES, bos_token_id=1, eos_token_id=2),
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


def test_a_small_model_gets_no_more_than_fills_a_gpu():
    assert plan_limits(BatchMemory(0, 1), 80 * GIB).max_tokens == GPU_MAX_TOKENS


def test_limits_where_memory_is_not_counted_do_not_depend_on_it():
    rule = ScoreRule(12, 512, 2)
    limits = unmeasured_limits(rule)

    assert limits.max_tokens == 16_384
    assert limits.max_score_bytes == 2**29
    assert limits.score_rule == rule


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
    saved, free = [], [8 * GIB]
    budget = MeasuredBudget(BatchMemory(0, 2**20), lambda: free[0], save=saved.append)

    free[0] = GIB
    budget.correct(10, 500)  # 5,000 MiB where 1,024 are free
    assert saved == []

    free[0] = 8 * GIB
    budget.correct(10, 500)
    assert saved == [BatchMemory(0, 2**20, 263)]  # 80% of 8,192 MiB for 2,500 tokens
    assert budget.limits().max_tokens <= 2_500


@given(BATCH_MEMORIES, FREE, st.integers(0, 100 * GIB))
def test_what_is_planned_is_what_is_held_and_one_batch(batch_memory, free, held):
    budget = MeasuredBudget(batch_memory, lambda: free, held_bytes=lambda: held)

    limits = budget.limits()
    assert limits.planned_bytes == held + batch_memory.size_bytes(limits.max_tokens)
    if limits.max_tokens > 1:  # one token has to be tried, whatever is free
        assert limits.planned_bytes <= held + free


def test_corrections_by_several_threads_end_at_the_largest():
    budget = MeasuredBudget(BatchMemory(0, 2**20), lambda: 8 * GIB)
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


def test_what_came_beside_the_model_is_respected_in_the_next_run():
    gpu = FakeGpu(lambda rows, width: 10**8 + 200_000 * rows * width)
    budget = MeasuredBudget(gpu.measure(512), gpu.free_bytes)
    memory = LimitMemory()

    def largest_batch():
        gpu.ran.clear()
        assert run_partition(gpu, memory.for_run("a", lambda: budget), LENGTHS) == 0
        return max(rows * width for rows, width in gpu.ran)

    alone = largest_batch()
    gpu.taken_bytes = 5 * GIB  # a second model, or a frame
    beside = largest_batch()
    gpu.taken_bytes = GIB

    assert beside < 0.5 * alone
    assert largest_batch() == alone


def test_memory_that_vanishes_during_a_run_is_survived_and_no_fault_of_what_was_measured():
    gpu = FakeGpu(lambda rows, width: 200_000 * rows * width)
    saved = []
    budget = MeasuredBudget(gpu.measure(512), gpu.free_bytes, save=saved.append)
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
    first = MeasuredBudget(gpu.measure(512), gpu.free_bytes, save=kept.append)
    memory = LimitMemory()

    assert run_partition(gpu, memory.for_run("a", lambda: first), LENGTHS) > 0
    assert run_partition(gpu, memory.for_run("a", lambda: first), LENGTHS) == 0
    later = MeasuredBudget(kept[-1], gpu.free_bytes)
    assert run_partition(gpu, LimitMemory().for_run("a", lambda: later), LENGTHS) == 0
