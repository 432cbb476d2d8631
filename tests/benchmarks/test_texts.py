"""Documents of benchmarks have the lengths that are claimed."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.models import SHAPES, TINY_SIZES, write_model
from benchmarks.texts import LENGTHS, Lengths, texts_of_lengths


def test_web_lengths_have_the_median_and_the_share_above_the_limit_that_is_claimed():
    lengths = LENGTHS["web"].sample(1_001)
    assert np.median(lengths) == 350
    assert np.mean(np.asarray(lengths) > 512) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_documents_have_the_prescribed_lengths(tmp_path, model):
    directory = write_model(tmp_path / "model", replace(SHAPES[model], **TINY_SIZES))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    wanted = Lengths(80, 0.9).sample(30)
    texts = texts_of_lengths(wanted, tokenizer)
    found = sorted(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert len(set(texts)) == 30
    assert all(length >= tokens for length, tokens in zip(wanted, found, strict=True))
    assert sum(found) > 0.95 * sum(wanted)
