"""CrossFit's own loader sorts and slices; sizes, retries and numpy stay ours."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuclassify.inference import crossfit
from gpuclassify.inference.batching import cut_batches, longest_first, pad, stage
from gpuclassify.inference.crossfit import crossfit_batches
from gpuclassify.inference.memory import BatchLimits
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from tests.loaders import OTHER_LOADERS

if not OTHER_LOADERS:
    pytest.skip("CrossFit has no release for Python 3.13 and later", allow_module_level=True)

CPU = torch.device("cpu")
LENGTHS = np.array([3, 17, 1, 9, 9, 40, 2, 9, 25, 1, 1, 33])


def tokens_of(lengths, with_types=False, seed=0):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(seed).integers(0, 50, offsets[-1], dtype=np.int32)
    return TokenBatch(ids, offsets, ids % 2 if with_types else None)


def test_the_loader_is_crossfits_own():
    crossfit._loader_class()
    theirs = sys.modules["crossfit.backend.torch.loader"]

    ours, base, in_memory = crossfit._loader_class().__mro__[:3]

    assert base is theirs.SortedSeqLoader
    assert in_memory is theirs.InMemoryLoader
    distribution = importlib.metadata.distribution("crossfit")
    assert distribution.version == "0.0.9"
    own = distribution.locate_file("crossfit/backend/torch/loader.py")
    assert Path(theirs.__file__).samefile(own)
    assert set(vars(ours)) & set(vars(base)) == {
        "__init__",
        "__next__",
        "_find_optimal_splits",
        "__module__",
        "__doc__",
    }


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("with_types", [False, True])
@pytest.mark.parametrize("limits", [BatchLimits(60), BatchLimits(10_000), BatchLimits(99, 2)])
def test_batches_hold_the_same_rows_as_the_sorted_loaders(side, with_types, limits):
    tokens = tokens_of(LENGTHS, with_types)
    lengths = tokens.lengths
    ordered = lengths[longest_first(lengths)]

    batches = list(crossfit_batches(stage(tokens, CPU), 0, side, lambda: limits, type_pad_id=1))

    assert [(len(b.rows), b.width) for b in batches] == [
        (stop - start, ordered[start]) for start, stop in cut_batches(ordered, lambda: limits)
    ]
    assert sorted(np.concatenate([b.rows for b in batches])) == list(range(len(LENGTHS)))
    for batch in batches:
        expected = pad(stage(tokens, CPU), batch.rows, 0, side, 1)
        for name in ("ids", "mask", "type_ids") if with_types else ("ids", "mask"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
        assert (batch.type_ids is not None) == with_types


def test_rows_are_sorted_by_the_mask_where_the_padding_id_is_a_real_token_too():
    lengths = np.array([2, 6, 4])
    padding_alone = TokenBatch(np.full(12, 7, np.int32), np.array([0, 2, 8, 12]))

    (batch,) = crossfit_batches(stage(padding_alone, CPU), 7, "right", lambda: BatchLimits(100))

    assert batch.rows.tolist() == [1, 2, 0]
    assert batch.mask.sum(axis=1).tolist() == sorted(lengths, reverse=True)


def test_lowered_limits_hold_from_the_next_batch_on():
    tokens = tokens_of(np.full(12, 10))
    answers = iter([BatchLimits(60), BatchLimits(40), BatchLimits(20)])

    batches = list(crossfit_batches(stage(tokens, CPU), 0, "right", lambda: next(answers)))

    assert [len(batch.rows) for batch in batches] == [6, 4, 2]


FRESH_IMPORT = """
import logging, threading, time
import numpy as np
from gpuclassify.inference import crossfit

before, foreign, stop = dict(np.__dict__), [], threading.Event()
def watch():
    while not stop.is_set():
        foreign.extend(k for k, v in before.items() if np.__dict__.get(k) is not v)
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
crossfit._loader_class()
stop.set()
watcher.join()
assert not foreign, foreign
root = logging.getLogger()
assert (root.handlers, root.filters, root.manager.disable) == ([], [], 0)
logging.warning("a warning of ours")
"""


def test_importing_crossfit_changes_neither_numpy_nor_logging_and_reports_nothing():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH_IMPORT], capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("", "WARNING:root:a warning of ours\n")


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (lambda name: "0.1.0", r"0\.0\.9, found 0\.1\.0: pip install crossfit==0\.0\.9"),
        (missing, r'gpuclassify\[crossfit\].*loader="sorted"'),
    ],
)
def test_another_version_or_none_is_refused_with_the_cure(monkeypatch, version, message):
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(crossfit, "_loader_class", crossfit._loader_class.__wrapped__)

    with pytest.raises(ImportError, match=message):
        next(crossfit_batches(stage(tokens_of(LENGTHS), CPU), 0, "right", lambda: BatchLimits(60)))
