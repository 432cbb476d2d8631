"""Scores do not depend on company: partitions, order, budgets, memory failures, bad neighbours."""

import shutil

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuclassify import DomainClassifier
from gpuclassify.inference import engine
from gpuclassify.inference.loaded_model import LoadedModel
from gpuclassify.inference.memory import BUDGETS, BatchLimits, Budget, DocumentTooLargeError
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import LOADERS
from tests.oracle import (
    assert_close,
    assert_labels_agree,
    plain_tokenizer,
    probabilities,
    raw_outputs,
    stacked,
)
from tests.replicas import sample_texts

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread", "fresh_limits")]

TEXTS = [*sample_texts(24, seed=11, max_words=60), "", "word " * 700]


@pytest.fixture
def fresh_limits():
    BUDGETS.clear()
    yield
    BUDGETS.clear()


@pytest.fixture
def published_stats():
    """What runs publish, in order."""
    with collected_stats() as runs:
        yield runs


@pytest.fixture
def forward_through(monkeypatch):
    """Puts a function around every forward: it gets the batch and the real forward."""

    def install(around):
        real = LoadedModel.forward
        monkeypatch.setattr(
            LoadedModel,
            "forward",
            lambda model, batch, side: around(batch, lambda: real(model, batch, side)),
        )

    return install


@pytest.fixture
def domain(checkpoint):
    def make(**options):
        settings = {"model": checkpoint("domain"), "score_field": "scores", "max_chars": None}
        return DomainClassifier(**{**settings, "autocast": False, **options})

    return make


@pytest.fixture(scope="module")
def expected(checkpoint):
    return probabilities(raw_outputs(checkpoint("domain"), TEXTS, max_tokens=512))


def documents(texts=TEXTS):
    return pd.DataFrame({"text": texts}, index=pd.Index(range(10, 10 + len(texts))))


def assert_is_expected(result, expected, labels):
    assert_close(stacked(result.scores), expected)
    assert assert_labels_agree(result.domain_pred, labels, expected) == 0


def in_partitions(frame, npartitions):
    """The frame in that many partitions; every fourth is empty."""
    filled = [number for number in range(npartitions) if number % 4 != 3 or npartitions < 4]
    cuts = np.array_split(np.arange(len(frame)), len(filled))
    parts = [frame.iloc[:0]] * npartitions
    for number, rows in zip(filled, cuts, strict=True):
        parts[number] = frame.iloc[rows]
    return dd.from_map(lambda part: part, parts, meta=frame.iloc[:0])


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("max_tokens", [1, 100, 10**9])
def test_scores_do_not_depend_on_the_token_budget(
    domain, expected, monkeypatch, forward_through, loader, max_tokens
):
    sizes = []
    domain()(documents(["warm up"]))  # measures how padding acts, with forwards of its own
    limits = BatchLimits(max_tokens, enough_tokens=max_tokens)
    monkeypatch.setattr(engine, "find_budget", lambda *_, **__: Budget(limits))
    BUDGETS.clear()
    forward_through(
        lambda batch, forward: (sizes.append((len(batch.rows), batch.run_tokens)), forward())[1]
    )
    classifier = domain(loader=loader)
    assert_is_expected(classifier(documents()), expected, classifier.labels)
    assert all(rows == 1 or tokens <= max_tokens for rows, tokens in sizes)
    assert (len(sizes) == 1) == (max_tokens == 10**9)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("std::bad_alloc: out_of_memory: RMM failure at pool.hpp"),
        MemoryError(),
    ],
    ids=["torch", "rmm", "python"],
)
def test_running_out_of_memory_changes_nothing_and_is_remembered(
    domain, expected, published_stats, forward_through, loader, error
):
    domain()(documents(["warm up"]))
    failures = []

    def fail_when_large(batch, forward):
        if len(batch.rows) > 1 and len(batch.rows) * batch.width > 300:
            failures.append(batch.mask.shape)
            raise error
        return forward()

    forward_through(fail_when_large)
    classifier = domain(loader=loader)
    assert_is_expected(classifier(documents()), expected, classifier.labels)
    assert published_stats[-1].out_of_memory == len(failures) > 0
    failures.clear()
    assert_is_expected(classifier(documents()), expected, classifier.labels)
    assert failures == []


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), DocumentTooLargeError, "max_seq_length"),
        (RuntimeError("shapes cannot be multiplied"), RuntimeError, "cannot be multiplied"),
    ],
    ids=["too large", "its own"],
)
def test_a_forward_that_always_fails_is_not_tried_for_ever(
    domain, forward_through, error, told, message
):
    def fail(batch, forward):
        raise error

    domain()(documents(["warm up"]))
    forward_through(fail)
    with pytest.raises(told, match=message):
        domain()(documents())


def test_threads_give_the_scores_of_one(domain, expected):
    classifier = domain()
    result = classifier(in_partitions(documents(), 17))
    result = result.compute(scheduler="threads", num_workers=4)
    assert_is_expected(result, expected, classifier.labels)


# Non-finite outputs.


@pytest.fixture
def with_embedding(checkpoint, tmp_path):
    """A copy of the domain checkpoint where the embedding of "river" has another value."""

    def write(value):
        model = tmp_path / "odd"
        shutil.copytree(checkpoint("domain"), model)
        token = plain_tokenizer(model)("river", add_special_tokens=False).input_ids[0]
        tensors = load_file(model / "model.safetensors")
        tensors["model.embeddings.word_embeddings.weight"][token, 0] = value
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        return model

    return write


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_text_without_finite_scores_fails_naming_its_row(domain, with_embedding, value):
    classifier = domain(model=with_embedding(value))
    good = [None, "market budget", "market budget", "oven flour"]
    result = classifier(documents(good))
    assert result.domain_pred.notna().tolist() == [False, True, True, True]
    with pytest.raises(NonFiniteOutputError, match=r"row 4 \(index label 14\)"):
        classifier(documents([*good, "river", "oven flour"]))
    lazy = classifier(dd.from_pandas(documents([*good[:3], "river"]), npartitions=2))
    with pytest.raises(NonFiniteOutputError, match=r"row 1 \(index label 13\)"):
        lazy.compute(scheduler="sync")


def test_what_overflows_in_half_precision_is_recomputed_in_float32(
    domain, with_embedding, published_stats
):
    model = with_embedding(1e5)  # beyond float16's largest number, 65504
    texts = ["market budget", "river", None, "oven flour", "river"]
    result = domain(model=model, dtype="float16")(documents(texts))
    expected = probabilities(raw_outputs(model, ["market budget", "river", "oven flour"]))
    assert published_stats[-1].rescued_texts == 1
    found = stacked(result.scores.dropna())
    assert_close(found[1], expected[1])
    assert_close(found[3], expected[1])
    assert_close(found[[0, 2]], expected[[0, 2]], tolerance=0.02)


@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_not_finite_in_company_only_is_recomputed_alone(
    domain, expected, published_stats, forward_through, loader
):
    def spoil_first_row(batch, forward):
        outputs = forward()
        if len(batch.rows) > 1:
            outputs[0] = float("nan")
        return outputs

    domain()(documents(["warm up"]))
    forward_through(spoil_first_row)
    classifier = domain(loader=loader)
    assert_is_expected(classifier(documents()), expected, classifier.labels)
    assert published_stats[-1].rescued_texts > 0


def test_equal_texts_run_once_and_get_equal_scores(domain, published_stats):
    result = domain()(documents(["river", "oven", "river", None, "river"]))
    assert published_stats[-1].folded_rows == 2
    scores = stacked(result.scores.iloc[[0, 2, 4]])
    assert (scores == scores[0]).all()
