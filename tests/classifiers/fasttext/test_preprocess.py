"""Texts reach a model as its authors prepare them: held against their functions, text by text."""

import re
import shutil
import unicodedata
import warnings

import dask.dataframe as dd
import fasttext
import numpy as np
import pandas as pd
import pytest
import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gpuclassify import FastTextClassifier, published
from gpuclassify.classifiers.fasttext.runner import TokenWords
from gpuclassify.hub import ModelChangedError, ModelNotFoundError
from tests.fasttext_models import TEXTS
from tests.replicas import sample_texts

FILE = "classifiers/ultra_fineweb_en.bin"
HOSTILE = [
    "ÀÉÎ ÇA C'EST Öffentlich\u0301 ﬁne ℌello ① İstanbul ẞ",
    "Line one\n\n\n\n\nline two\r\n\tline   three\v\f\x1c\x85 end\u2028more",
    "<|end|> the end<|end|>\n",
    "今日は 天気がいい。\u3000ガギグ 한국어 🙂👩‍👩‍👧",
    r"already \n escaped \t",
    " \n\n\n ",
    "\u00a0 no-break \u00a0",
    "a  b\x00c",
]
ALL = [*TEXTS, *HOSTILE, *sample_texts(20, seed=4)]


def prepared_by_ultra_fineweb(content, tokenizer):
    """What `fasttext_preprocess_func` of openbmb/Ultra-FineWeb-classifier does, step by step."""
    content = re.sub(r"\n{3,}", "\n\n", content)
    content = content.lower()
    decomposed = unicodedata.normalize("NFKD", content)
    content = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    ids = tokenizer.encode(content, add_special_tokens=False)
    content = " ".join(tokenizer.decode([number]) for number in ids)
    for char, escaped in (("\n", r"\\n"), ("\r", r"\\r"), ("\t", r"\\t")):
        content = re.sub(char, escaped, content)
    return re.sub(r" +", " ", content).strip()


def prepared_by_dclm(content):
    """What `classify_fasttext_hq_prob` of mlfoundations/dclm does."""
    return " ".join(content.strip().splitlines())


def prepared_by_openlid(text):
    """What `preprocess` in the README of hplt-project/openlid does."""
    nonword = regex.compile(r"[^\p{Word}\p{Zs}]|\d")
    text = text.strip().replace("\n", " ").lower()
    return regex.sub(nonword, "", regex.sub(regex.compile(r"\s\s+"), " ", text))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of a repository with a model of prepared texts, and the tokenizer that did it."""
    folder = tmp_path_factory.mktemp("repository")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(ALL, trainer)
    tokenizer.enable_truncation(4)  # as the file may ask for, and texts are read whole
    (folder / "local_tokenizer").mkdir()
    tokenizer.save(str(folder / "local_tokenizer" / "tokenizer.json"))
    plain = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "local_tokenizer" / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
    )
    lines = [
        f"__label__{'pos' if number % 2 else 'neg'} {prepared_by_ultra_fineweb(text, plain)}"
        for number, text in enumerate(ALL * 5)
    ]
    (folder / "lines.txt").write_text("\n".join(lines), encoding="utf-8", newline="\n")
    (folder / "classifiers").mkdir()
    quiet = {"thread": 1, "verbose": 0, "minCount": 1, "seed": 1}
    trained = fasttext.train_supervised(str(folder / "lines.txt"), dim=8, epoch=60, lr=1, **quiet)
    trained.save_model(str(folder / FILE))
    return folder, plain


def scores(folder, texts, partitions=1, **settings):
    settings = {"score_label": "__label__pos", "score_field": "pos"} | settings
    frame = dd.from_pandas(pd.DataFrame({"text": texts}), npartitions=partitions)
    classifier = FastTextClassifier(model=folder, file=FILE, **settings)
    return classifier(frame).compute(scheduler="sync")["pos"].to_numpy()


def expected_scores(folder, lines):
    model = fasttext.load_model(str(folder / FILE))
    answers = (model.predict(line, k=2) for line in lines)
    return [dict(zip(*answer, strict=True)).get("__label__pos", 0) for answer in answers]


def test_ultra_fineweb_is_given_what_its_authors_give_it(repository):
    folder, tokenizer = repository
    expected = expected_scores(folder, [prepared_by_ultra_fineweb(text, tokenizer) for text in ALL])
    for partitions in (1, 5):
        found = scores(folder, ALL, partitions, preprocess="ultra-fineweb")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    found = published("ultra-fineweb-en", model=folder)(pd.DataFrame({"text": ALL}))
    np.testing.assert_allclose(found["ultra_fineweb_score"], expected, rtol=0, atol=1e-6)
    with pytest.warns(UserWarning, match="ultra-fineweb"):
        raw = scores(folder, ALL)
    assert np.abs(raw - expected).max() > 0.01  # so that the test can fail


def test_dclm_is_given_what_its_authors_give_it(repository):
    folder, _ = repository
    expected = expected_scores(folder, map(prepared_by_dclm, ALL))
    np.testing.assert_allclose(scores(folder, ALL, preprocess="dclm"), expected, rtol=0, atol=1e-6)
    plain = expected_scores(folder, [text.replace("\n", " ") for text in ALL])
    assert np.abs(np.subtract(plain, expected)).max() > 1e-4


def test_openlid_is_given_what_its_authors_give_it(repository):
    folder, _ = repository
    sentence = "Maskinsjefen er oppteken av å løfta fram dei 12 maritime\n utdanningane."
    assert prepared_by_openlid(sentence).split()[-2:] == ["maritime", "utdanningane"]
    texts = [sentence, *ALL, "a\r\nb\x85c", "12 345,6 €", "v1.2\t\tfoo_bar-baz"]
    expected = expected_scores(folder, map(prepared_by_openlid, texts))
    found = scores(folder, texts, preprocess="openlid")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    plain = expected_scores(folder, [text.replace("\n", " ") for text in texts])
    assert np.abs(np.subtract(plain, expected)).max() > 1e-4
    named = published("openlid", model=folder, file=FILE)(pd.DataFrame({"text": texts}))
    assert set(named["openlid_language"]) <= {"pos", "neg"}


def test_lines_are_those_of_the_authors_to_the_character_and_so_are_planned_words(repository):
    folder, tokenizer = repository
    made = FastTextClassifier(model=folder, file=FILE, preprocess="ultra-fineweb")
    lines = [prepared_by_ultra_fineweb(text, tokenizer) for text in ALL]
    assert TokenWords(folder / "local_tokenizer/tokenizer.json")(ALL) == lines
    words = [len(line.encode().split()) for line in lines]
    assert made.runner.token_lengths(ALL).whole.tolist() == words


def test_the_tokenizer_is_part_of_the_model(repository, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(repository[0], copy)
    made = FastTextClassifier(model=copy, file=FILE, preprocess="ultra-fineweb")
    before = made.describe()
    path = copy / "local_tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ModelChangedError, match=r"tokenizer\.json .* is not the file"):
        made.prepare()
    again = FastTextClassifier(model=copy, file=FILE, preprocess="ultra-fineweb")
    after = again.describe()
    assert before["model_revision"] == after["model_revision"]
    assert before["tokenizer_revision"] != after["tokenizer_revision"]
    assert made.model.key() != again.model.key()
    path.unlink()
    lone = FastTextClassifier(model=copy / FILE, preprocess="ultra-fineweb")
    with pytest.raises(ModelNotFoundError, match=r"pass the whole repository .* as model="):
        lone(pd.DataFrame({"text": ["a"]}))


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "openbmb/Ultra-FineWeb-classifier", "file": FILE},
        {"model": "/copies/ultra_fineweb_zh.bin"},
        {"model": "model.bin", "file": FILE},
    ],
)
def test_a_model_without_its_preparation_warns_where_it_is_made(settings):
    with pytest.warns(UserWarning, match='pass preprocess="ultra-fineweb"') as told:
        FastTextClassifier(**settings)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FastTextClassifier(**settings, preprocess="ultra-fineweb")
        FastTextClassifier(model="mlfoundations/fasttext-oh-eli5")


def test_an_unknown_preparation_lists_those_that_exist():
    with pytest.raises(
        ValueError, match=r"one of None, 'dclm', 'lower', 'openlid', 'ultra-fineweb'\..*mean 'ultra"
    ):
        FastTextClassifier(model="m.bin", preprocess="ultrafineweb")
