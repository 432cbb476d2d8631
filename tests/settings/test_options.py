"""Settings: today's names, the older spellings, and what is refused."""

import inspect
import warnings
from dataclasses import fields

import pytest

from gpuclassify import (
    ContentTypeClassifier,
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    FineWebMixtralEduClassifier,
    FineWebNemotronEduClassifier,
    MultilingualDomainClassifier,
    QualityClassifier,
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
    if {"model_identifier", "aegis_variant"} & set(arguments):
        del settings["model"]
    return kind(**settings)


@pytest.mark.parametrize(("family", "name", "spelling"), RENAMED)
def test_an_older_spelling_is_the_same_setting(family, name, spelling):
    assert classes_of(family, spelling.name)
    for kind in classes_of(family, spelling.name):
        value = SAMPLE_VALUES.get(spelling.name, "a_name")
        old, new = made(kind, **{name: value}), made(kind, **{spelling.name: value})
        assert old == new
        assert getattr(old.options, spelling.name) == value


@pytest.mark.parametrize(("family", "name", "spelling"), RENAMED)
def test_a_setting_in_two_spellings_is_refused(family, name, spelling):
    value = SAMPLE_VALUES.get(spelling.name, "a_name")
    for kind in classes_of(family, spelling.name):
        for arguments in ({name: value, spelling.name: value}, {spelling.name: value, name: value}):
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
        with pytest.raises(TypeError, match=f"{name}=True has no effect, because .* Leave it out"):
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
TOKEN = "hf_1234"
DOCUMENTED_CALLS = [
    (DomainClassifier, {"filter_by": ["Games", "Sports"]}),
    (MultilingualDomainClassifier, {"filter_by": ["Games", "Sports"]}),
    (QualityClassifier, {}),
    (ContentTypeClassifier, {"filter_by": ["Blogs", "News"]}),
    (
        FineWebEduClassifier,
        {
            "batch_size": 256,
            "pred_column": "fineweb-edu-score",
            "int_column": "fineweb-edu-score-int",
        },
    ),
    *(
        (
            kind,
            {
                "pred_column": "score",
                "int_column": "score-int",
                "quality_label_column": "quality-label",
            },
        )
        for kind in (FineWebMixtralEduClassifier, FineWebNemotronEduClassifier)
    ),
    (
        DistributedDataClassifier,
        {
            "model_identifier": "nvidia/quality-classifier-deberta",
            "label_field": "quality_pred",
            "text_field": "text",
            "max_chars": 6000,
            "max_seq_length": 1024,
            "model_inference_batch_size": 256,
        },
    ),
    (
        DistributedDataClassifier,
        {
            "model_identifier": "nvidia/quality-classifier-deberta",
            "label_field": "quality_pred",
            "score_field": "quality_prob",
            "filter_by": ["High", "Medium"],
            "max_chars": 6000,
            "max_seq_length": 1024,
        },
    ),
]
# Every constructor argument of each generation, at its default there.
FIRST_GENERATION = {
    "filter_by": None,
    "batch_size": 256,
    "text_field": "text",
    "pred_column": "pred",
    "prob_column": None,
    "max_chars": 2000,
    "device_type": "cuda",
    "autocast": True,
    "max_mem_gb": None,
}
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


@pytest.mark.parametrize("kind", classes_of("category"))
def test_every_argument_of_the_first_generation_is_accepted(kind):
    kind(**FIRST_GENERATION)


def test_the_first_generations_education_arguments_are_accepted():
    for kind in classes_of("education"):
        classifier = kind(
            batch_size=256,
            text_field="text",
            pred_column="score",
            int_column="score-int",
            quality_label_column="label",
            max_chars=-1,
            device_type="cuda",
            autocast=True,
            max_mem_gb=None,
        )
        assert classifier.options.max_chars is None


@pytest.mark.parametrize("kind", [*classes_of("category"), DistributedDataClassifier])
def test_every_argument_of_the_second_generation_is_accepted(kind):
    made(kind, **SECOND_GENERATION)


def test_the_second_generations_education_arguments_are_accepted():
    for kind in classes_of("education"):
        options = kind(
            float_score_field="f", int_score_field="i", label_field="l", hf_token=TOKEN
        ).options
        assert (options.score_field, options.int_score_field, options.label_field) == (
            "f",
            "i",
            "l",
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"filterby": ["Games"]},
            "no argument 'filterby'.*Did you mean 'filter_by'.*Arguments are",
        ),
        ({"max_char": 5}, "Did you mean 'max_chars'"),
        ({"zzzzzz": 5}, r"no argument 'zzzzzz'\. Arguments are model, "),
        ({"int_column": "x"}, "no argument 'int_column'"),
        ({"batch_size": 1.5}, "batch_size=1.5 is a float: pass an int"),
        ({"batch_size": True}, "batch_size=True is a bool"),
        ({"autocast": "yes"}, "autocast='yes' is a str: pass True or False"),
        ({"model": None}, "DomainClassifier needs model="),
        ({"model": 7}, "model=7 is not a name or a path"),
        ({"text_field": ""}, "text_field='' is not a column name"),
        ({"label_field": 3}, "label_field=3 is not a column name or None"),
        ({"filter_by": [3]}, "filter_by holds 3 of type int: labels are str"),
        ({"filter_by": {"Games": 1}}, "pass a label or a list of labels"),
        ({"filter_by": 3}, "filter_by=3: pass a label or a list"),
        ({"min_score": {"Games": "high"}}, "min_score='high' is a str: pass a number"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        DomainClassifier(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_chars": 0}, "max_chars=0 must be at least 1; None means no limit"),
        ({"max_seq_length": -5}, "max_seq_length=-5 must be at least 1"),
        ({"loader": "crossfitt"}, "loader='crossfitt' is not one of .*Did you mean 'crossfit'"),
        ({"dtype": "fp16"}, "dtype='fp16' is not one of None, 'float32', 'bfloat16', 'float16'"),
        ({"padding_side": "both"}, "padding_side='both' is not one of"),
        ({"problem_type": "regresion"}, "Did you mean 'regression'"),
        ({"filter_by": []}, r"filter_by=\[\] names no label"),
        ({"min_score": {}}, "names no label"),
        ({"min_confidence": 1.5}, r"min_confidence=1\.5 is no probability"),
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
    options = kind().options
    assert set(parameters) == {field.name for field in fields(options)}
    assert list(parameters)[: len(kind.defaults)] == list(kind.defaults)  # its own come first
    for name, parameter in parameters.items():
        assert getattr(options, name) == parameter.default


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
