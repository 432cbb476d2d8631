"""The catalogue: what it declares, and each layout against plain code, one document at a time."""

import json
import re
import shutil
from typing import get_args

import fasttext
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
)

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    Route,
    SpanClassifier,
    classify,
    published,
)
from gpuclassify.classifiers import FAMILIES
from gpuclassify.classifiers.published import CATALOGUE, EuroFilterClassifier
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.settings.options import ProblemType
from tests.oracle import assert_close, plain_tokenizer, probabilities, raw_outputs
from tests.replicas import sample_texts, write_celadon, write_checkpoint, write_eurofilter

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ALL = [own for e in CATALOGUE for own in (map(e.of, e.variants) if e.variants else [e])]
LONG = " ".join(sample_texts(40, seed=5, min_words=60, max_words=150))
TEXTS = [*sample_texts(12, seed=21, max_words=50), " ", "river", "oven flour " * 800, LONG]
ONE_NUMBER = {"num_labels": 1, "problem_type": "regression"}


def scored(name, model, texts=TEXTS, **settings):
    """The columns that a classifier of the catalogue adds, with other weights."""
    how = {} if "fast" in str(model) else {"autocast": False}
    classifier = published(name, model=model, **how, **settings)
    return classifier(pd.DataFrame({"text": texts})).drop(columns="text")


def parts(model, texts, **cut):
    """Plain transformers' outputs of each part of each text, and how many tokens each part has."""
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = plain_tokenizer(model)
    with torch.inference_mode():
        for text in texts:
            rows = tokenizer(text, truncation=True, return_overflowing_tokens=True, **cut)
            ids = rows["input_ids"]
            own = [sum(i not in tokenizer.all_special_ids for i in row) for row in ids]
            logits = [network(torch.tensor([row])).logits[0].numpy() for row in ids]
            yield np.stack(logits), np.array(own)


def struct_of(column):
    """The rows of a column of structs, as an array."""
    return np.array([[*row.values()] for row in pa.array(column.array).to_pylist()])


# What is declared.


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_each_makes_a_classifier_whose_columns_are_known_without_a_network(entry):
    classifier = published(entry.name)
    assert type(classifier) is entry.kind
    assert entry.licence and entry.purpose and entry.cite
    assert "/" in entry.model and entry.model == classifier.options.model
    assert all(re.fullmatch(r"[a-zA-Z0-9_]+", name) for name in classifier.schema().names)
    assert "{}" not in repr(classifier)


def test_names_are_new_and_columns_of_different_models_differ():
    names = [entry.name for entry in ALL]
    assert len({*names, *FAMILIES}) == len(names) + len(FAMILIES) and len(names) == 128
    of_each = [
        {
            tuple((entry.of(word) if word else entry)().schema().names)
            for word in entry.variants or [None]
        }
        for entry in CATALOGUE
    ]
    columns = [name for rows in of_each for row in rows for name in row]
    assert len(set(columns)) == len(columns)
    for entry in CATALOGUE:
        if entry.variant == "LANGUAGE":  # so that rows can be routed to them
            route = Route(by="language", to={word: entry.of(word)() for word in entry.variants})
            assert route.schema() == entry.of(next(iter(entry.variants)))().schema()


def test_names_of_classes_are_names_here_as_well():
    assert published("domain", filter_by="News") == DomainClassifier(filter_by="News")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("finemth", "called 'finemth'. Did you mean 'finemath'? `gpuclassify models` lists all"),
        ("stack-edu-pyton", "has no 'pyton'. Did you mean 'python'? LANGUAGE is one of c, cpp"),
        (
            "stack-edu",
            "stands for 15 models: say which LANGUAGE, as in 'stack-edu-c'. There are c, cpp",
        ),
        (5, "called 5. `gpuclassify models` lists all"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(name, cure):
    with pytest.raises(ValueError, match=re.escape(cure)):
        published(name)


def test_a_users_settings_stand_over_those_declared():
    mine = published("finemath", score_field="mathematics", max_seq_length=128, text_field="body")
    assert mine.schema().names == ["mathematics", "finemath_int_score"]
    assert (mine.options.max_seq_length, mine.text_field) == (128, "body")
    assert published("qurater", long_text="truncate").options.window_overlap is None
    with pytest.raises(TypeError, match=r"no argument 'min_scor'\. Did you mean 'min_score'"):
        published("finemath", min_scor=3)


# Each layout.


@pytest.mark.parametrize(
    ("name", "column", "tokens"),
    [
        ("finemath", "finemath", 512),
        ("stack-edu-python", "stack_edu", 1024),
        ("multilingual-edu-small", "multilingual_edu_small", 512),
    ],
)
def test_scores_of_finewebs_kind(sequence_classifier, name, column, tokens):
    kind = "modernbert" if name.startswith("multilingual") else "bert"
    model = sequence_classifier(kind, max_position_embeddings=tokens, **ONE_NUMBER)
    found = scored(name, model)
    expected = raw_outputs(model, TEXTS, tokens)[:, 0].clip(0, 5)
    assert_close(found[f"{column}_score"], expected)
    assert found[f"{column}_int_score"].tolist() == [round(float(score)) for score in expected]
    kept = published(name, model=model, autocast=False, min_score=3)(pd.DataFrame({"text": TEXTS}))
    assert len(kept) == (expected >= 3).sum() > 0


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("finepdfs-edu-deu_Latn", "finepdfs_edu_score"),
        ("finepdfs-ocr-quality", "finepdfs_ocr_quality_score"),
    ],
)
def test_the_better_end_of_a_document_counts(sequence_classifier, name, column):
    model = sequence_classifier("modernbert", max_position_embeddings=2048, **ONE_NUMBER)
    texts = [*TEXTS, LONG[:20_000], LONG[:20_001]]
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    cut = {"truncation": True, "max_length": 2048, "return_tensors": "pt"}
    head = plain_tokenizer(model)
    tail = plain_tokenizer(model, truncation_side="left")
    expected = []
    for text in texts:
        ends = [head(text[:10_000], **cut)]
        ends += [tail(text[-10_000:], **cut)] if len(text) > 20_000 else []
        with torch.inference_mode():
            expected.append(max(network(end["input_ids"]).logits.item() for end in ends))
    assert len(texts[-3]) > 20_001
    if column == "finepdfs_edu_score":
        expected = np.clip(expected, 0, 5)
    assert_close(scored(name, model, texts)[column], expected)


def test_grades_of_meta_rater(sequence_classifier):
    model = sequence_classifier("modernbert", num_labels=6, max_position_embeddings=8192)
    found = scored("meta-rater-readability", model)
    expected = probabilities(raw_outputs(model, TEXTS, 4096))
    assert_close(struct_of(found["meta_rater_readability_scores"]), expected)
    assert found["meta_rater_readability_label"].tolist() == [*map(str, expected.argmax(axis=1))]
    assert found["meta_rater_readability_label"].nunique() > 2


def test_labels_of_a_model_without_a_tokenizer_of_its_own(sequence_classifier, tmp_path):
    labels = ("MT", "LY", "SP", "it", "ID", "NA", "ne")
    home = sequence_classifier("xlm-roberta", labels=labels)
    model = tmp_path / "register"
    shutil.copytree(home, model, ignore=shutil.ignore_patterns("*token*", "*.model"))
    found = scored("web-register", model, base_model=home)["web_registers"]
    logits = torch.tensor(raw_outputs(home, TEXTS, 512))
    expected = [[labels[n] for n in row.nonzero()[:, 0]] for row in logits.sigmoid() >= 0.5]
    assert found.tolist() == expected
    assert len({len(row) for row in expected}) > 2
    with pytest.raises(CheckpointError, match="has its own sizes and tokenizer"):
        scored("web-register", home, base_model=home)


def test_grades_as_labels(sequence_classifier):
    labels = ("Problematic", "None", "Minimal", "Basic", "Good", "Excellent")
    model = sequence_classifier("modernbert", labels=labels, max_position_embeddings=8192)
    found = scored("mmbert-edu", model)
    expected = probabilities(raw_outputs(model, TEXTS, 8192))
    assert found["mmbert_edu_label"].tolist() == [labels[n] for n in expected.argmax(axis=1)]
    assert_close(found["mmbert_edu_confidence"], expected.max(axis=1))


def test_four_numbers_of_windows_weighted_by_their_length(sequence_classifier):
    model = sequence_classifier("llama", num_labels=4)
    found = struct_of(scored("qurater", model)["qurater_scores"])
    outputs = [*parts(model, TEXTS, max_length=512, stride=0)]
    expected = [np.average(own, axis=0, weights=lengths.clip(1)) for own, lengths in outputs]
    assert_close(found, expected)
    assert max(len(own) for own, _ in outputs) > 4
    least = {"educational_value": float(np.median(found[:, 3]))}
    assert 0 < len(scored("qurater", model, min_score=least)) < len(TEXTS)


def test_the_worst_window_of_a_prompt_counts(sequence_classifier):
    model = sequence_classifier("deberta-v2", num_labels=2, max_position_embeddings=512)
    found = scored("prompt-guard-2-86m", model)
    assert [*found] == ["prompt_guard_2_86m_scores"]
    outputs = parts(model, TEXTS, max_length=512, stride=64)
    expected = [probabilities(own).max(axis=0) for own, _ in outputs]
    assert_close(struct_of(found["prompt_guard_2_86m_scores"]), expected)


def test_two_labels_get_the_names_of_the_card(sequence_classifier):
    model = sequence_classifier("roberta", num_labels=2)
    found = scored("granite-guardian-hap-38m", model)
    expected = probabilities(raw_outputs(model, TEXTS))
    assert_close(struct_of(found["hap_38m_scores"]), expected)
    labels = [["not_toxic", "toxic"][n] for n in expected.argmax(axis=1)]
    assert found["hap_38m_label"].tolist() == labels
    named = sequence_classifier("roberta", labels=("toxic", "not_toxic"))
    with pytest.raises(CheckpointError, match="are not those of"):
        scored("granite-guardian-hap-38m", named)


def test_plain_regressions(sequence_classifier):
    model = sequence_classifier("deberta-v2", **ONE_NUMBER)
    found = scored("readability", model)["readability_score"]
    assert_close(found, raw_outputs(model, TEXTS)[:, 0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_levels_of_five_heads_on_the_first_token(tmp_path, side):
    model = write_celadon(tmp_path / "celadon")
    tensors = load_file(model / "model.safetensors")
    backbone = AutoModel.from_config(AutoConfig.from_pretrained(model)).eval()
    named = {k.removeprefix("deberta."): t for k, t in tensors.items() if "deberta." in k}
    backbone.load_state_dict(named)
    tokenizer, expected, margins = plain_tokenizer(model), [], []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            first = backbone(inputs["input_ids"]).last_hidden_state[0, 0]
        logits = torch.stack(
            [tensors[f"heads.{n}.weight"] @ first + tensors[f"heads.{n}.bias"] for n in range(5)]
        )
        expected.append(logits.argmax(dim=1).tolist())
        best = logits.topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())

    found = scored("celadon", model, padding_side=side)["celadon_scores"]

    assert min(margins) > 1e-4  # so that all must agree
    assert struct_of(found).tolist() == expected
    assert len({level for row in expected for level in row}) == 4
    axes = ["race_origin", "gender_sex", "religion", "ability", "violence"]
    assert pa.array(found.array).type.names == axes
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"missing: deberta\.encoder\.layer\.2"):
        scored("celadon", model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_score_and_a_probability_on_the_pooled_first_token(tmp_path, side):
    """The oracle is transformers' own class of the same backbone, with a layer for each number."""
    model = write_eurofilter(tmp_path / "eurofilter")
    tensors = load_file(model / "model.safetensors")
    config = AutoConfig.from_pretrained(model)
    config.num_labels = 2
    config.architectures = None
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    layers = ("regressor", "binary_classifier")
    named = {name: t for name, t in tensors.items() if not name.startswith(layers)}
    named |= {
        f"classifier.{part}": torch.cat([tensors[f"{layer}.{part}"] for layer in layers])
        for part in ("weight", "bias")
    }
    plain.load_state_dict(named)
    tokenizer, expected = plain_tokenizer(model), []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.inference_mode():
            score, logit = plain(inputs["input_ids"]).logits[0]
        expected.append([score.item(), logit.sigmoid().item()])

    found = scored("eurofilter", model, padding_side=side)["eurofilter_scores"]

    assert_close(struct_of(found), np.array(expected))
    assert np.std(expected, axis=0).min() > 1e-3
    assert pa.array(found.array).type.names == ["educational_value", "is_educational"]
    middle = float(np.median([probability for _, probability in expected]))
    kept = scored("eurofilter", model, min_score={"is_educational": middle + 1e-4})
    assert len(kept) == sum(probability > middle + 1e-4 for _, probability in expected) > 3


def test_the_probability_of_one_label_of_fasttext(fasttext_model):
    path = fasttext_model("softmax")
    found = scored("gneissweb-tech", path)["gneissweb_tech_score"]
    library = fasttext.load_model(str(path))
    for score, text in zip(found, TEXTS, strict=True):
        labels, numbers = library.predict(text.replace("\n", " "), k=-1)
        if labels:
            assert score == pytest.approx(dict(zip(labels, numbers, strict=True))["__label__hq"])
        else:
            assert np.isnan(score)
    with_breaks = ["theorem\x85proof buy", " \u2028 lemma"]
    dclm = scored("dclm", path, with_breaks)["dclm_score"]
    lines = ["theorem proof buy", "lemma"]
    expected = [
        dict(zip(*library.predict(line, k=-1), strict=True))["__label__hq"] for line in lines
    ]
    assert dclm.tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="no label '__label__1'"):
        scored("dolma3", path)


@pytest.mark.parametrize(
    ("name", "architecture", "labels"),
    [
        ("ner-base", "bert", ("O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG",
                              "B-LOC", "I-LOC")),
        ("multilingual-ner-large", "xlm-roberta", ("O", "B-DATE", "I-DATE", "B-PER", "I-PER",
                                                   "B-ORG", "I-ORG", "B-LOC", "I-LOC")),
        ("piiranha", "deberta-v2", ("I-CITY", "I-EMAIL", "O")),
        ("stanford-deidentifier", "bert", ("O", "VENDOR", "DATE", "HCW", "HOSPITAL", "ID",
                                           "PATIENT", "PHONE")),
        ("deid-i2b2-roberta", "roberta", ("O", *(f"{letter}-STAFF" for letter in "BILU"))),
    ],
)  # fmt: skip
def test_spans_of_token_classifiers(token_classifier, name, architecture, labels):
    model = token_classifier(architecture, labels=labels)
    texts = TEXTS[:14]
    (column,) = published(name).schema().names
    found = scored(name, model, texts)[column]
    every = SpanClassifier(
        model=model, autocast=False, max_seq_length=published(name).options.max_seq_length
    )(texts)["spans"]
    kept = published(name).options.labels
    for ours, theirs in zip(found, every, strict=True):
        expected = [s for s in theirs if kept is None or s["label"] in kept]
        assert [(s["start"], s["label"]) for s in ours] == [
            (s["start"], s["label"]) for s in expected
        ]
    assert sum(map(len, found)) > 10


def test_a_chain_of_models_gives_the_columns_of_each_alone(sequence_classifier, fasttext_model):
    frame = pd.DataFrame({"text": TEXTS})
    models = {
        "finemath": sequence_classifier("bert", **ONE_NUMBER),
        "readability": sequence_classifier("deberta-v2", **ONE_NUMBER),
        "granite-guardian-hap-125m": sequence_classifier("roberta", num_labels=2),
    }
    chained = [published(name, model=path, autocast=False) for name, path in models.items()]
    chained.append(published("gneissweb-edu", model=fasttext_model("softmax")))
    found = classify(frame, chained)
    for classifier in chained:
        alone = classifier(frame)
        for name in classifier.schema().names:
            if pd.api.types.is_float_dtype(alone[name]):
                assert_close(found[name].fillna(-1), alone[name].fillna(-1))
    assert [*found] == ["text", *(name for own in chained for name in own.schema().names)]


def write_prompts(directory):
    return write_checkpoint(directory, "prompt-task-complexity")


@pytest.mark.parametrize(
    ("kind", "write", "own"),
    [
        (DistributedDataClassifier, write_celadon, "regression"),
        (EuroFilterClassifier, write_eurofilter, "regression"),
        (DistributedDataClassifier, write_prompts, "single_label_classification"),
    ],
)
def test_a_layout_with_one_problem_type_takes_no_other(tmp_path, kind, write, own):
    model = str(write(tmp_path / "model"))
    for given in {*get_args(ProblemType)} - {own}:
        cure = f"problem_type='{given}', but .* a {own} model: leave problem_type out, or pass"
        with pytest.raises(CheckpointError, match=cure):
            kind(model=model, problem_type=given).check(pd.DataFrame({"text": TEXTS}))
