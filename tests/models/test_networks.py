"""Pooling reads a row's tokens and nothing of its padding, on either side."""

import pytest
import torch

from gpuclassify.models.networks import first_token, last_token, mean_of_tokens

STATES = torch.arange(24, dtype=torch.float32).reshape(2, 4, 3) ** 2
MASKS = {
    "right": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    "left": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}


def real_tokens(mask):
    """The states of each row's tokens alone."""
    return [states[is_token.bool()] for states, is_token in zip(STATES, mask, strict=True)]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (mean_of_tokens, lambda tokens: tokens.mean(0)),
        (first_token, lambda tokens: tokens[0]),
        (last_token, lambda tokens: tokens[-1]),
    ],
)
def test_each_row_gives_what_its_tokens_alone_give(pool, expected, mask):
    torch.testing.assert_close(
        pool(STATES, mask), torch.stack([expected(tokens) for tokens in real_tokens(mask)])
    )


def test_a_row_with_a_single_token_is_that_token():
    mask = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1]])
    for pool in (mean_of_tokens, first_token, last_token):
        torch.testing.assert_close(pool(STATES, mask), torch.stack([STATES[0, 0], STATES[1, 3]]))
        assert pool(STATES.bfloat16(), mask).dtype == torch.float32


def test_the_mean_of_many_low_precision_states_is_summed_in_float32():
    states = torch.full((1, 3_000, 1), 1.0, dtype=torch.float16) + 0.001
    mask = torch.ones(1, 3_000, dtype=torch.long)
    assert mean_of_tokens(states, mask).item() == pytest.approx(states[0, 0, 0].item(), abs=1e-5)
