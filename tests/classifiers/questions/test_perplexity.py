"""Perplexity, held against plain transformers: one document at a time, in float32."""

import math

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gpuclassify import Perplexity, PromptClassifier, Select
from gpuclassify.commands.cli import main
from gpuclassify.inference.residency import MODELS
from gpuclassify.jobs.execution import ModelProbe
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import LOADERS
from tests.oracle import assert_close
from tests.replicas import sample_texts
from tests.replicas.chat_models import write_chat_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(8, seed=2, max_words=90), "", "river", None, "天気 🙂 " * 20, "river"]
FRAME = pd.DataFrame({"id": range(len(TEXTS)), "text": pd.Series(TEXTS, dtype="str")})
IS_TEXT = FRAME["text"].notna().to_numpy()
COLUMNS = ["nll", "bits_per_byte", "nll_tokens"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """The directory of a small decoder, whose tokenizer may begin texts with ``<s>``."""
    known = {}

    def write(architecture="qwen3", has_start=False):
        key = (architecture, has_start)
        if key not in known:
            folder = tmp_path_factory.mktemp("decoder") / architecture
            write_chat_model(folder, architecture)
            if has_start:
                path = str(folder / "tokenizer.json")
                tokenizer = Tokenizer.from_file(path)
                start = tokenizer.token_to_id("<s>")
                tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", start)])
                tokenizer.save(path)
            known[key] = folder
        return known[key]

    return write


def plain_likelihoods(directory, texts, window=512, overlap=64):
    """Nats per token, bits per byte and tokens by transformers' loss, float64 (texts, 3)."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text).input_ids], dtype=torch.int64)
        nats, tokens, scored = 0.0, 0, 0
        for start in range(0, max(ids.shape[1], 1), window - overlap):
            part = ids[:, start : start + window]
            labels = part.clone()
            labels[:, : scored - start] = -100  # the window before has scored these
            count = int((labels[:, 1:] != -100).sum())
            if count:
                with torch.inference_mode():
                    nats += float(model(part, labels=labels).loss) * count
            tokens, scored = tokens + count, start + part.shape[1]
            if scored >= ids.shape[1]:
                break
        size = len(text.encode())
        rates = (nats / tokens, nats / math.log(2) / size) if tokens else (math.nan, math.nan)
        found.append([*rates, tokens])
    return np.array(found)


def perplexity(model, **options):
    return Perplexity(model=str(model), **{"autocast": False, **options})


def assert_agrees(found, expected, tolerance=1e-5):
    has_score = expected[:, 2] > 0
    assert found["nll_tokens"].tolist() == expected[:, 2].tolist()
    assert found[COLUMNS[:2]].isna().all(axis=1).tolist() == (~has_score).tolist()
    scores = found[COLUMNS[:2]].to_numpy(dtype=float)
    assert_close(scores[has_score], expected[has_score, :2], tolerance)


@pytest.mark.contract
@pytest.mark.parametrize("has_start", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama3", "gemma2", "phi3"])
def test_scores_are_those_of_plain_transformers(decoder, architecture, has_start):
    model = decoder(architecture, has_start)

    found = perplexity(model)(FRAME)

    assert_agrees(found[IS_TEXT], plain_likelihoods(model, FRAME["text"][IS_TEXT]))
    assert found.loc[~IS_TEXT, COLUMNS].isna().all(axis=None)
    pd.testing.assert_frame_equal(found[["id", "text"]], FRAME)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("has_start", [False, True])
@pytest.mark.parametrize(("window", "overlap"), [(32, None), (33, 20), (16, 1), (6, None)])
def test_long_texts_are_read_in_overlapping_windows(decoder, window, overlap, has_start, loader):
    model = decoder(has_start=has_start)
    own = {"max_seq_length": window, "window_overlap": overlap, "windows_field": "windows"}

    found = perplexity(model, **own, loader=loader, batch_size=5)(FRAME)

    overlap = max(1, window // 8) if overlap is None else overlap
    expected = plain_likelihoods(model, FRAME["text"][IS_TEXT], window, overlap)
    assert_agrees(found[IS_TEXT], expected)
    assert found["windows"].max() > 3
    whole = plain_likelihoods(model, FRAME["text"][IS_TEXT])
    assert found["nll_tokens"][IS_TEXT].tolist() == whole[:, 2].tolist()


def test_max_chars_cuts_what_is_scored(decoder):
    model = decoder()
    found = perplexity(model, max_chars=40, seen_field="seen")(FRAME)
    texts = [text[:40] for text in FRAME["text"][IS_TEXT]]
    assert_agrees(found[IS_TEXT], plain_likelihoods(model, texts))
    assert 0 < (found["seen"] < 1).sum() < IS_TEXT.sum()


def test_special_tokens_in_a_text_are_text(decoder):
    model, text = decoder(), "market </s> river"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    plain, special = (
        len(tokenizer(text, split_special_tokens=split).input_ids) for split in (True, False)
    )
    (count,) = perplexity(model)([text])["nll_tokens"]
    assert count == plain - 1 > special - 1


def test_scores_select_rows_and_fill_buckets(decoder):
    scored = perplexity(decoder())(dd.from_pandas(FRAME, npartitions=3))
    values = scored["bits_per_byte"].compute()
    least = float(values.median())
    kept = Select(f"bits_per_byte <= {least!r}")(scored).compute()
    assert kept["id"].tolist() == FRAME["id"][values <= least].tolist()


def test_a_question_to_the_same_decoder_shares_its_weights(decoder):
    model = decoder()
    MODELS.evict()
    one = perplexity(model)
    asks = PromptClassifier(
        model=str(model), prompt="{text} ok?", answers=["yes", "no"], autocast=False
    )
    with collected_stats():
        found = asks(one(FRAME))
    assert len(MODELS.keys()) == 1
    assert_agrees(found[IS_TEXT], plain_likelihoods(model, FRAME["text"][IS_TEXT]))


def test_jobs_of_the_command_line_and_their_plan(decoder, tmp_path):
    model = decoder(has_start=True)
    FRAME.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    words = ["--classifier", "perplexity", "--model", str(model), "--set", "autocast=false"]
    words += ["--max-seq-length", "32"]
    for command in (["classify", "--field", "id"], ["plan"]):
        paths = [str(tmp_path / "in.jsonl"), *[str(tmp_path / "out")] * (command[0] != "plan")]
        done = CliRunner().invoke(main, [command[0], *paths, *command[1:], *words])
        assert done.exit_code == 0, done.output
    found = pq.read_table(tmp_path / "out").to_pandas().sort_values("id")
    assert_agrees(found[IS_TEXT], plain_likelihoods(model, FRAME["text"][IS_TEXT], 32, 4))


def test_workers_try_out_perplexity(decoder):
    with collected_stats() as runs:
        ModelProbe((perplexity(decoder(), max_seq_length=64),)).run(2**31)
    assert runs[0].rows == 1


def test_a_model_without_likelihoods_is_refused(sequence_classifier):
    with pytest.raises(CheckpointError, match="is a BertForSequenceClassification, which writes"):
        perplexity(sequence_classifier("bert"))(FRAME)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long_text": "truncate"}, "long_text='truncate' has no meaning for perplexity"),
        ({"window_aggregation": "max"}, "window_aggregation='max' has no meaning"),
        ({"base_model": "o/m"}, "base_model='o/m' has no meaning"),
        (
            dict.fromkeys(f"{name}_field" for name in ("nll", "bits_per_byte", "tokens")),
            "no column",
        ),
        ({"window_overlap": 0}, "window_overlap=0"),
        ({"max_seq_length": 9, "window_overlap": 9}, "leaves windows of 9 tokens no way forward"),
        ({"text_field": ["a", "b"]}, "name both in text_template="),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(options, message):
    with pytest.raises(ValueError, match=message):
        perplexity("o/m", **options)
