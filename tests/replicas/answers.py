"""A last layer that makes a random decoder answer in the published grammar of safety models.

After a prompt the decoder says ``safe``, or ``unsafe`` and on a second line one category code or
several. Which of these depends on the document, through the decoder's hidden states.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_CODES = tuple(f"O{number}" for number in range(1, 14))
_ANSWERS = (
    "safe",
    *(f"unsafe\n{code}" for code in _CODES),
    *(f"unsafe\n{first},{second}" for first, second in itertools.product(_CODES, _CODES)),
)
_SAFE_SHARE = 0.6  # of the answers
_END_SHARE = 0.8  # of the codes after which an answer may end or go on
_GAP = 12.0  # between the logits of tokens that may follow and those of others
_SPREAD = 3.0  # of the logits among tokens that may follow
_VERDICT_SPREAD = 12.0  # the same for the first token, most of which the regression evens out


@dataclass
class _State:
    """A point of the grammar: what may follow, seen after many documents by one decoder."""

    tokens: list[int]
    hidden: Any  # (documents, hidden)
    addition: Any  # of the decoder's adapter to the last layer, (vocabulary, hidden)
    logits: Any  # wanted, (documents, vocabulary)


def fit_answers(
    decoders: Sequence[tuple[Any, Any]], tokenizer: Any, prompts: Sequence[str], seed: int
) -> Any:
    """Fit one last layer to several decoders, by ridge regression on prompts with answers.

    Parameters
    ----------
    decoders : sequence of (transformers.LlamaModel, Tensor)
        Each with what its adapter adds to the last layer, (vocabulary, hidden). All in float64,
        so that the last bit of a matrix product does not outlive a rounding of the result.
    tokenizer : tokenizers.Tokenizer
        That of the decoders.
    prompts : sequence of str
        Whole prompts, each with a document of its own.
    seed : int
        Decides which documents get which answers.

    Returns
    -------
    Tensor, float64 (vocabulary, hidden)
        Weight of the last layer, without the adapters' additions.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    size = (tokenizer.get_vocab_size(), decoders[0][0].config.hidden_size)
    directions = torch.randn(size, generator=generator, dtype=torch.float64)
    end_id = tokenizer.token_to_id("</s>")
    answers = [(*tokenizer.encode(a, add_special_tokens=False).ids, end_id) for a in _ANSWERS]
    states = []
    for decoder, addition in decoders:
        for following, hidden in _hidden_states(decoder, tokenizer, prompts, answers).items():
            tokens = list(following)
            spread = _VERDICT_SPREAD if answers[0][0] in tokens else _SPREAD
            logits = _wanted_logits(hidden, tokens, directions, spread)
            states.append(_State(tokens, hidden, addition, logits))
    # The regression evens out what documents differ by, so shares are set by what it reached.
    _set_shares(states, _ridge(states), {answers[0][0]: _SAFE_SHARE, end_id: _END_SHARE})
    return _ridge(states)


def _hidden_states(
    decoder: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Any]:
    """Hidden states before every token of some answers, by the tokens that may follow."""
    import torch

    following = defaultdict(set)
    for answer in answers:
        for position, token in enumerate(answer):
            following[answer[:position]].add(token)
    collected = defaultdict(list)
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    shared = [column[0] for column in alike][:-1]  # run once: prompts may be long
    with torch.no_grad():
        cache = decoder(torch.tensor([shared]), use_cache=True).past_key_values
    for number, ids in enumerate(rows):
        # One without a code, one with one and one with two, others after every prompt.
        chosen = [answers[0], answers[1 + number % 13], answers[14 + number * 5 % 169]]
        along = _along(decoder, copy.deepcopy(cache), ids[len(shared) :], chosen)
        for answer, states in zip(chosen, along, strict=True):
            for position, state in enumerate(states[: len(answer)]):
                collected[tuple(sorted(following[answer[:position]]))].append(state)
    return {tokens: torch.stack(collected[tokens]) for tokens in sorted(collected)}


def _along(
    decoder: Any, cache: Any, ids: list[int], answers: Sequence[tuple[int, ...]]
) -> Iterator[Any]:
    """For each answer the hidden states from the prompt's end on, float64 (tokens, hidden).

    The prompt is what `cache` has seen and `ids`.
    """
    import torch

    longest = max(map(len, answers))
    rows = torch.tensor([[*answer, *[0] * (longest - len(answer))] for answer in answers])
    with torch.no_grad():
        read = decoder(torch.tensor([ids]), past_key_values=cache)
        cache.batch_repeat_interleave(len(answers))
        written = decoder(rows, past_key_values=cache).last_hidden_state
    for row in written:
        yield torch.cat([read.last_hidden_state[0, -1:], row])


def _wanted_logits(hidden: Any, tokens: list[int], directions: Any, spread: float) -> Any:
    """Logits far apart between grammar and the rest, and spread by document within grammar."""

    wanted = 0.03 * hidden @ directions.T
    wanted[:, tokens] += _GAP
    if len(tokens) > 1:
        choices = (hidden - hidden.mean(0)) @ directions[tokens].T
        wanted[:, tokens] += choices * (spread / choices.std())
    return wanted


def _set_shares(states: Sequence[_State], head: Any, shares: dict[int, float]) -> None:
    """Shift the logits wanted for some tokens so that each wins in its share of documents."""
    import torch

    for state in states:
        reached = state.hidden @ (head + state.addition).T
        for token in shares.keys() & set(state.tokens):
            others = [other for other in state.tokens if other != token]
            if others:
                lead = reached[:, others].amax(1) - reached[:, token]
                state.logits[:, token] += torch.quantile(lead, shares[token])


def _ridge(states: Sequence[_State]) -> Any:
    """The last layer that comes closest to the logits wanted; every state counts the same."""
    import torch

    size = states[0].hidden.shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64)
    moment = torch.zeros(size, states[0].logits.shape[1], dtype=torch.float64)
    for state in states:
        gram += state.hidden.T @ state.hidden / len(state.hidden)
        missing = state.logits - state.hidden @ state.addition.T
        moment += state.hidden.T @ missing / len(state.hidden)
    gram += 1e-5 * gram.trace() / size * torch.eye(size, dtype=torch.float64)
    return torch.linalg.solve(gram, moment).T
