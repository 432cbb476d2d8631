"""Counts of tokens are those of the tokenizer's own library, of whole texts."""

import json
import shutil

import pandas as pd
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from gpuclassify import TokenCounter
from gpuclassify.commands.cli import main
from gpuclassify.models.checkpoint import CheckpointError
from tests.replicas import sample_texts

TEXTS = [
    *sample_texts(20),
    "",
    " \n",
    "word " * 3_000,
    "x" * 100_000,
    "naïve\u200d👩\u200d🚀",
    "\0",
    None,
]


@pytest.fixture(scope="module")
def tokenizer_alone(checkpoint, tmp_path_factory):
    """A directory with a tokenizer and nothing else; the model would read 512 tokens of a text."""
    folder = tmp_path_factory.mktemp("tokens") / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint("domain") / name, folder)
    return folder


@pytest.mark.parametrize("special", [False, True])
def test_counts_are_those_of_the_library(tokenizer_alone, special):
    library = Tokenizer.from_file(str(tokenizer_alone / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    encode = library.encode
    expected = [
        None if text is None else len(encode(text, add_special_tokens=special)) for text in TEXTS
    ]
    count = TokenCounter(model=str(tokenizer_alone), special_tokens=special, tokens_field="n")
    frame = pd.DataFrame({"text": TEXTS})
    counted = count(frame)
    assert counted["n"].dtype == "Int64"
    assert [None if pd.isna(n) else n for n in counted["n"]] == expected
    assert max(filter(None, expected)) > 3_000
    assert counted.drop(columns="n").equals(frame)
    planned = count.runner.token_lengths([text for text in TEXTS if text is not None])
    assert planned.whole.tolist() == [n for n in expected if n is not None]


def test_a_job_counts_no_rows_by_their_tokens(tokenizer_alone, tmp_path):
    pd.DataFrame({"text": TEXTS}).to_parquet(tmp_path / "in.parquet")
    words = ["classify", str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    done = CliRunner().invoke(
        main, [*words, "--classifier", "tokens", "--model", str(tokenizer_alone)]
    )
    assert done.exit_code == 0, done.output
    (part,) = (tmp_path / "out").glob("*.parquet")
    expected = TokenCounter(model=str(tokenizer_alone))(pd.DataFrame({"text": TEXTS}))["tokens"]
    assert pd.read_parquet(part)["tokens"].tolist() == expected.tolist()
    report = json.loads(CliRunner().invoke(main, ["report", words[2], "--json"]).stdout)
    assert report["labels"] == {}


def test_what_cannot_be_added_up_is_refused(tokenizer_alone, tmp_path):
    with pytest.raises(
        ValueError, match="max_chars=9 would count the tokens of texts that are cut"
    ):
        TokenCounter(model=str(tokenizer_alone), max_chars=9)
    (tmp_path / "model.txt").touch()
    with pytest.raises(CheckpointError, match=r"has no tokenizer among its files.*model\.txt"):
        TokenCounter(model=str(tmp_path))(pd.DataFrame({"text": ["a"]}))
