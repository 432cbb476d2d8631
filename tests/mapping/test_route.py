"""A Route gives each row what the mapper of its value gives it alone, and nulls to the others."""

import json
import pickle
from collections import Counter
from functools import partial
from itertools import pairwise

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify import (
    DomainClassifier,
    Embedder,
    JsonlReader,
    LanguageIdentifier,
    ParquetWriter,
    Pipeline,
    QualityClassifier,
    Route,
    classify,
    published,
)
from gpuclassify.inference import loaded_model, memory
from gpuclassify.inference.residency import MODELS
from gpuclassify.jobs.ledger.manifest import JobChangedError
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.workers.run_context import collected_stats
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ROWS = 24
TEXTS = [*sample_texts(ROWS - 3, seed=8, max_words=20), None, "", "twice"]
LANGUAGES = [*("de", "fr", None, "xx", "it", "de"), *("fr", "de", "nl", "fr", "de", None)] * 2
FRAME = pd.DataFrame(
    {
        "id": range(ROWS),
        "text": pd.Series(TEXTS, dtype="str"),
        "language": pd.Series(LANGUAGES, dtype="str"),
        "weight": np.linspace(0, 1, ROWS, dtype="float32"),
    }
).set_axis(np.arange(ROWS) // 2)
NEW = ["label", "sure"]


@pytest.fixture(scope="module")
def domain(checkpoint):
    """One of the two classifiers; both write the same columns."""
    settings = {"label_field": "label", "confidence_field": "sure", "autocast": False}
    return partial(DomainClassifier, model=checkpoint("domain"), **settings)


@pytest.fixture(scope="module")
def quality(checkpoint):
    settings = {"label_field": "label", "confidence_field": "sure", "autocast": False}
    return partial(QualityClassifier, model=checkpoint("quality"), **settings)


@pytest.fixture
def route(domain, quality):
    """German and Italian to one model, French to another; a value that does not occur to both."""

    def make(**options):
        german = domain(**options)
        return Route(
            by="language", to={"de": german, "fr": quality(**options), "it": german, "no": german}
        )

    return make


def plain(value):
    """A value that equals another one exactly if both are the same, null included."""
    if isinstance(value, (list, np.ndarray)):
        return [plain(own) for own in value]
    return None if pd.isna(value) else value


def alone(frame, route, by="language"):
    """What each row gets by its mapper alone, over the rows of each mapper; in the rows' order."""
    found = {}
    mapper_of = [route.to.get(None if pd.isna(v) else v, route.otherwise) for v in frame[by]]
    for mapper in {*mapper_of} - {None}:
        rows = [own == mapper for own in mapper_of]
        made = mapper(frame[rows].set_axis(np.flatnonzero(rows)))
        found |= {row: [plain(v) for v in values] for row, *values in made[NEW].itertuples()}
    if not route.drops_rows:
        found |= {row: [None] * len(NEW) for row, own in enumerate(mapper_of) if own is None}
    return [[frame["id"].iloc[row], *found[row]] for row in sorted(found)]


def values(found, new=NEW):
    return [[plain(v) for v in row] for _, *row in found[["id", *new]].itertuples()]


@pytest.mark.parametrize("partitions", [1, 3])
def test_each_row_gets_what_its_mapper_alone_gives(route, frames, partitions):
    given = frames.lazy(FRAME, npartitions=partitions, sort=False)
    lazy, expected = route()(given), []
    for part in given.partitions:
        expected += alone(frames.to_pandas(part), route())

    found = frames.to_pandas(lazy)

    pd.testing.assert_frame_equal(found[[*FRAME.columns]], frames.to_pandas(given))
    assert values(found) == expected
    assert {row[1] is None for row in expected} == {True, False}
    if frames.name == "pandas":
        assert found.dtypes.to_dict() == lazy._meta.dtypes.to_dict()
        whole = route()(FRAME.assign(language=FRAME["language"].astype("category")))
        assert whole["language"].dtype == "category"
        assert values(whole) == alone(FRAME, route())
    assert values(frames.to_pandas(route()(frames.plain(FRAME)))) == alone(FRAME, route())


INDEXES = {
    "duplicates": lambda n: pd.Index(np.arange(n) // 3, name="i"),
    "texts": lambda n: pd.Index([f"r{row}" for row in range(n)]),
    "range": lambda n: pd.RangeIndex(5, 5 + n),
    "several": lambda n: pd.MultiIndex.from_arrays([range(n), ["a"] * n]),
}
KINDS = {
    "str": lambda column: column.astype("str"),
    "object": lambda column: column.astype(object),
    "arrow": lambda column: column.astype(pd.ArrowDtype(pa.large_string())),
    "category": lambda column: column.astype("category"),
}
FILTERS = [
    {},
    {"min_confidence": 0.06},
    {"min_confidence": 0.06, "keep_field": "kept"},
]


@given(
    languages=st.lists(st.sampled_from(["de", "fr", "it", "xx", None]), max_size=12),
    cuts=st.sets(st.integers(0, 12)),
    index=st.sampled_from([*INDEXES]),
    kind=st.sampled_from([*KINDS]),
    options=st.sampled_from(FILTERS),
    has_otherwise=st.booleans(),
)
def test_any_rows_partitions_filters_and_kinds(
    domain, quality, languages, cuts, index, kind, options, has_otherwise
):
    rest = quality(**options) if has_otherwise else None
    to = {"de": domain(**options), "fr": quality(batch_size=2, **options)}
    route = Route(by="language", to=to, otherwise=rest)
    rows = len(languages)
    frame = FRAME.iloc[:rows].set_axis(INDEXES[index](rows)).assign(other=1)
    column = pd.Series(languages, dtype=object, index=frame.index)
    frame["language"] = KINDS[kind](column)
    frame.attrs = {"from": "a test"}
    meta, bounds = route.meta(frame), [0, *sorted(cut for cut in cuts if cut < rows), rows]
    dtypes = route.meta_dtypes(frame)
    for start, stop in pairwise(bounds):
        part = frame.iloc[start:stop]
        found = route.map_frame(part, dtypes)
        assert found.dtypes.to_dict() == meta.dtypes.to_dict()
        assert values(found) == alone(part, route)
        kept = part[part["id"].isin(found["id"])]
        pd.testing.assert_frame_equal(found[[*frame.columns]], kept)
        assert found.attrs == frame.attrs
        if "keep_field" in options:
            passes = found["sure"].fillna(0) >= np.float32(0.06)
            assert found["kept"].tolist() == passes.tolist()


def test_keys_may_be_integers_and_booleans(domain, quality):
    whole = pd.Series([1, 2, None, 1] * 6, index=FRAME.index)
    flags = pd.Series([True, None, False, True] * 6, dtype="boolean", index=FRAME.index)
    frame = FRAME.assign(floats=whole, integers=whole.astype("Int64"), flags=flags)
    by_number = {key: domain() for key in (1, 3)}
    for by in ("floats", "integers"):
        route = Route(by=by, to={**by_number, 2: quality()})
        assert values(route(frame)) == alone(frame, route, by)
    route = Route(by="flags", to={True: domain()}, otherwise=quality())
    assert values(route(frame)) == alone(frame, route, "flags")
    numbers = np.array([1, 3])
    assert Route(by="floats", to={key: domain() for key in numbers}) == Route(
        by="floats", to=by_number
    )


def test_embeddings_and_other_texts_may_be_routed(sequence_classifier):
    one = Embedder(model=sequence_classifier("roberta"), pooling="mean", autocast=False)
    other = Embedder(
        model=sequence_classifier("bert"), pooling="mean", autocast=False, text_field="title"
    )
    frame = FRAME.assign(title=FRAME["text"].str.slice(0, 20))
    route = Route(by="language", to={"de": one}, otherwise=other)
    (column,) = route.schema().names
    found = route(frame)
    for mapper, is_its in ((one, frame["language"] == "de"), (other, frame["language"] != "de")):
        expected = mapper(frame[is_its.to_numpy()])
        assert values(found[is_its.to_numpy()], [column]) == values(expected, [column])
    assert route.read_fields == ("language", "text", "title")


# What Dask and pickle see.


def test_equal_routes_have_equal_keys_and_others_do_not(domain, quality, route):
    ddf = dd.from_pandas(FRAME.reset_index(drop=True), npartitions=2)
    turned = Route(by="language", to=dict(reversed(route().to.items())))
    restored = pickle.loads(pickle.dumps(route()))
    assert route() == turned == restored
    assert hash(route()) == hash(turned)
    assert route()(ddf)._name == turned(ddf)._name == restored(ddf)._name
    others = [
        route(max_chars=500),
        Route(by="language", to={**route().to, "nl": quality()}),
        Route(by="language", to=route().to, otherwise=quality()),
        Route("text", route().to),
    ]
    names = {dask.base.tokenize(own) for own in (route(), *others)}
    assert len(names) == 1 + len(others)
    given = {"de": domain()}
    kept = Route(by="language", to=given)
    given["fr"] = quality()
    assert [*kept.to] == ["de"]


def test_the_optimizer_keeps_the_column_of_values(route, quality, tmp_path):
    FRAME.reset_index(drop=True).to_parquet(tmp_path / "in.parquet")
    lazy = classify(
        dd.read_parquet(tmp_path / "in.parquet"),
        [route(), quality(label_field="q", confidence_field=None)],
    )
    found = lazy["label"].compute(scheduler="sync")
    assert [plain(v) for v in found] == [row[1] for row in alone(FRAME, route())]
    with collected_stats() as stats:
        lazy[["id"]].compute(scheduler="sync")
    assert stats == []


@pytest.mark.parametrize("options", [{}, {"min_confidence": 0.06}])
def test_mappers_beside_a_route_share_tokens_and_outputs_with_it(domain, quality, route, options):
    def make(mapper, name):
        return mapper(label_field=name, confidence_field=None)

    first, last = make(domain, "first"), [make(quality, "second"), make(domain, "third")]
    several = [first, last[0], route(**options), last[1]]
    expected = last[1](route(**options)(last[0](first(FRAME))))

    with collected_stats() as stats:
        found = classify(FRAME, several)

    pd.testing.assert_frame_equal(found, expected, rtol=1e-4)
    assert stats[-1].shared_texts > 0
    piped = dd.from_pandas(FRAME, npartitions=1, sort=False)
    for mapper in several:
        piped = piped.pipe(mapper)
    again = piped.compute(scheduler="sync")
    assert values(again, ["label", "third"]) == values(expected, ["label", "third"])


def test_the_column_may_be_written_by_the_mapper_before(domain, fasttext_model):
    languages = LanguageIdentifier(model=fasttext_model("chars"))
    labels = languages.labels
    route = Route(by="language", to={labels[0]: domain()})
    frame = FRAME[["id", "text"]]
    lazy = dd.from_pandas(frame.reset_index(drop=True), npartitions=2)

    found = classify(lazy, [languages, route]).compute(scheduler="sync")

    told = languages(frame)
    assert found["language"].dropna().tolist() == told["language"].dropna().tolist()
    assert [row[1] for row in values(found)] == [row[1] for row in alone(told, route)]
    with pytest.raises(ValueError, match=r"to= of the Route by 'language': no .*'xyz'"):
        classify(lazy, [languages, Route(by="language", to={"xyz": domain()})])
    relabelled = [languages, lambda frame: frame, Route(by="language", to={"xyz": domain()})]
    Pipeline([lazy, *relabelled]).plan(trial_seconds=None)  # a function may write others


def test_published_models_of_one_kind_have_the_columns_of_a_route():
    code = {word: published(f"stack-edu-{word}") for word in ("python", "cpp", "swift")}
    edu = {word: published(f"finepdfs-edu-{word}") for word in ("deu_Latn", "fra_Latn")}
    for to in (code, edu):
        assert len({str(mapper.schema()) for mapper in to.values()}) == 1
        assert len(Route("language", to).text_mappers()) == len(to)


# Models.


def test_models_of_a_route_take_turns_where_memory_is_short(domain, quality, monkeypatch):
    loads, real = Counter(), loaded_model.load_model

    def count(*arguments, **named):
        loads["loads"] += 1
        return real(*arguments, **named)

    monkeypatch.setattr(loaded_model, "load_model", count)
    route = Route(by="language", to={"de": domain(), "fr": quality(), "xx": domain(batch_size=2)})
    expected = values(route(FRAME))
    MODELS.evict()
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0 if MODELS.keys() else 1 << 60)
    loads.clear()
    assert values(route(FRAME)) == expected
    assert loads["loads"] == 2
    parts = [FRAME.iloc[:12], FRAME.iloc[12:]] * 2
    for part in parts:
        route(part)
        assert len(MODELS.keys()) == 1
    # Each begins with the model that the one before has left.
    assert loads["loads"] == 2 + len(parts)


def test_a_model_without_rows_is_not_loaded_and_errors_name_the_users_row(route):
    MODELS.evict()
    with collected_stats() as stats:
        found = route()(FRAME[FRAME["language"].isin(["xx", "it"])])
    assert [run.rows for run in stats] == [2]
    assert len(MODELS.keys()) == 1
    assert found["label"].notna().tolist() == [False, True] * 2
    frame = FRAME.assign(text=FRAME["text"].astype(object))
    frame.iloc[6, 1] = 7  # the second French one
    with pytest.raises(TypeError, match=r"\(index label 3\) of column 'text' holds a int"):
        route()(frame)


# What is refused.


def test_what_cannot_be_a_route_is_refused(domain, quality):
    for error, words, settings in [
        (TypeError, "by=3 is not a column name", {"by": 3, "to": {"de": domain()}}),
        (TypeError, r"to=\[\] is a list: pass a dict", {"to": []}),
        (ValueError, "to={} names no value", {"to": {}}),
        (TypeError, r"keys 'de' \(str\), 3 \(int\)", {"to": {"de": domain(), 3: domain()}}),
        (TypeError, r"keys 0.5 \(float\): pass str", {"to": {0.5: domain()}}),
        (TypeError, r"keys None \(NoneType\)", {"to": {None: domain()}}),
        (TypeError, r"class DomainClassifier for to de: write D", {"to": {"de": DomainClassifier}}),
        (
            TypeError,
            "got a list for to de: .*one Route",
            {"to": {"de": [domain(), quality()]}},
        ),
        (
            TypeError,
            "got a str for otherwise",
            {"to": {"de": domain()}, "otherwise": "domain"},
        ),
    ]:
        with pytest.raises(error, match=words):
            Route(**{"by": "language", **settings})


def test_what_does_not_fit_the_dataset_is_refused_at_the_call(domain, quality):
    ddf = dd.from_pandas(FRAME.reset_index(drop=True), npartitions=2)
    unknown = ddf.assign(language=ddf["weight"].astype("category"))
    for to in ({"de": domain()}, {1: domain()}):
        assert "label" in Route(by="language", to=to)(unknown)
    for error, words, route, dataset in [
        (ValueError, "no column 'lang'.*Did you mean 'language'.*Pass by=", {"by": "lang"}, ddf),
        (
            ValueError,
            r"same columns: Dom.* writes label: string where Qual.* writes q: string: make them",
            {"to": {"de": domain(), "fr": quality(label_field="q")}},
            ddf,
        ),
        (TypeError, "'language' holds .*string.* of to= are integers", {"to": {1: domain()}}, ddf),
        (TypeError, "'weight' holds float.* are texts, such as 'de'", {"by": "weight"}, FRAME),
        (TypeError, "'id' holds int64.* are booleans", {"by": "id", "to": {True: domain()}}, ddf),
        (ValueError, "no text column 'body'", {"otherwise": domain(text_field="body")}, ddf),
        (ValueError, "no label 'Gamez'", {"otherwise": domain(filter_by="Gamez")}, ddf),
        (
            ValueError,
            "output column 'language' is a column that is read",
            {"to": {"de": domain(label_field="language", overwrite=True)}},
            ddf,
        ),
        (ValueError, "no column 'language'", {}, "a text alone"),
    ]:
        settings = {"by": "language", "to": {"de": domain()}, **route}
        with pytest.raises(error, match=words):
            Route(**settings)(dataset)
    objects = FRAME.assign(language=pd.Series([3] * ROWS, dtype=object, index=FRAME.index))
    with pytest.raises(TypeError, match="'language' holds int64"):
        Route(by="language", to={"de": domain()}).map_frame(objects)
    objects.iloc[3, 2] = "de"
    with pytest.raises(TypeError, match="'language' holds values of different kinds"):
        Route(by="language", to={"de": domain()})(objects)


# Jobs.


@pytest.fixture
def job(domain, quality, tmp_path):
    FRAME.to_json(tmp_path / "in.jsonl", orient="records", lines=True)

    def make(minimum=0.06, to=("de",), **options):
        german = domain(min_confidence=minimum)
        route = Route(by="language", to={**dict.fromkeys(to, german), "fr": quality()})
        reader = JsonlReader(f"{tmp_path}/in.jsonl", part_bytes=700)
        return Pipeline([reader, route, ParquetWriter(f"{tmp_path}/out")], **options)

    return make


def test_a_job_with_a_route_goes_on_once_and_tells_what_each_model_did(job, tmp_path, monkeypatch):
    seen, real = [], Route.map_frame

    def die(route, frame, meta_dtypes=None):
        seen.extend(frame["id"])
        if len(seen) > 10:
            raise KeyboardInterrupt
        return real(route, frame, meta_dtypes)

    monkeypatch.setattr(Route, "map_frame", die)
    with pytest.raises(KeyboardInterrupt):
        job().run()
    monkeypatch.undo()
    done = job().run()

    route = job().stages[1]
    expected = alone(FRAME, route)
    found = pd.read_parquet(tmp_path / "out")
    assert 0 < done.resumed_parts < done.parts
    rows = sorted(values(found))
    assert [row[:2] for row in rows] == [row[:2] for row in sorted(expected)]
    sure, told = ([row[2] or 0 for row in sorted(each)] for each in (rows, expected))
    assert sure == pytest.approx(told, 1e-4)
    counts = done.stages["Route"]
    languages = FRAME["language"].fillna("").tolist()
    german, french = languages.count("de"), languages.count("fr")
    read = {name: own["read"] for name, own in counts["models"].items()}
    assert read == {
        "language=de: DomainClassifier": german,
        "language=fr: QualityClassifier": french,
        "no model": ROWS - german - french,
    }
    assert (counts["read"], counts["kept"]) == (ROWS, len(expected))
    assert counts["models"]["no model"]["dropped"] == {"no model": ROWS - german - french}
    assert counts["dropped"]["no model"] == ROWS - german - french
    assert sum(counts["dropped"].values()) == ROWS - len(expected)
    report = json.loads((tmp_path / "out/_report/report.json").read_text())
    assert [step["name"] for step in report["funnel"]] == ["rows read", "Route"]
    assert "Route, language=fr: QualityClassifier" in report["examples"]
    assert "from gpuclassify import DomainClassifier, JsonlReader" in report["code"]
    page = (tmp_path / "out/_report/report.html").read_text()
    assert f"language=fr: QualityClassifier: {french} rows" in page
    assert "without a model" in page

    for words, changed in [
        ("to de was .*min_confidence=0.06.* and is .*min_confidence=0.5", {"minimum": 0.5}),
        ("to nl is new", {"to": ("de", "nl")}),
    ]:
        with pytest.raises(JobChangedError, match=words):
            job(**changed).run()


def test_a_row_that_cannot_be_scored_is_left_out_alone(job, monkeypatch):
    real = DomainClassifier.compute

    def fail(mapper, texts, name_row):
        if TEXTS[0] in texts:
            raise NonFiniteOutputError(f"{name_row(0)} is not finite")
        return real(mapper, texts, name_row)

    monkeypatch.setattr(DomainClassifier, "compute", fail)
    done = job(on_error="quarantine").run()
    assert done.left_out == {"row": 1}
    assert done.stages["Route"]["read"] == ROWS - 1


def test_a_plan_counts_each_models_own_rows(job, fasttext_model, domain):
    plan = job().plan(trial_seconds=0.1)
    tokens = {each.name: each.tokens for each in plan.classifiers}
    for name, own in (("DomainClassifier", "de"), ("QualityClassifier", "fr")):
        rows = FRAME[FRAME["language"] == own][["text"]].reset_index(drop=True)
        alone = [dd.from_pandas(rows, npartitions=1), job().stages[1].to[own]]
        assert tokens[name] == Pipeline(alone).plan(trial_seconds=None).classifiers[0].tokens
    assert plan.warnings == ()
    assert plan.worker_bytes is not None
    languages = LanguageIdentifier(model=fasttext_model("chars"), overwrite=True)
    unknown = Route(by="language", to={languages.labels[0]: domain()})
    ddf = dd.from_pandas(FRAME[["text"]].reset_index(drop=True), npartitions=1)
    (warning,) = Pipeline([ddf, languages, unknown]).plan(trial_seconds=None).warnings
    assert "'language' is written by another stage" in warning
