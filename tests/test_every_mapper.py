"""The contract on every mapper of the package, both loaders: what test_contract.py shows on two."""

import contextlib
import inspect
import pickle

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from gpuclassify import (
    AegisClassifier,
    ApplyThresholds,
    Decontaminate,
    DistributedDataClassifier,
    Embedder,
    HeadClassifier,
    InstructionDataGuardClassifier,
    PromptClassifier,
    Route,
    Thresholds,
)
from gpuclassify.classifiers import FAMILIES
from gpuclassify.mapping.chain import Chain
from tests.classifiers.test_head_classifier import save_heads
from tests.loaders import LOADERS
from tests.oracle import assert_close
from tests.replicas import safety_template, sample_texts
from tests.replicas.chat_models import write_chat_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUESTIONS = [name for name, kind in FAMILIES.items() if issubclass(kind, PromptClassifier)]
OTHERS = ("checkpoint", "aegis", "instruction-data-guard", *QUESTIONS)
PUBLISHED = [name for name in FAMILIES if name not in OTHERS]
# Those that read no text, with how many columns they add: of a row without text these are not null.
TEXTLESS = {"thresholds": 2}
MAPPERS = [
    *PUBLISHED,
    "prompt",
    "qwen3guard",  # the others differ in texts
    "aegis",
    "instruction-data-guard",
    "checkpoint",
    "relevance",
    "embedder",
    "heads",
    "decontaminate",
    "chain",
    "route",
    *TEXTLESS,
]
TEXTS = [*sample_texts(14, seed=4, max_words=40), "", "twice", "twice", "\n\t ", None, "天気 🙂"]
INDEX = [3, 3, *range(10, 28)]
FRAME = pd.DataFrame(
    {"id": range(20), "text": pd.Series(TEXTS, dtype="str"), "weight": np.linspace(0, 1, 20)}
).set_axis(INDEX)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return save_heads(tmp_path_factory.mktemp("heads"), 32)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("chat"), "qwen3")


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    return tmp_path_factory.mktemp("indexes")


@pytest.fixture
def mapper_of(
    checkpoint,
    sequence_classifier,
    token_classifier,
    safety_models,
    fasttext_model,
    heads,
    chat_model,
    indexes,
):
    """A mapper by name, in float32, with every optional column that all of them have."""

    def make(name, **options):
        options = {"autocast": False, "truncated_field": "cut", "seen_field": "seen", **options}
        if name in ("fasttext", "language"):  # without what is about networks
            known = inspect.signature(FAMILIES[name]).parameters
            options = {key: value for key, value in options.items() if key in known}
            return FAMILIES[name](model=fasttext_model("chars"), top_k=2, **options)
        if name == "tokens":  # without those, and whole texts only
            options = options | {"special_tokens": options.get("max_chars") is not None}
            known = {*inspect.signature(FAMILIES[name]).parameters} - {"max_chars"}
            options = {key: value for key, value in options.items() if key in known}
            return FAMILIES[name](model=sequence_classifier("modernbert"), **options)
        if name in ("spans", "patterns"):
            options = {"count_field": "n", "share_field": "share", **options}
            if "max_chars" not in options:  # which would leave the rest as it is
                options["redact"] = "[{label}]"
            known = inspect.signature(FAMILIES[name]).parameters
            options = {key: value for key, value in options.items() if key in known}
            if name == "spans":
                options["model"] = token_classifier()
            return FAMILIES[name](**options)
        if name == "decontaminate":  # without what is about models
            least = 2 if options.get("max_chars") is None else 3
            options = {"items_field": "items", "passages_field": "passages", **options}
            known = inspect.signature(Decontaminate).parameters
            return Decontaminate(
                against=FRAME[["text"]].iloc[:9],
                against_field="text",
                ngram=5,
                min_words=least,
                cut=True,
                index_dir=indexes,
                **{key: value for key, value in options.items() if key in known},
            )
        if name in TEXTLESS:
            return textless(name, options.get("max_chars"))
        if name in QUESTIONS:  # columns are named in the prompt itself
            options["prompt"] = options.pop("text_template", "{text}")
            if name == "prompt":
                own = {"answers": ["yes", "no"], "score_field": "scores", "keep_raw": True}
                options = own | options
            options = {"confidence_field": "sure", **options}
            return FAMILIES[name](model=chat_model, **options)
        if name == "chain":
            first = FAMILIES["quality"](model=checkpoint("quality"), autocast=False)
            return Chain((first, make("fineweb-edu", **options)))
        if name == "route":
            names = {"label_field": "label", "score_field": "score", "int_score_field": "int"}
            edu, mixtral = (
                make(family, **names, **options)
                for family in ("fineweb-edu", "fineweb-mixtral-edu")
            )
            return Route(
                by="id", to={**dict.fromkeys(range(8), edu), 9: mixtral}, otherwise=mixtral
            )
        if name == "aegis":
            return AegisClassifier(
                model=safety_models.permissive,
                base_model=safety_models.base,
                template=safety_template(),
                **{"categories_field": "categories", **options},
            )
        if name == "instruction-data-guard":
            return InstructionDataGuardClassifier(
                model=safety_models.guard,
                adapter=safety_models.defensive,
                base_model=safety_models.base,
                **options,
            )
        if name == "embedder":
            return Embedder(model=sequence_classifier("roberta"), pooling="mean", **options)
        if name == "heads":
            backbone = sequence_classifier("roberta")
            return HeadClassifier(
                heads=heads,
                backbone=backbone,
                **{"embedding_field": "e", "labels_field": "{head}s", **options},
            )
        if name == "checkpoint":
            model = sequence_classifier("modernbert")
            return DistributedDataClassifier(model=model, **{"score_field": "scores", **options})
        if name in ("relevance", "pairs"):
            model = sequence_classifier("bert", num_labels=1)
            pair = {"query": "which market"}
            if name == "pairs":
                pair = {"text_field": ["other", "text"], "max_seq_length": 40, "label_field": None}
            return DistributedDataClassifier(model=model, **pair, **options)
        if name in ("topic", "format"):
            options = {"text_template": None, **options}
        return FAMILIES[name](model=checkpoint(name), **options)

    return make


def textless(name, changed):
    """A mapper that reads no text, with another setting if one is changed."""
    assert name == "thresholds"
    labelled = FRAME.assign(good=FRAME["id"] % 3 > 0)
    options = {"score": "weight", "label": "good", "min_labels": 1, "calibration": "sigmoid"}
    found = Thresholds.fit(labelled, recall=0.5 if changed else 0.8, **options)
    return ApplyThresholds(found, keep_field="keep", probability_field="p")


def is_list_of_floats(value):
    """By the value, because lists of cudf come to pandas as objects."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], float)


def spans_of(column):
    """Each row's spans without their scores, and all scores; None for another column."""
    rows = [list(row) for row in column if isinstance(row, list | np.ndarray)]
    spans = [span for row in rows for span in row if isinstance(span, dict) and "score" in span]
    if not spans or len(rows) < len(column):
        return None
    keys = [[(s["start"], s["end"], s["label"]) for s in row] for row in rows]
    return keys, [span["score"] for span in spans]


def assert_same_values(found, expected):
    """Columns, dtypes and nulls equal; floats within the tolerance, everything else equal."""
    assert list(found.columns) == list(expected.columns)
    for name in expected.columns:
        one, other = found[name], expected[name]
        assert one.isna().tolist() == other.isna().tolist(), name
        one, other = one.dropna(), other.dropna()
        if spans_of(other) is not None:
            assert spans_of(one)[0] == spans_of(other)[0]
            assert_close(spans_of(one)[1], spans_of(other)[1])
        elif is_list_of_floats(next(iter(other), None)):
            assert_close(np.stack(one.to_list()), np.stack(other.to_list()))
        elif other.dtype == np.float32:
            # Dimensions and probabilities of prompts are rounded: a last digit may differ.
            assert_close(
                one, other, tolerance=2e-4 if "prompt" in str(list(found.columns)) else 1e-5
            )
        else:
            assert [str(value) for value in one] == [str(value) for value in other], name


@pytest.mark.parametrize("name", MAPPERS)
def test_rows_are_the_users_and_meta_is_the_truth(mapper_of, frames, name):
    lazy = mapper_of(name)(frames.lazy(FRAME, npartitions=4, sort=False))
    whole = mapper_of(name)(frames.plain(FRAME))

    found = frames.to_pandas(lazy)

    assert found.index.tolist() == INDEX
    assert found["id"].tolist() == list(range(20))
    assert found["weight"].equals(FRAME["weight"])
    assert found["text"].isna().tolist() == FRAME["text"].isna().tolist()
    assert found["text"].dropna().tolist() == FRAME["text"].dropna().tolist()
    assert lazy.npartitions == 4
    new = [column for column in found.columns if column not in FRAME.columns]
    assert len(new) == TEXTLESS[name] if name in TEXTLESS else len(new) >= 3
    assert name in TEXTLESS or found.loc[26, new].isna().all()
    assert_same_values(found, frames.to_pandas(whole))
    if frames.name == "pandas":
        assert found.dtypes.to_dict() == lazy._meta.dtypes.to_dict()


@pytest.mark.parametrize("name", MAPPERS)
def test_empty_and_all_null_partitions_have_the_announced_dtypes(mapper_of, frames, name):
    plain = frames.plain(FRAME)
    no_text = FRAME.assign(text=pd.Series([None] * 20, dtype="str", index=INDEX))
    meta = mapper_of(name).meta(plain)
    for frame in (plain.iloc[:0], frames.plain(no_text)):
        found = mapper_of(name).map_frame(frame, mapper_of(name).meta_dtypes(plain))
        assert {k: str(v) for k, v in found.dtypes.items()} == {
            k: str(v) for k, v in meta.dtypes.items()
        }
        assert len(found) == len(frame)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", MAPPERS)
def test_company_loader_and_batches_change_nothing(mapper_of, name, loader):
    whole = mapper_of(name)(FRAME)
    shuffled = FRAME.sample(frac=1, random_state=0)
    other = mapper_of(name, loader=loader, batch_size=3, sort_by_length=loader == "crossfit")

    parts = [other(shuffled.iloc[start : start + 7]) for start in range(0, 20, 7)]

    assert_same_values(pd.concat(parts).sort_values("id"), whole)


@pytest.mark.parametrize("name", MAPPERS)
def test_equal_settings_give_equal_keys_and_small_pickles(mapper_of, name):
    ddf = dd.from_pandas(FRAME.reset_index(drop=True), npartitions=2)
    one, other = mapper_of(name), mapper_of(name)
    assert one(ddf)._name == other(ddf)._name
    restored = pickle.loads(pickle.dumps(one))
    assert restored == one
    assert dask.base.tokenize(restored) == dask.base.tokenize(one)
    assert len(pickle.dumps(one)) < 20_000
    assert mapper_of(name, max_chars=500)(ddf)._name != one(ddf)._name


@pytest.mark.parametrize("name", MAPPERS)
def test_the_columns_survive_parquet(mapper_of, name, tmp_path):
    from gpuclassify import to_parquet

    frame = FRAME.reset_index(drop=True)
    lazy = mapper_of(name)(dd.from_pandas(frame, npartitions=2))

    to_parquet(lazy, tmp_path / "out")

    read = pd.read_parquet(tmp_path / "out").sort_values("id")
    assert read["id"].tolist() == frame["id"].tolist()
    assert set(lazy.columns) <= set(read.columns)


# Spans are places in a column, and no other text has them; a benchmark's items have none either.
UNTEMPLATED = {"chain", "spans", "patterns", "decontaminate", *TEXTLESS}
TEMPLATED = [name for name in MAPPERS if name not in UNTEMPLATED]


@pytest.mark.parametrize("name", TEMPLATED)
def test_a_template_is_a_column_of_filled_texts(mapper_of, frames, name):
    frame = FRAME.assign(url=[f"u{n % 3}.org" for n in range(19)] + [None])
    texts = zip(frame["url"].fillna(""), frame["text"], strict=True)
    filled = [None if pd.isna(text) else f"{url}: {text}" for url, text in texts]
    expected = mapper_of(name)(
        frames.plain(frame.assign(text=pd.Series(filled, dtype="str", index=INDEX)))
    )

    found = frames.to_pandas(
        mapper_of(name, text_template="{url}: {text}")(
            frames.lazy(frame, npartitions=3, sort=False)
        )
    )

    assert found["text"].dropna().tolist() == FRAME["text"].dropna().tolist()
    assert_same_values(found.drop(columns="text"), frames.to_pandas(expected).drop(columns="text"))


READINGS = [
    *(
        (name, "truncate")
        for name in [*MAPPERS, "pairs"]
        if name not in ("chain", "route", *TEXTLESS)
    ),
    *((name, "windows") for name in ("quality", "embedder", "heads")),
    *((name, "lines") for name in ("quality", "fineweb-edu")),
    ("quality", "ends"),
]
# Settings without which some of the columns have no meaning.
COMPANIONS = [
    {},
    *({name: 0.5} for name in ("min_confidence", "min_score", "line_min_score", "max_span_share")),
    *({"filter_by": value} for value in ("safe", False)),
    {"line_min_score": {"High": 0.5}},
]
OF_HEADS = {"labels_field", "score_field", "confidence_field"}


@pytest.mark.parametrize(("name", "reading"), READINGS)
def test_no_output_column_changes_another_one(mapper_of, name, reading):
    frame = FRAME.iloc[[0, 1, 2, 14, 15, 16, 17, 18]]
    # Of pairs both texts are long, and the one with more tokens to a character is the shorter one.
    frame = frame.assign(
        text=[text and f"{text} \n" * 40 for text in frame["text"]],
        other=["market river " * 300, "~~ " * 90] * 4,
    )
    parameters = inspect.signature(type(mapper_of(name))).parameters.values()
    options = [p.name for p in parameters if p.name.endswith("_field") and p.default is None]
    none = {"long_text": reading, **dict.fromkeys(options)}
    alone, settings = {}, {}
    for option in options:
        column = {option: "{head}_" * (name == "heads" and option in OF_HEADS) + option}
        for companion in COMPANIONS:
            with contextlib.suppress(ValueError, TypeError):  # it has no meaning with these
                alone[option] = mapper_of(name, **none | column | companion)(frame)
                settings |= column | companion
                break

    without, together = (mapper_of(name, **none | some)(frame) for some in ({}, settings))

    assert alone.keys() > {"items_field"} or alone.keys() >= {"seen_field", "truncated_field"}
    for found in alone.values():
        for other in (without, together):
            shared = [column for column in other.columns if column in found.columns]
            pd.testing.assert_frame_equal(found[shared], other[shared])
