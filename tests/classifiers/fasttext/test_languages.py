"""Languages by other names than the model's: the table against the models' own labels."""

import fasttext
import pandas as pd
import pytest
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from gpuclassify import LanguageIdentifier
from gpuclassify.classifiers.fasttext.runner import _THREE_LETTERS, same_language

FRAME = pd.DataFrame({"text": ["a text"]})


def test_two_letters_are_those_of_the_real_model(real_model):
    labels = fasttext.load_model(str(real_model)).get_labels()
    assert {f"__label__{code}" for code in _THREE_LETTERS} <= {*labels}


def test_three_letters_are_those_of_a_large_model():
    found = {code: same_language(code, FAIRSEQ_LANGUAGE_CODES) for code in _THREE_LETTERS}
    assert [code for code, labels in found.items() if not labels] == ["la"]  # it has no Latin
    named = {"de": "deu_Latn", "fr": "fra_Latn", "ja": "jpn_Jpan", "ar": "arb_Arab"}
    assert {code: found[code] for code in named} == {c: [label] for c, label in named.items()}
    assert found["zh"] == ["zho_Hans", "zho_Hant"]
    for code, labels in found.items():
        assert all(same_language(label, _THREE_LETTERS) == [code] for label in labels)


def test_a_language_by_another_name_is_refused_with_the_models_own(fasttext_model):
    classifier = LanguageIdentifier(model=fasttext_model("chars"), filter_by=["deu_Latn", "lq"])
    with pytest.raises(ValueError, match=r"no language 'deu_Latn' in .*chars.bin calls it 'de'"):
        classifier(FRAME)
    large = LanguageIdentifier(
        model="/away.bin", labels=FAIRSEQ_LANGUAGE_CODES, filter_by=["fra_Latn", "de"]
    )
    with pytest.raises(ValueError, match=r"no language 'de' in .* calls it 'deu_Latn', so pass"):
        large.check(FRAME)
    assert LanguageIdentifier().options.model == "cis-lmu/glotlid"


def test_capitals_have_the_language_of_small_letters(real_model):
    sentences = {
        "de": "Der Zug fährt heute nicht,\nweil es sehr viel geschneit hat.",
        "fr": "Le train ne circule pas aujourd'hui, parce qu'il a beaucoup neigé.",
        "es": "El tren no circula hoy porque ha nevado mucho durante la noche.",
        "it": "Il treno oggi non parte perché ha nevicato molto durante la notte.",
        "pl": "Pociąg dzisiaj nie jedzie, ponieważ spadło bardzo dużo śniegu.",
        "ru": "Поезд сегодня не идёт, потому что выпало очень много снега.",
        "en": "The train does not run today because it has snowed a lot.",
        "nl": "De trein rijdt vandaag niet omdat het heel veel gesneeuwd heeft.",
    }
    frame = pd.DataFrame({"text": [text.upper() for text in sentences.values()]})
    plain = LanguageIdentifier(model=real_model)(frame)["language"]
    assert (plain != [*sentences]).sum() > 2  # so that the test can fail
    found = LanguageIdentifier(model=real_model, preprocess="lower")(frame)
    assert found["language"].tolist() == [*sentences]
    model = fasttext.load_model(str(real_model))
    for text, share in zip(frame["text"], found["language_confidence"], strict=True):
        _, shares = model.predict(text.replace("\n", " ").lower())
        assert share == pytest.approx(shares[0], abs=1e-6)
