"""Answers are those of plain greedy generation, whatever is shared, drafted, batched or retried."""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gpuclassify.classifiers.questions.decoder import load_decoder
from gpuclassify.classifiers.questions.generation import (
    MOST_DRAFTED,
    AnswerTask,
    FreeReader,
    SeenAnswers,
    answer,
)
from gpuclassify.inference.device import device_lock
from gpuclassify.inference.memory import BUDGETS, BatchLimits, Budget, DocumentTooLargeError
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.run_context import RunStats
from tests.decoder_oracle import (
    BOS,
    EOS,
    VOCABULARY,
    greedy,
    oracle,
    text_of,
    write_adapter,
    write_decoder,
)

options = functools.partial(ModelOptions, model="a model")

CPU = torch.device("cpu")
MOST = 10  # new tokens


def random_tokens(generator, count):
    return generator.integers(3, VOCABULARY, count).astype(np.int32)


def prompts_after(prefix):
    """Prompts that share all of a prefix, parts of it, or its first token."""
    generator = np.random.default_rng(0)
    lengths = [1, 2, 40, *generator.integers(1, 40, 17)]
    whole = [np.concatenate((prefix, random_tokens(generator, n))) for n in lengths]
    kept = (1, 2, 63, 64, 65, len(prefix) - 1)
    parts = [np.concatenate((prefix[:n], random_tokens(generator, 5))) for n in kept]
    inside = [prefix, prefix[:70], prefix[:1]]
    return [*whole, *parts, *inside]


PREFIX = np.concatenate(([BOS], random_tokens(np.random.default_rng(1), 129))).astype(np.int32)
PROMPTS = prompts_after(PREFIX)
SOME = PROMPTS[::3]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Base and adapters by name."""
    root = tmp_path_factory.mktemp("decoder")
    base = write_decoder(root / "base")
    return base, {name: write_adapter(root / name, base, i) for i, name in enumerate("ab")}


def loaded(directories, dtype=torch.float32, device=CPU):
    base, adapters = directories
    decoder = load_decoder(base, device, dtype)
    for name, directory in adapters.items():
        decoder.add_adapter(name, directory)
    return decoder


@pytest.fixture(scope="module")
def resident(directories):
    return loaded(directories)


@pytest.fixture
def decoder(resident, monkeypatch):
    """A decoder that remembers nothing and counts its forwards as shapes of the ids."""
    resident._attachments.clear()
    shapes = []
    forward = resident.forward

    def counted(input_ids, **options):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, **options)

    monkeypatch.setattr(resident, "forward", counted)
    monkeypatch.setattr(resident, "shapes", shapes, raising=False)
    return resident


@pytest.fixture(scope="module")
def tokens_of(directories):
    """New tokens of every prompt by plain generate, for an adapter."""
    base, adapters = directories
    found = {}

    def tokens(name):
        if name not in found:
            model = oracle(base, adapters[name])
            found[name] = [greedy(model, prompt, MOST) for prompt in PROMPTS]
        return found[name]

    return tokens


@pytest.fixture(scope="module")
def expected_of(tokens_of):
    return lambda name="a": [text_of(tokens) for tokens in tokens_of(name)]


@pytest.fixture
def key():
    """A key under which no limits are remembered yet."""
    return object()


def batch_of(prompts):
    lengths = np.cumsum([0, *map(len, prompts)])
    return TokenBatch(np.concatenate(prompts).astype(np.int32), lengths)


def limit(key, max_tokens):
    """Batches as large as `max_tokens` allow, however much padding that takes."""
    BUDGETS[key] = Budget(BatchLimits(max_tokens, enough_tokens=max_tokens))


def never(text, is_complete):
    return False


def run(decoder, key, prompts=PROMPTS, name="a", stats=None, settings=None, **rules):
    prefix = rules.pop("prefix", PREFIX)
    reader = FreeReader(decoder, **{"is_decided": never, "max_new_tokens": MOST} | rules)
    task = AnswerTask(decoder, name, prefix, reader)
    found = answer(task, key, batch_of(prompts), settings or options(), stats or RunStats())
    return [one and one.text for one in found]


@pytest.mark.parametrize(("name", "batch_size"), [("a", None), ("b", None), ("b", 1), ("a", 7)])
def test_answers_equal_plain_generate_one_prompt_at_a_time(
    decoder, expected_of, key, name, batch_size
):
    settings = options(batch_size=batch_size)

    assert run(decoder, key, name=name, settings=settings) == expected_of(name)
    if batch_size is not None:
        assert max(rows for rows, _ in decoder.shapes) == batch_size


@pytest.mark.parametrize(
    ("max_tokens", "is_sorted"), [(1, False), (100, True), (100, False), (100_000, False)]
)
def test_answers_do_not_depend_on_the_token_budget_or_the_order(
    decoder, expected_of, key, max_tokens, is_sorted
):
    limit(key, max_tokens)
    order = np.random.default_rng(2).permutation(len(PROMPTS))
    settings = options(sort_by_length=is_sorted)

    answers = run(decoder, key, [PROMPTS[i] for i in order], settings=settings)

    assert answers == [expected_of()[i] for i in order]


@pytest.mark.parametrize("length", [0, 1, 64, len(PREFIX)])
def test_answers_do_not_depend_on_the_prefix_that_is_cached(decoder, expected_of, key, length):
    assert run(decoder, key, prefix=PREFIX[:length]) == expected_of()


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_no_answer_has_more_than_the_most_new_tokens(decoder, tokens_of, key, most):
    expected = [text_of(tokens[:most]) for tokens in tokens_of("a")]

    for _ in range(2):  # without drafts and with them
        assert run(decoder, key, max_new_tokens=most) == expected


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_answer_ends_where_it_is_decided(decoder, tokens_of, key, is_warm):
    if is_warm:
        run(decoder, key)  # whole answers are seen, and drafted

    def has_even_word(text, is_complete):
        return any(int(word[1:]) % 2 == 0 for word in text.split())

    def until_decided(tokens):
        even = [i for i, token in enumerate(tokens) if token > EOS and token % 2 == 0]
        return text_of(tokens[: even[0] + 1] if even else tokens)

    answers = run(decoder, key, is_decided=has_even_word)

    assert answers == [until_decided(tokens) for tokens in tokens_of("a")]


def seen_by(decoder):
    """The answers that a decoder with the adapter "a" drafts from."""
    _, seen = decoder.attached(("answers", "a"), dict)._kept[PREFIX.tobytes()]
    return seen


def poison(seen):
    generator = np.random.default_rng(5)
    for length in (1, 2, 5, 20):
        for _ in range(3):
            seen.add(tuple(random_tokens(generator, length).tolist()))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_drafts_change_no_answer(decoder, expected_of, key, batch_size, monkeypatch):
    settings = options(batch_size=batch_size)
    assert run(decoder, key, settings=settings) == expected_of()
    warm = run(decoder, key, settings=settings)
    poison(seen_by(decoder))
    wrong = run(decoder, key, settings=settings)
    monkeypatch.setattr(SeenAnswers, "continuations", lambda _: {})
    without = run(decoder, key, settings=settings)

    assert warm == wrong == without == expected_of()


def test_an_expected_answer_costs_one_forward_and_others_few(decoder, tokens_of, key):
    row = next(i for i, tokens in enumerate(tokens_of("a")) if 3 < len(tokens) <= MOST_DRAFTED)
    first, second, other = RunStats(), RunStats(), RunStats()

    run(decoder, key, [PROMPTS[row]] * 5, stats=first)
    run(decoder, key, [PROMPTS[row]] * 5, stats=second)
    run(decoder, key, [PROMPTS[row + 1]], stats=other)

    length = len(tokens_of("a")[row])
    assert first.batches == second.batches == 1
    assert first.decode_steps == length - 1
    assert second.decode_steps == 0
    assert other.decode_steps > 0


def test_counts_add_up(decoder, key):
    stats = RunStats(batches=100)
    whole = PROMPTS[:20]

    run(decoder, key, whole, stats=stats)

    (prefix_rows, prefix_width), *others = decoder.shapes
    assert (prefix_rows, prefix_width) == (1, len(PREFIX))
    assert stats.tokens == sum(map(len, whole))
    assert stats.prefix_tokens == 20 * len(PREFIX)
    assert stats.padded_tokens == sum(rows * width for rows, width in others)
    assert stats.batches + stats.decode_steps == 100 + len(others)
    assert stats.batches > 100
    assert stats.model_seconds > 0


def test_the_prefix_is_run_once_for_each_adapter(decoder, key, expected_of):
    for _, name in itertools.product(range(3), "ab"):
        assert run(decoder, key, name=name) == expected_of(name)

    assert decoder.shapes.count((1, len(PREFIX))) == 2


def test_threads_with_two_adapters_get_their_own_answers(decoder, expected_of, key):
    start = threading.Barrier(4)

    def work(number):
        start.wait()
        stats = RunStats()
        return run(decoder, key, name="ab"[number % 2], stats=stats), stats

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))

    for number, (answers, _) in enumerate(results):
        assert answers == expected_of("ab"[number % 2])
    assert max(stats.wait_device_seconds for _, stats in results) > 0.001


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["torch", "host"]
)
def test_exhausted_memory_loses_nothing_and_is_remembered(
    decoder, expected_of, key, monkeypatch, error
):
    forward = decoder.forward
    failures = []

    def limited(input_ids, **options):
        if input_ids.numel() > 130:
            failures.append(input_ids.shape)
            raise error
        return forward(input_ids, **options)

    monkeypatch.setattr(decoder, "forward", limited)
    first, second = RunStats(), RunStats()

    answers = run(decoder, key, SOME, stats=first)
    count = len(failures)
    again = run(decoder, key, SOME, stats=second)

    assert answers == again == expected_of()[::3]
    assert first.out_of_memory == count > 0
    assert second.out_of_memory == len(failures) - count == 0


def test_exhausted_memory_in_a_later_step_loses_nothing(decoder, expected_of, key, monkeypatch):
    forward = decoder.forward

    def limited(input_ids, **options):
        if options["state"].is_later is not None and len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids, **options)

    monkeypatch.setattr(decoder, "forward", limited)
    stats = RunStats()

    assert run(decoder, key, SOME, stats=stats) == expected_of()[::3]
    assert stats.out_of_memory > 0


def test_a_prompt_that_does_not_fit_alone_is_an_error_and_frees_the_device(
    decoder, key, monkeypatch
):
    run(decoder, key, [PREFIX])

    def never_fits(input_ids, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoder, "forward", never_fits)

    with pytest.raises(DocumentTooLargeError):
        run(decoder, key, SOME)
    assert not device_lock(CPU).locked()


def test_prompts_with_logits_that_are_not_finite_are_reported_and_harm_no_other(
    directories, expected_of, key
):
    decoder = loaded(directories)
    limit(key, 100_000)
    prompts = PROMPTS[:20]
    counts = np.bincount(np.concatenate([np.unique(row) for row in prompts]), minlength=VOCABULARY)
    spoiled = int(np.where(np.isin(np.arange(VOCABULARY), PREFIX), 0, counts).argmax())
    decoder._model.model.embed_tokens.weight.data[spoiled] = torch.inf
    has_it = [spoiled in prompt for prompt in prompts]

    answers = run(decoder, key, prompts)

    assert 2 < sum(has_it) < 15
    for text, expected, is_spoiled in zip(answers, expected_of()[:20], has_it, strict=True):
        # What is said can be what spoils the next step too.
        is_spoiled |= f"w{spoiled}" in expected.split()[:-1]
        assert text == (None if is_spoiled else expected)


def test_half_precision_differs_only_where_tokens_are_nearly_as_likely(directories, tokens_of, key):
    base, adapters = directories
    decoder = loaded(directories, torch.bfloat16)
    for _ in range(2):  # without drafts and with them
        answers = run(decoder, key)

    differing = 0
    for prompt, text, tokens in zip(PROMPTS, answers, tokens_of("a"), strict=True):
        words = [int(word[1:]) for word in text.split()]
        pairs = itertools.zip_longest([*words, EOS], [*tokens, EOS])
        fork = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if text == text_of(tokens) or fork is None:
            continue
        differing += 1
        ids = torch.tensor([[*prompt.tolist(), *tokens[:fork]]])
        with torch.inference_mode():
            logits = oracle(base, adapters["a"])(ids).logits[0, -1]
        ours = [*words, EOS][fork]
        assert logits.max() - logits[ours] < 0.05 * (logits.max() - logits.min())
    assert differing < len(PROMPTS) / 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_on_a_gpu_are_those_of_the_cpu(directories, tokens_of, key, dtype):
    decoder = loaded(directories, dtype, torch.device("cuda"))
    for _ in range(2):
        answers = run(decoder, key)

    equal = [text == text_of(tokens) for text, tokens in zip(answers, tokens_of("a"), strict=True)]
    assert sum(equal) >= len(PROMPTS) * (1 if dtype == torch.float32 else 0.5)


def seen(*answers):
    kept = SeenAnswers()
    for tokens in answers:
        kept.add(tokens)
    return kept


def test_answers_that_come_once_do_not_pile_up_nor_drive_out_common_ones():
    answers = seen((5, EOS), (5, EOS))
    for number in range(1_000):
        answers.add((number, 9, EOS))

    assert len(answers.continuations()) < 200
    assert answers.continuations()[()] == (5,)
