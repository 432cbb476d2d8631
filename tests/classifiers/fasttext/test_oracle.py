"""Labels and probabilities are those of fastText itself, of a file of each kind and a real one."""

import re

import dask.dataframe as dd
import fasttext
import numpy as np
import pandas as pd
import pytest

from gpuclassify import FastTextClassifier, LanguageIdentifier
from tests.fasttext_models import KINDS, TEXTS
from tests.replicas import sample_texts

TOLERANCE = 1e-6  # of a probability
SEPARATORS = re.compile("[ \n\r\t\v\f\0]")  # of words, for the library


def documents(texts):
    return pd.DataFrame({"text": pd.Series(texts, dtype="str")})


def answers(path, texts, k):
    """What the library gives for one text after the other, and all labels.

    Of a text's words it gets all but that which ends a line, behind which it reads nothing.
    """
    model = fasttext.load_model(str(path))
    return answers_of(model, texts, k), model.get_labels()


def answers_of(model, texts, k):
    words = [[word for word in SEPARATORS.split(text) if word != "</s>"] for text in texts]
    return [model.predict(" ".join(own), k=k) for own in words]


def assert_lists_are_the_librarys(found, path, k, prefix=""):
    expected, _ = answers(path, found["text"], k)
    for (labels, probabilities), own, numbers in zip(
        expected, found["top_labels"], found["top_scores"], strict=True
    ):
        assert [prefix + label for label in own] == list(labels)
        np.testing.assert_allclose(numbers, probabilities, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_labels_of_every_kind_of_file_are_the_librarys(fasttext_model, kind):
    path = fasttext_model(kind)
    texts = [*TEXTS, *sample_texts(20, seed=2)]
    found = FastTextClassifier(model=path, top_k=3, confidence_field="sure")(documents(texts))
    assert_lists_are_the_librarys(found, path, 3)
    assert found["fasttext_pred"].tolist() == [own[0] for own in found["top_labels"]]
    np.testing.assert_array_equal(found["sure"], [own[0] for own in found["top_scores"]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_labels_own_whichever_label_is_first(fasttext_model, kind):
    path = fasttext_model(kind)
    expected, labels = answers(path, TEXTS, -1)
    name = "__label__hq_7" if kind == "many" else "__label__hq"
    assert name in labels
    found = FastTextClassifier(model=path, score_label=name, score_field="hq")(documents(TEXTS))
    by_name = [dict(zip(*answer, strict=True)).get(name, 0.0) for answer in expected]
    np.testing.assert_allclose(found["hq"], by_name, rtol=0, atol=TOLERANCE)
    assert (found["fasttext_pred"] != name).any()


@pytest.mark.parametrize("ends", ["</s>", "</s> </s>", "\t</s>\r\n</s>\0", "</s>\n"])
def test_a_text_is_read_beyond_the_word_that_ends_a_line(fasttext_model, ends):
    path = fasttext_model("words")
    texts = [f"{ends} theorem proof", f"click buy {ends} theorem proof lemma integral {ends}"]
    plain = ["theorem proof", "click buy theorem proof lemma integral"]
    made = FastTextClassifier(model=path, confidence_field="sure", seen_field="seen")
    found = made(documents([*texts, *plain, "x</s>y </s>z", "</S>"]))
    (first, second), (third, fourth) = found["sure"][:2], found["sure"][2:4]
    assert [first, second] == pytest.approx([third, fourth], abs=TOLERANCE)
    expected = fasttext.load_model(str(path)).predict(["x</s>y </s>z", "</S>"])[1]
    assert found["sure"][4:].tolist() == pytest.approx(np.concatenate(expected), abs=TOLERANCE)
    assert (found["seen"] == 1).all()


@pytest.mark.parametrize("k", [1, 5, 176])
def test_languages_of_a_real_model_are_the_librarys(real_model, k):
    texts = ["Guten Tag, wie geht es?", "Il pleut\nà verse", "今日は天気がいい", "Привет мир"]
    found = LanguageIdentifier(model=real_model, top_k=k)(documents([*texts, *TEXTS]))
    assert found["language"].tolist()[:4] == ["de", "fr", "ja", "ru"]
    assert_lists_are_the_librarys(found, real_model, k, prefix="__label__")


@pytest.mark.parametrize("partitions", [1, 4])
def test_lines_are_labelled_alone_and_the_text_by_most_of_its_characters(real_model, partitions):
    german, english = "Dies ist ein Satz in deutscher Sprache.", "This one is in English, is it?"
    texts = [
        f"{english}\n\n{german}\r\n{german}  \n{english}\nshort",
        f"{german}\n{german}",
        "Il pleut à verse.",
        "   \n\t\n",
        "",
        None,
        *(f"{a}\u2028{b}" for a, b in zip(TEXTS, reversed(TEXTS), strict=True)),
    ]
    model = fasttext.load_model(str(real_model))
    columns = {"line_labels_field": "lines", "label_shares_field": "shares"}
    made = LanguageIdentifier(
        model=real_model, long_text="lines", score_label="en", score_field="en", **columns
    )
    frame = dd.from_pandas(documents(texts), npartitions=partitions)
    found = made(frame).compute().to_dict("records")
    for text, row in zip(texts, found, strict=True):
        if text is None:
            assert row["lines"] is None and row["shares"] is None
            continue
        labels, sums, weighted, whole, own = [], {}, {}, 0, 0.0
        for line in text.splitlines() if text.strip() else [text]:
            if text.strip() and not line.strip():
                labels.append(None)
                continue
            ((every, numbers),) = answers_of(model, [line], -1)
            name, chars = every[0].removeprefix("__label__"), max(1, len(line))
            labels.append(name)
            whole += chars
            sums[name] = sums.get(name, 0) + chars
            weighted[name] = weighted.get(name, 0.0) + chars * numbers[0]
            own += chars * dict(zip(every, numbers, strict=True)).get("__label__en", 0)
        assert row["lines"] == labels
        shares = {pair["label"]: pair["share"] for pair in row["shares"]}
        assert shares == pytest.approx({name: chars / whole for name, chars in sums.items()})
        assert [*shares.values()] == sorted(shares.values(), reverse=True)
        assert sums[row["language"]] == max(sums.values())
        best = row["language"]
        assert row["language_confidence"] == pytest.approx(weighted[best] / sums[best], abs=1e-5)
        assert row["en"] == pytest.approx(own / whole, abs=1e-5)
    assert [row["language"] for row in found[:3]] == ["de", "de", "fr"]
    kept = LanguageIdentifier(model=real_model, long_text="lines", filter_by="de")
    assert kept(documents(texts[:3])).index.tolist() == [0, 1]


def test_a_text_of_which_no_word_is_known_has_null_as_the_library_has_no_label(tmp_path):
    lines, path = tmp_path / "one.txt", tmp_path / "one.bin"
    lines.write_text("__label__a one two\n__label__b three four\n" + "__label__a\n" * 3)
    quiet = {"thread": 1, "verbose": 0, "minCount": 1}
    fasttext.train_supervised(str(lines), dim=4, **quiet).save_model(str(path))
    data = path.read_bytes()
    assert data.count(b"</s>\0") == 1  # so that the end of a line is no word that is known
    path.write_bytes(data.replace(b"</s>\0", b"</x>\0"))
    texts = ["one", "unknown", ""]
    assert [len(labels) for labels, _ in answers(path, texts, 1)[0]] == [1, 0, 0]
    settings = {"confidence_field": "sure", "score_label": "__label__a", "score_field": "a"}
    made = FastTextClassifier(model=path, keep_field="keep", min_score=0.0, **settings)
    found = made(documents(texts))
    assert found[["fasttext_pred", "sure", "a"]].isna().all(axis=1).tolist() == [False, True, True]
    assert found["keep"].tolist() == [True, False, False]
