"""Settings: today's names, the older spellings, and what is refused."""

import inspect
import warnings
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest

from gpuclassify import (
    ContentTypeClassifier,
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    FineWebMixtralEduClassifier,
    FineWebNemotronEduClassifier,
    MultilingualDomainClassifier,
    NemotronSafetyGuardClassifier,
    PromptClassifier,
    QualityClassifier,
    Qwen3GuardClassifier,
    WildGuardClassifier,
    ZeroShotClassifier,
)
from gpuclassify.classifiers import FAMILIES
from gpuclassify.settings.old_spellings import OLD_SPELLINGS, Renamed, Withdrawn

# Those of what is no mapper have tests of their own.
OTHERS = ("exact", "fuzzy", "semantic", "reader", "writer", "cluster")
OLD_NAMES = [(*key, spelling) for key, spelling in OLD_SPELLINGS.items() if key[0] not in OTHERS]
RENAMED = [row for row in OLD_NAMES if isinstance(row[2], Renamed) and row[1] != "hf_token"]
REFUSED = [row for row in OLD_NAMES if isinstance(row[2], Withdrawn) and row[2].is_refused]
SAMPLE_VALUES = {
    "device": "cpu",
    "sort_by_length": False,
    "batch_size": 32,
    "model": "owner/model",
    "keep_raw": True,
}
PUBLISHED = [kind for kind in FAMILIES.values() if "model" in kind.defaults]


def classes_of(family, setting="model"):
    """The classes of a family that have a setting."""
    kinds = [kind for kind in FAMILIES.values() if family in ("*", kind.family)]
    return [kind for kind in kinds if setting in inspect.signature(kind).parameters]


def made(kind, **arguments):
    settings = {"model": "owner/other", **arguments}
    if kind is PromptClassifier:
        settings |= {"prompt": "{text}", "answers": ["yes", "no"]}
    if kind is ZeroShotClassifier:
        settings |= {"labels": ["yes", "no"]}
    if {"model_identifier", "aegis_variant"} & set(arguments):
        del settings["model"]
    return kind(**settings)


@pytest.mark.parametrize(("family", "name", "spelling"), RENAMED)
def test_an_older_spelling_is_the_same_setting_and_none_beside_todays(family, name, spelling):
    value = SAMPLE_VALUES.get(spelling.name, "a_name")
    today = {spelling.name: value}
    assert classes_of(family, spelling.name)
    for kind in classes_of(family, spelling.name):
        old = made(kind, **{name: value})
        assert old == made(kind, **today)
        assert getattr(old.options, spelling.name) == value
        for arguments in ({name: value} | today, today | {name: value}):
            with pytest.raises(TypeError, match=f"'{spelling.name}' twice: '{name}' is an older"):
                kind(**arguments)


def test_the_same_old_word_means_a_label_or_a_score_by_family():
    assert DomainClassifier(pred_column="x").options.label_field == "x"
    assert FineWebEduClassifier(pred_column="x").options.score_field == "x"
    assert FineWebEduClassifier(pred_column="x").options.label_field == "fineweb-edu-score-label"


@pytest.mark.parametrize(("family", "name", "spelling"), REFUSED)
def test_a_withdrawn_argument_passes_only_where_it_changes_nothing(family, name, spelling):
    for kind in classes_of(family):
        for harmless in spelling.harmless:
            assert made(kind, **{name: harmless}) == made(kind)
        with pytest.raises(TypeError, match=f"{name}=True is not supported: ."):
            made(kind, **{name: True})


def test_max_mem_gb_warns_at_the_callers_line_and_has_no_effect():
    with pytest.warns(UserWarning, match="max_mem_gb=4 has no effect") as caught:
        classifier = DomainClassifier(max_mem_gb=4)
    assert caught[0].filename == __file__
    assert classifier == DomainClassifier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DomainClassifier(max_mem_gb=None) == DomainClassifier()


# The calls that both generations of NeMo Curator print in their documentation.
NVIDIAS_QUALITY = {"model_identifier": "nvidia/quality-classifier-deberta", "max_chars": 6000}
EDUCATION = {"pred_column": "f", "int_column": "i", "quality_label_column": "l"}
DOCUMENTED_CALLS = [
    (DomainClassifier, {"filter_by": ["Games", "Sports"]}),
    (ContentTypeClassifier, {"filter_by": ["Blogs", "News"]}),
    (FineWebEduClassifier, {"batch_size": 256, "pred_column": "f", "int_column": "i"}),
    (FineWebMixtralEduClassifier, EDUCATION),
    (FineWebNemotronEduClassifier, EDUCATION),
    (
        DistributedDataClassifier,
        {**NVIDIAS_QUALITY, "max_seq_length": 1024, "model_inference_batch_size": 256},
    ),
    (
        DistributedDataClassifier,
        {**NVIDIAS_QUALITY, "score_field": "quality_prob", "filter_by": ["High", "Medium"]},
    ),
]
# Every constructor argument of each generation, at its default there.
FIRST_GENERATION = {
    "batch_size": 256,
    "text_field": "text",
    "pred_column": "pred",
    "device_type": "cuda",
    "autocast": True,
    "max_mem_gb": None,
}
OF_CATEGORIES = {"filter_by": None, "prob_column": None, "max_chars": 2000}
OF_EDUCATION = EDUCATION | {"max_chars": -1}
SECOND_GENERATION = {
    "cache_dir": None,
    "label_field": "preds",
    "score_field": None,
    "text_field": "text",
    "filter_by": None,
    "max_chars": None,
    "max_seq_length": None,
    "padding_side": "right",
    "sort_by_length": True,
    "model_inference_batch_size": 256,
    "autocast": True,
    "keep_tokens": False,
    "use_existing_tokens": False,
    "hf_token": None,
}


@pytest.mark.parametrize(("kind", "arguments"), DOCUMENTED_CALLS)
def test_documented_calls_are_accepted(kind, arguments):
    options = kind(**arguments).options
    today = {"model_identifier": "model", "model_inference_batch_size": "batch_size"}
    for name, value in arguments.items():
        spelling = OLD_SPELLINGS.get((kind.family, name))
        name = spelling.name if spelling else today.get(name, name)
        expected = tuple(sorted(value)) if isinstance(value, list) else value
        assert getattr(options, name) == expected


@pytest.mark.parametrize("kind", [*classes_of("category"), DistributedDataClassifier])
def test_every_argument_of_a_category_classifier_is_accepted(kind):
    made(kind, **FIRST_GENERATION | OF_CATEGORIES)
    made(kind, **SECOND_GENERATION)


@pytest.mark.parametrize("kind", classes_of("education"))
def test_every_argument_of_an_education_classifier_is_accepted(kind):
    names = ("score_field", "int_score_field", "label_field")
    today = {"float_score_field": "f", "int_score_field": "i", "label_field": "l"}
    for arguments in (FIRST_GENERATION | OF_EDUCATION, today | {"hf_token": "hf_1234"}):
        options = kind(**arguments).options
        assert [getattr(options, name) for name in names] == ["f", "i", "l"]
        assert options.max_chars is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filterby": 3}, "no argument 'filterby'.*Did you mean 'filter_by'.*Arguments are"),
        ({"max_char": 5}, "Did you mean 'max_chars'"),
        ({"zzzzzz": 5}, r"no argument 'zzzzzz'\. Arguments are model, "),
        ({"int_column": "x"}, "no argument 'int_column'"),
        ({"batch_size": 1.5}, "batch_size=1.5 is a float: pass a whole number"),
        ({"batch_size": True}, "batch_size=True is a bool"),
        ({"autocast": "yes"}, "autocast='yes' is a str: pass True or False"),
        ({"model": None}, "DomainClassifier needs model="),
        ({"model": 7}, "model=7 is not a name or a path"),
        ({"text_field": ""}, "text_field='' is not a column name"),
        ({"label_field": 3}, "label_field=3 is not a column name: leave it out for none"),
        ({"filter_by": [3]}, "filter_by holds 3 of type int: labels are str"),
        ({"filter_by": {"Games": 1}}, "pass a label or a list of labels"),
        ({"filter_by": 3}, "filter_by=3: pass a label or a list"),
        ({"min_score": {"Games": "high"}}, "min_score='high' is a str: pass a number"),
        ({"max_chars": np.float64(9)}, "max_chars=9.0 is a float"),
        ({"max_chars": np.True_}, "max_chars=True is a bool"),
        ({"autocast": np.int64(1)}, "autocast=1 is a int"),
        ({"min_confidence": np.str_("1")}, "min_confidence='1' is a str"),
        ({"filter_by": np.array([1, 2])}, "filter_by holds 1 of type int"),
        ({"filter_by": pd.Series(["a", None])}, "filter_by holds"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        DomainClassifier(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_chars": 0}, "max_chars=0 must be at least 1, or leave it out"),
        ({"max_seq_length": -5}, "max_seq_length=-5 must be at least 1"),
        ({"loader": "crossfitt"}, "loader='crossfitt' is not one of .*Did you mean 'crossfit'"),
        ({"dtype": "fp16"}, "dtype='fp16' is not one of None, 'float32', 'bfloat16', 'float16'"),
        ({"padding_side": "both"}, "padding_side='both' is not one of"),
        ({"problem_type": "regresion"}, "Did you mean 'regression'"),
        ({"filter_by": []}, r"filter_by=\[\] names no label"),
        ({"min_score": {}}, "names no label"),
        ({"min_confidence": 1.5}, r"min_confidence=1\.5 is not from 0 to 1"),
        ({"keep_field": "kept"}, "keep_field='kept' has no decision to write"),
    ],
)
def test_a_value_out_of_range_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DomainClassifier(**arguments)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_signature_shows_every_setting_with_its_true_default(kind):
    parameters = dict(inspect.signature(kind).parameters)
    assert parameters.pop("token").default is None
    needed = {name: ["a", "b"] for name, own in parameters.items() if own.default is own.empty}
    options = kind(**needed).options
    assert set(parameters) == {field.name for field in fields(options)}
    assert list(parameters)[: len(kind.defaults)] == list(kind.defaults)  # its own come first
    for name, parameter in parameters.items():
        if parameter.default is not ... and name not in needed:  # which stands for a long one
            assert getattr(options, name) == parameter.default


@pytest.mark.parametrize(
    "kind", [Qwen3GuardClassifier, NemotronSafetyGuardClassifier, WildGuardClassifier]
)
def test_a_prompt_of_a_class_names_the_column_that_is_given(kind):
    own = kind().options
    given = kind(text_field="body").options
    assert given.text_fields == tuple(
        "body" if name == own.text_field else name for name in own.text_fields
    )
    assert len(given.prompt) - len(own.prompt) == len("body") - len(own.text_field)


def test_a_subclass_with_its_own_constructor_shows_its_own_signature():
    class Own(DistributedDataClassifier):
        def __init__(self, threshold=3):
            super().__init__(model="owner/model", min_score=threshold)

    assert list(inspect.signature(Own).parameters) == ["threshold"]


@pytest.mark.parametrize(
    ("kind", "column", "max_chars", "max_seq_length"),
    [
        (DomainClassifier, "domain_pred", 2000, 512),
        (MultilingualDomainClassifier, "multilingual_domain_pred", 2000, 512),
        (QualityClassifier, "quality_pred", 6000, 1024),
        (ContentTypeClassifier, "content_pred", 6000, 1024),
        (FineWebEduClassifier, "fineweb-edu-score-label", None, 512),
        (FineWebMixtralEduClassifier, "fineweb-mixtral-edu-score-label", None, 512),
        (FineWebNemotronEduClassifier, "fineweb-nemotron-edu-score-label", None, 512),
        (DistributedDataClassifier, "preds", None, None),
    ],
)
def test_defaults_are_the_published_ones(kind, column, max_chars, max_seq_length):
    options = made(kind).options
    assert options.label_field == column
    assert (options.max_chars, options.max_seq_length) == (max_chars, max_seq_length)
    assert options.autocast is True
    assert options.batch_size is None


@pytest.mark.parametrize("dataset", [pd.DataFrame({"text": ["a"]}), ["a"]])
def test_data_are_for_the_call_and_no_setting(dataset):
    with pytest.raises(
        TypeError, match=r"make the classifier first, .* DomainClassifier\(\)\(ddf\)"
    ):
        DomainClassifier(dataset=dataset)
