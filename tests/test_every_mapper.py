"""The contract on every mapper of the package, both loaders: what test_contract.py shows on two."""

import contextlib
import inspect
import pickle

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import gpuclassify
from gpuclassify.classifiers import FAMILIES
from gpuclassify.mapping.partition_map import PartitionMap
from tests.examples import FRAME, INDEX, examples, make_example
from tests.loaders import LOADERS
from tests.oracle import assert_close

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]
PAIRS = "pairs"  # reads a column that FRAME lacks
MAPPERS = [name for name in {**FAMILIES, **examples()} if name != PAIRS]
TEXTLESS = {"thresholds", "copies", "repeats", "buckets", "select", "clusters"}


@pytest.fixture
def mapper_of(request):
    """A mapper by name, in float32, with every optional column that all of them have."""
    common = {"autocast": False, "truncated_field": "cut", "seen_field": "seen"}
    return lambda name, **options: make_example(name, request, **common | options)


def test_every_public_mapper_has_an_example(mapper_of):
    """But for the base of users' own models, and the stage that changes the dataframe library."""
    public = {getattr(gpuclassify, name) for name in dir(gpuclassify)}
    public = {kind for kind in public if isinstance(kind, type) and issubclass(kind, PartitionMap)}
    missing = public - {type(mapper_of(name)) for name in MAPPERS}
    assert {kind.__name__ for kind in missing} == {"ModelMapper", "ToBackend"}, "see tests/examples"


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
    mapper = mapper_of(name)
    lazy = mapper(frames.lazy(FRAME, npartitions=4, sort=False))
    whole = mapper_of(name)(frames.plain(FRAME))

    found = frames.to_pandas(lazy)

    assert found.index.tolist() == INDEX
    assert found["id"].tolist() == list(range(20))
    assert found["weight"].equals(FRAME["weight"])
    assert found["text"].isna().tolist() == FRAME["text"].isna().tolist()
    assert found["text"].dropna().tolist() == FRAME["text"].dropna().tolist()
    assert lazy.npartitions == 4
    new = [column for column in found.columns if column not in FRAME.columns]
    assert (name in TEXTLESS) == (not mapper.text_fields)
    assert name in TEXTLESS or (len(new) >= 3 and found.loc[26, new].isna().all())
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
        (name, None)  # the default
        for name in [*MAPPERS, PAIRS]
        if name not in ("chain", "route", *TEXTLESS)
    ),
    *((name, "windows") for name in ("quality", "embedder", "heads")),
    *((name, "lines") for name in ("quality", "fineweb-edu", "fasttext", "language")),
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


@pytest.mark.parametrize(
    ("name", "reading"),
    # Propella's mapper asks as `PromptClassifier` does, for many more columns.
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] == "propella")) for one in READINGS],
)
def test_no_output_column_changes_another_one(mapper_of, name, reading):
    frame = FRAME.iloc[[0, 1, 2, 14, 15, 16, 17, 18]]
    # Of pairs both texts are long, and the one with more tokens to a character is the shorter one.
    frame = frame.assign(
        text=[text and f"{text} \n" * 40 for text in frame["text"]],
        other=["market river " * 300, "~~ " * 90] * 4,
    )
    parameters = inspect.signature(type(mapper_of(name))).parameters.values()
    options = [p.name for p in parameters if p.name.endswith("_field") and p.default is None]
    none = dict.fromkeys(options) | ({"long_text": reading} if reading else {})
    if reading == "lines" and name in ("fasttext", "language"):
        none["top_k"] = None  # refused for lines, which have `label_shares_field`
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
