"""Rows after a shared prefix get the hidden states that whole rows get from plain transformers."""

import pytest
import torch

from gpuclassify.classifiers.questions.decoder import load_decoder
from gpuclassify.classifiers.questions.shared_prefix import ATTENTION, Prefix, RowState
from tests.decoder_oracle import VOCABULARY, oracle, write_adapter, write_decoder

CPU = torch.device("cpu")
LENGTH = 40
OWN = [7, 1, 12, 5]  # own tokens of each row


@pytest.fixture(scope="module", params=[2, 4], ids=["shared keys", "equal heads"])
def directories(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("decoder")
    base = write_decoder(root / "base", request.param)
    return base, write_adapter(root / "adapter", base, 1)


@pytest.fixture(scope="module")
def decoder(directories):
    return loaded(directories)


def loaded(directories, dtype=torch.float32, device=CPU):
    base, adapter = directories
    decoder = load_decoder(base, device, dtype)
    decoder.add_adapter("adapter", adapter)
    return decoder


@pytest.fixture(scope="module")
def tokens():
    """Ids (rows, tokens): the first 40 columns are equal, and rows go on beyond what is own."""
    ids = torch.randint(3, VOCABULARY, (len(OWN), 80), generator=torch.Generator().manual_seed(0))
    ids[:, :LENGTH] = ids[0, :LENGTH]
    return ids


@pytest.fixture(scope="module")
def expected(directories, tokens):
    """Hidden states of whole rows by transformers and peft."""
    with torch.inference_mode():
        return oracle(*directories)(tokens, output_hidden_states=True).hidden_states[-1]


def run(decoder, ids, columns, state):
    prefix = len(state.prefix) if state.prefix else 0
    positions = columns.expand_as(ids) + prefix
    ids, positions = ids.to(decoder.device), positions.to(decoder.device)
    return decoder.forward(ids, position_ids=positions, attention=ATTENTION, state=state)


def prefix_of(decoder, tokens, length=LENGTH):
    state = RowState()
    run(decoder, tokens[:1, :length], torch.arange(length), state)
    return Prefix(state.layers)


def first(decoder, tokens, state, begin=LENGTH, lengths=OWN):
    """The first forward, rows padded on the right with a token of no meaning."""
    width = max(lengths)
    ids = tokens[:, begin : begin + width].clone()
    ids[torch.arange(width) >= torch.tensor(lengths)[:, None]] = 9
    return run(decoder, ids, torch.arange(width), state)


def following(decoder, tokens, begins, width, state):
    """A later forward of `width` tokens, in which row i begins with its own token begins[i]."""
    columns = torch.tensor(begins)[:, None] + torch.arange(width)
    state.place(columns.to(decoder.device), int(columns.max()) + 1)
    return run(decoder, tokens.gather(1, columns + LENGTH), columns, state)


def close(output, target):
    torch.testing.assert_close(output, target, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 17, LENGTH])
def test_the_prefix_counts_as_much_as_in_whole_rows(decoder, tokens, expected, length):
    prefix = prefix_of(decoder, tokens).crop(length)

    output = first(decoder, tokens, RowState(prefix), begin=length)

    assert len(prefix) == length
    for row, own in enumerate(OWN):
        close(output[row, :own], expected[row, length : length + own])


def test_tokens_that_follow_later_see_all_before_them(decoder, tokens, expected):
    state = RowState(prefix_of(decoder, tokens))
    first(decoder, tokens, state)
    begins = list(OWN)
    for width in (1, 3, 1, 20):  # beyond the padding, and beyond the room
        output = following(decoder, tokens, begins, width, state)
        for row, begin in enumerate(begins):
            close(output[row], expected[row, LENGTH + begin : LENGTH + begin + width])
        begins = [begin + width for begin in begins]


def test_rejected_drafts_leave_no_trace(decoder, tokens, expected):
    state = RowState(prefix_of(decoder, tokens))
    first(decoder, tokens, state)
    following(decoder, tokens.flip(0), OWN, 9, state)  # tokens of other rows, in place of theirs

    output = following(decoder, tokens, OWN, 4, state)

    for row, begin in enumerate(OWN):
        close(output[row], expected[row, LENGTH + begin : LENGTH + begin + 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float32_as_without_a_prefix(
    directories, tokens, expected, dtype
):
    decoder = loaded(directories, dtype)
    state = RowState(prefix_of(decoder, tokens))
    outputs = [first(decoder, tokens, state), following(decoder, tokens, OWN, 5, state)]
    plain = decoder.forward(tokens)

    def error(states, begins, lengths):
        parts = [
            states[row, :length].float() - expected[row, LENGTH + begin : LENGTH + begin + length]
            for row, (begin, length) in enumerate(zip(begins, lengths, strict=True))
        ]
        return torch.cat(parts).square().mean().sqrt()

    plain_error = (plain.float() - expected).square().mean().sqrt()
    assert error(outputs[0], [0] * 4, OWN) < 1.5 * plain_error
    assert error(outputs[1], OWN, [5] * 4) < 1.5 * plain_error


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_on_a_gpu_equal_those_on_the_cpu(directories, tokens, expected, dtype):
    decoder = loaded(directories, dtype, torch.device("cuda"))
    state = RowState(prefix_of(decoder, tokens))
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    output = first(decoder, tokens, state).float().cpu()
    later = following(decoder, tokens, OWN, 3, state).float().cpu()

    for row, own in enumerate(OWN):
        begin = LENGTH + own
        assert (output[row, :own] - expected[row, LENGTH:begin]).abs().max() < tolerance
        assert (later[row] - expected[row, begin : begin + 3]).abs().max() < tolerance
