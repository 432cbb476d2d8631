"""What exact and fuzzy deduplication have in common, on pandas frames and Dask frames of them."""

import importlib.util
import itertools
from datetime import date
from decimal import Decimal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import ExactDuplicates, FuzzyDuplicates, remove_duplicates
from gpuclassify.corpus.dedup.summary import TooManyDuplicatesError
from tests.corpus.dedup.known import FINDERS, FUZZY, WAYS, expected, ngrams_of, plain
from tests.processes import local_client


@WAYS
@pytest.mark.parametrize("npartitions", [1, 7, pytest.param(100, marks=pytest.mark.slow)])
def test_every_partitioning_and_order_gives_the_same(way, npartitions, corpus, frames):
    duplicates = way(id_field="id", keep_by=["quality"])
    want = expected(corpus, way is ExactDuplicates).astype({"id": "str", "group": "str"})
    frame = corpus.sample(frac=1, random_state=npartitions, ignore_index=True)
    found = duplicates(frames.lazy(frame, npartitions))
    pd.testing.assert_frame_equal(plain(frames.to_pandas(found)), want)
    assert list(found.columns)[:3] == ["id", "group", "keep"]
    assert found._meta["keep"].dtype == bool
    assert way is ExactDuplicates or found._meta["similarity"].dtype == np.float32
    if npartitions == 7:
        for part in dask.compute(*found.to_delayed()):
            pd.testing.assert_series_equal(part.dtypes, found._meta.dtypes)
    if npartitions == 1:  # a plain frame, whose column of ids is taken where none is named
        found = way(keep_by="quality")(frames.plain(frame))
        assert isinstance(found, frames.frame_type)
        pd.testing.assert_frame_equal(plain(frames.to_pandas(found)), want)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [False, True])
def test_a_cluster_gives_the_same(processes, corpus):
    with local_client(2, processes=processes):
        frame = dd.from_pandas(corpus, npartitions=5)
        for way in FINDERS.values():
            found = plain(way(id_field="id", keep_by=["quality"])(frame))
            want = expected(corpus, way is ExactDuplicates)
            pd.testing.assert_frame_equal(found, want.astype({"id": "str", "group": "str"}))


@pytest.mark.contract
@WAYS
def test_removal_drops_rows_and_nothing_else(way, corpus, frames):
    labelled = corpus.set_index(pd.Index(np.arange(len(corpus)) // 3, name="label"))
    frame = frames.lazy(labelled, npartitions=5, sort=True)
    duplicates = way(id_field="id", keep_by=["quality"])
    kept = duplicates.remove(frame)
    assert kept.divisions == frame.divisions
    want = expected(corpus, way is ExactDuplicates)
    gone = set(want.loc[~want["keep"], "id"])
    whole, rest = frames.to_pandas(frame), frames.to_pandas(kept)
    pd.testing.assert_frame_equal(rest, whole[~whole["id"].isin(gone)])
    by_id = remove_duplicates(frame, duplicates(frame))
    pd.testing.assert_frame_equal(frames.to_pandas(by_id), rest)
    elsewhere = remove_duplicates(frames.plain(corpus), duplicates(frames.plain(labelled)))
    assert set(corpus["id"]) - set(frames.to_pandas(elsewhere)["id"]) == gone


@WAYS
def test_positions_name_documents_without_ids(way, corpus):
    frame = dd.from_pandas(corpus.drop(columns="id"), npartitions=4)
    duplicates = way()
    found = duplicates(frame).compute()
    assert found["id"].dtype == np.int64
    assert len(found) == len(expected(corpus, way is ExactDuplicates))
    assert (
        found.groupby("group")["id"].min() == found[found["keep"]].set_index("group")["id"]
    ).all()
    kept = duplicates.remove(frame).compute()
    pd.testing.assert_frame_equal(kept, remove_duplicates(frame, duplicates(frame)).compute())
    assert len(kept) == len(corpus) - (~found["keep"]).sum()


OTHERS = {
    "fewer": lambda frame: frame.repartition(npartitions=2),
    "more": lambda frame: frame.repartition(npartitions=7),
    "one less": lambda frame: frame.partitions[1:],
    "one more": lambda frame: dd.concat([frame.partitions[0], frame]),
    "filtered": lambda frame: frame[frame["quality"] > 0.3],
    "plain": lambda frame: frame.compute(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_positions_in_other_partitions_are_refused(other, corpus, tmp_path):
    frame = dd.from_pandas(corpus.drop(columns="id"), npartitions=4)
    listed = ExactDuplicates()(frame)
    listed.to_parquet(tmp_path)
    for given in (listed, dd.read_parquet(tmp_path)):
        kept = remove_duplicates(frame, given).compute()
        pd.testing.assert_frame_equal(kept, ExactDuplicates().remove(frame).compute())
        dataset = other(frame)
        given = given if dask.is_dask_collection(dataset) else given.compute()
        with pytest.raises(
            ValueError, match=r"by position in 4 partitions, .* with its partitions"
        ):
            dask.compute(remove_duplicates(dataset, given))


def test_ids_are_not_taken_for_positions():
    frame = pd.DataFrame({"id": [2, 0, 1], "text": ["a", "b", "a"]})
    listed = ExactDuplicates()(frame)
    with pytest.raises(ValueError, match=r"the frame does not have: .* 'partitions' is missing"):
        remove_duplicates(frame.drop(columns="id"), listed)
    positions = ExactDuplicates()(frame.drop(columns="id"))
    assert remove_duplicates(frame, positions)["id"].tolist() == [2, 0]
    with pytest.raises(ValueError, match="'partitions' is a column of the result"):
        ExactDuplicates(id_field="partitions")


def test_small_files_keep_their_partitions(tmp_path, corpus):
    dd.from_pandas(corpus.drop(columns="id"), npartitions=20).to_parquet(tmp_path)
    for filesystem in ("fsspec", "arrow"):  # both join small files when they are optimised
        frame = dd.read_parquet(tmp_path, filesystem=filesystem)
        found = ExactDuplicates()(frame).compute()
        assert len(set(found["id"].to_numpy() >> 40)) > 10
        kept = ExactDuplicates().remove(frame)
        assert kept.npartitions == 20
        assert len(kept[["truth"]].compute()) == len(corpus) - (~found["keep"]).sum()


def test_partitions_that_dask_cuts_by_size_stay_as_they_are(corpus):
    """With fewer columns it would cut elsewhere."""
    wide = corpus.assign(other=[str(number) * 2_000 for number in range(len(corpus))])
    frame = dd.from_pandas(wide.drop(columns="id"), npartitions=3)
    frame = frame.repartition(partition_size="60kB")
    assert frame.npartitions > 5
    kept = ExactDuplicates().remove(frame).compute()
    assert kept["text"].dropna().loc[lambda text: text != ""].is_unique
    assert set(kept["text"].dropna()) == set(corpus["text"].dropna())
    assert len(kept) == len(ExactDuplicates(id_field="id").remove(corpus))


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_partitions_that_a_filter_empties_stay(tmp_path, corpus, filesystem):
    """Dask would leave out files of other folders, and with them partitions."""
    parts = corpus.drop(columns="id").assign(part=[number % 6 for number in range(len(corpus))])
    parts.to_parquet(tmp_path, partition_cols=["part"])
    frame = dd.read_parquet(tmp_path, filesystem=filesystem)
    frame = frame[frame["part"] == 1]
    kept = ExactDuplicates().remove(frame)
    assert kept.npartitions == frame.npartitions == 6
    whole = frame.compute().fillna({"text": ""})
    expected_rows = (whole["text"] == "").sum() + whole.loc[whole["text"] != "", "text"].nunique()
    assert len(kept) == expected_rows


def test_equal_ids_of_an_earlier_corpus_are_others_and_other_types_are_refused():
    ours = pd.DataFrame({"id": [1, 9], "text": ["a", "b"]})
    earlier = pd.DataFrame({"id": [7, 1], "text": ["a", "b"]})
    found = ExactDuplicates(id_field="id")(ours, against=earlier)
    assert sorted(zip(found["group"], found["id"], found["keep"], strict=True)) == [
        (1, 1, False), (1, 7, True), (9, 1, True), (9, 9, False),
    ]  # fmt: skip
    with pytest.raises(TypeError, match="'id' holds int64 here and str in the earlier corpus"):
        ExactDuplicates(id_field="id")(ours, against=ours.astype({"id": "str"}))
    with pytest.raises(TypeError, match="'length' holds int64 here and nothing"):
        ExactDuplicates(id_field="id", keep_by="length")(ours.assign(length=3), against=ours)


@pytest.mark.parametrize("name", ["document", "root", "text_id"])
def test_any_name_of_the_ids_will_do(name):
    frame = pd.DataFrame({name: [3, 1, 2], "text": ["a", "b", "a"]})
    found = ExactDuplicates(id_field=name)(frame)
    assert found[name].tolist() == [2, 3]
    assert remove_duplicates(frame, found)[name].tolist() == [1, 2]
    with pytest.raises(ValueError, match="'keep' is a column of the result"):
        ExactDuplicates(id_field="keep")


@pytest.mark.parametrize(
    "ranks",
    [
        [True, False, True],
        pd.to_datetime(["2026-01-02", "2026-01-01", "2026-01-02"]),
        pd.Categorical(["b", "a", "b"], categories=["b", "a"]),
        pd.array([2, None, 2], "Int64"),
        ["b", None, "b"],
    ],
    ids=["bool", "time", "category", "null", "text"],
)
def test_whatever_can_be_sorted_ranks(ranks):
    frame = pd.DataFrame({"id": [5, 1, 4], "text": ["a"] * 3, "rank": ranks})
    for npartitions in (1, 3):
        lazy = dd.from_pandas(frame, npartitions=npartitions)
        found = ExactDuplicates(id_field="id", keep_by="rank")(lazy).compute()
        assert found.loc[found["keep"], "id"].tolist() == [4]


def test_finding_computes_nothing_and_equal_settings_give_equal_keys(corpus):
    def fail(frame):
        raise AssertionError("computed")

    frame = dd.from_pandas(corpus, npartitions=3).map_partitions(fail, meta=corpus.iloc[:0])
    for way in (ExactDuplicates, FuzzyDuplicates):
        way(id_field="id", max_group_size=10)(frame)
        way(id_field="id").remove(frame)
        assert way(id_field="id")(frame)._name == way(id_field="id")(frame)._name
    with pytest.raises(AssertionError, match="computed"):
        ExactDuplicates(id_field="id")(frame).compute()


@WAYS
def test_duplicates_are_found_within_a_source(way, corpus):
    frame = dd.from_pandas(corpus, npartitions=6)
    found = way(id_field="id", by="source")(frame).compute().merge(corpus, on="id")
    assert len(found)
    assert (found.groupby("group")["source"].nunique(dropna=False) == 1).all()
    one = corpus[corpus["source"] == "web"]
    pd.testing.assert_frame_equal(
        plain(found[found["source"] == "web"]), plain(way(id_field="id")(one))
    )
    years = pd.array([2020, 2021, None, 2020], dtype=pd.ArrowDtype(pa.int32()))  # beside null
    frame = pd.DataFrame({"id": range(4), "text": "one and the same text " * 20, "year": years})
    found = way(id_field="id", by="year")(dd.from_pandas(frame, npartitions=2))
    assert sorted(found.compute()["id"]) == [0, 3]


DAYS = ["2020-01-01", "2021-01-01", "NaT"]
# The same two values and then null or another one, in two types.
TYPES = {
    "null makes fractions": ([1, 2, 3], [1.0, 2.0, None]),
    "nullable": (pd.array([1, 2, None], "Int64"), np.array([1, 2, 3], "int32")),
    "negative widths": (np.array([-1, -2, 3], "int8"), np.array([-1, -2, 3], "int64")),
    "no sign": (np.array([1, 2**62 + 1, 3], "uint64"), np.array([1, 2**62 + 1, 3], "int64")),
    "decimals": (
        pd.array([Decimal("1.50"), Decimal("2"), None], pd.ArrowDtype(pa.decimal128(9, 2))),
        [1.5, 2, 3],
    ),
    "single": (np.array([0.5, -0.0, 3], "float32"), pd.array([0.5, 0, None], "Float64")),
    "bool": ([True, False, True], pd.array([True, False, None], "boolean")),
    "time units": (np.array(DAYS, "datetime64[ns]"), np.array(DAYS, "datetime64[s]")),
    "days": (
        pd.array([date(2020, 1, 1), date(2021, 1, 1), None], pd.ArrowDtype(pa.date32())),
        np.array(DAYS, "datetime64[ms]"),
    ),
    "zones": (
        pd.DatetimeIndex(DAYS, tz="UTC"),
        pd.DatetimeIndex(DAYS, tz="UTC").tz_convert("Asia/Tokyo"),
    ),
    "durations": (np.array([1, 2, 3], "timedelta64[s]"), np.array([1000, 2000, 5], "m8[ms]")),
    "categories": (pd.Categorical(["b", "a", "c"]), ["b", "a", None]),
    "dictionary": (
        pd.array(["b", "a", "c"], pd.ArrowDtype(pa.dictionary(pa.int8(), pa.string()))),
        pd.Series(["b", "a", "c"], dtype=object),
    ),
}


def beside_types(pair):
    """A frame of documents with a text each, and one of their copies beside values of `pair`."""
    texts = [f"{word} and nothing else. " * 20 for word in ("sun", "moon", "stars")]
    ours, theirs = (pd.DataFrame({"text": texts, "of": pd.Series(own)}) for own in pair)
    return ours.assign(id=range(3)), theirs.iloc[:2].assign(id=range(3, 5))


@pytest.mark.parametrize("pair", TYPES.values(), ids=TYPES)
def test_within_an_earlier_corpus_values_are_compared_and_not_the_bits_that_hold_them(pair):
    ways = FINDERS if pair is TYPES["null makes fractions"] else ["exact"]
    for way, (one, other) in itertools.product(ways, (pair, pair[::-1])):
        duplicates, (ours, theirs) = FINDERS[way](by="of"), beside_types((one, other))
        assert duplicates.remove(ours, against=theirs)["id"].tolist() == [2]
        swapped = theirs.assign(of=theirs["of"].array[::-1])
        assert len(duplicates.remove(ours, against=swapped)) == 3


@pytest.mark.contract
@pytest.mark.parametrize("pair", TYPES.values(), ids=TYPES)
def test_partitions_of_other_types_hold_the_same_sources(pair):
    """As Dask reads a column of integers, with null in one partition alone."""
    parts = [frame.iloc[:2] for frame in beside_types(pair)]
    frame = dd.from_map(lambda number: parts[number], [0, 1], meta=parts[0].iloc[:0])
    found = ExactDuplicates(by="of", id_field="id").summarize(frame)
    assert sorted(found.sources.values()) == [(2, 1), (2, 1)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([1, 2, 3], ["1", "2", "3"]),
        ([True, False, True], [1, 0, 1]),
        (DAYS, np.array(DAYS, "datetime64[s]")),
        (np.array(DAYS, "datetime64[s]"), pd.DatetimeIndex(DAYS, tz="UTC")),
        (np.array([1, 2, 3], "timedelta64[s]"), [1, 2, 3]),
    ],
)
def test_values_that_are_never_equal_are_refused(ours, theirs):
    frame, earlier = beside_types((ours, theirs))
    with pytest.raises(TypeError, match=r"'of' holds .* here and .* earlier corpus: convert one"):
        ExactDuplicates(by="of").remove(frame, against=earlier)


def arrow_array(values, kind):
    return pd.arrays.ArrowExtensionArray(pa.array(values, kind))


STRINGS = {
    "object": lambda ids: pd.Series(ids, dtype=object),
    "string[python]": lambda ids: pd.array(ids, "string[python]"),
    "string[pyarrow]": lambda ids: pd.array(ids, "string[pyarrow]"),
    "string": lambda ids: arrow_array(ids, pa.string()),
    "large_string": lambda ids: arrow_array(ids, pa.large_string()),
    "string_view": lambda ids: arrow_array(ids, pa.string_view()),
    "dictionary": lambda ids: arrow_array(ids, pa.dictionary(pa.int8(), pa.string())),
    "category": lambda ids: pd.Categorical(ids),
    "category of string": lambda ids: pd.Categorical(arrow_array(ids, pa.string())),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_ids_of_all_string_types_are_compared(kind):
    duplicates = ExactDuplicates(id_field="id")
    kinds = [STRINGS[kind], lambda ids: pd.array(ids, "str")]
    for ours, theirs in itertools.permutations(kinds):
        frame = pd.DataFrame({"id": ours(["y", "x", "z"]), "text": ["a", "a", "b"]})
        found = duplicates(frame)
        assert found["id"].tolist() == ["x", "y"]
        same = frame.assign(id=theirs(["y", "x", "z"]))
        assert remove_duplicates(same, found)["id"].tolist() == ["x", "z"]
        earlier = pd.DataFrame({"id": theirs(["x"]), "text": ["a"]})
        assert duplicates.remove(frame, against=earlier)["id"].tolist() == ["z"]
        assert ExactDuplicates().remove(frame, against=earlier)["id"].tolist() == ["z"]


def test_ids_that_another_type_would_round_are_refused():
    ours, theirs = (pd.DataFrame({"id": [2**60 + 1], "text": ["a"]}) for _ in range(2))
    theirs = theirs.astype({"id": "uint64"})
    with pytest.raises(TypeError, match="'id' holds int64 here and uint64 in the earlier corpus"):
        ExactDuplicates(id_field="id").remove(ours, against=theirs)
    assert ExactDuplicates()(ours, against=theirs)["position"].tolist() == [1 << 40, 0]


@pytest.mark.parametrize("ids", [[2.5, 1.0], [2**32 + 2, 1], [None, 1.0]], ids=str)
def test_an_id_that_no_document_has_removes_none(ids):
    frame = pd.DataFrame({"id": np.array([1, 2, 3], "int32"), "text": ["a", "b", "c"]})
    listed = pd.DataFrame({"id": ids, "keep": False})
    assert remove_duplicates(frame, listed)["id"].tolist() == [2, 3]


@WAYS
def test_documents_of_an_earlier_corpus_stay(way, corpus):
    earlier = corpus.sample(frac=0.5, random_state=1)
    rest = corpus.drop(earlier.index)
    duplicates = way(id_field="id", keep_by=["quality"])
    found = duplicates(
        dd.from_pandas(rest, npartitions=4), against=dd.from_pandas(earlier, npartitions=3)
    ).compute()
    assert found.loc[found["is_earlier"], "keep"].all()
    goes = set(found.loc[~found["keep"], "id"])
    seen = earlier["text" if way is ExactDuplicates else "truth"]
    new = rest[rest["text"].fillna("") != ""]
    column = seen.name
    assert set(new.loc[new[column].isin(set(seen)), "id"]) <= goes
    kept = duplicates.remove(rest, against=earlier)
    pd.testing.assert_frame_equal(kept, rest[~rest["id"].isin(goes)])


@WAYS
def test_length_decides_where_it_is_named(way):
    text = "one two three four five six seven eight nine ten " * 20
    frame = pd.DataFrame({"id": [1, 2, 3], "text": [text, text, text], "rank": [None, 2.0, 2.0]})
    found = way(id_field="id", keep_by=["rank", "length"])(frame)
    assert found.set_index("id")["keep"].to_dict() == {1: False, 2: True, 3: False}
    assert (found["group"] == 1).all()
    longer = frame.assign(text=[text, text, text + " eleven"])
    found = FuzzyDuplicates(id_field="id", keep_by="length")(longer)
    assert found.set_index("id")["keep"].to_dict() == {1: False, 2: False, 3: True}


@WAYS
def test_unusual_texts_are_duplicates_of_themselves_alone(way):
    texts = ["x", "short", "a\0b", "lone \ud800 half", "z" * 1_000_000, " ", "\U0001f600" * 30]
    others = ["y", "shorter", "a\0c", "lone \udc00 halves", "y" * 1_000_000, "  "]
    frame = pd.DataFrame({"text": [*texts, *others, "\U0001f601" * 30, *texts]}, dtype=object)
    found = way(id_field="id")(frame.assign(id=range(len(frame))))
    assert sorted(zip(found["group"], found["id"], strict=True)) == [
        (first, first + more) for first in range(7) for more in (0, 14)
    ]


@WAYS
def test_null_and_empty_texts_are_no_duplicates(way, frames):
    frame = pd.DataFrame({"id": range(6), "text": [None, None, "", "", "one", "one"]})
    found = frames.to_pandas(way(id_field="id")(frames.plain(frame)))
    assert sorted(found["id"]) == [4, 5]
    none = frames.plain(pd.DataFrame({"id": range(4), "text": [None, None, "", ""]}, dtype="str"))
    none["id"] = none["id"].astype("int64")
    assert not len(way(id_field="id")(none))
    assert not len(way(id_field="id")(none.iloc[:0]))
    assert len(way(id_field="id").remove(dd.from_pandas(none, npartitions=2))) == 4


@WAYS
def test_giant_groups_take_linear_time_and_have_one_row_that_stays(way):
    frame = pd.DataFrame({"text": ["Accept all cookies to go on reading."] * 100_000})
    found = way()(dd.from_pandas(frame, npartitions=3))
    found = found.compute()
    assert len(found) == 100_000
    assert found["keep"].sum() == 1
    assert found["group"].nunique() == 1


@WAYS
def test_ids_that_repeat_are_refused(way, corpus):
    twice = corpus.assign(id=["same", "same", *corpus["id"].iloc[2:]])
    with pytest.raises(ValueError, match=r"'same' is the id of row 0 of partition 0 and of row 1"):
        way(id_field="id")(twice)
    with pytest.raises(ValueError, match="null is the id"):
        way(id_field="id")(corpus.assign(id=[None, *corpus["id"].iloc[1:]]))


@WAYS
def test_too_much_is_refused(way, corpus):
    with pytest.raises(TooManyDuplicatesError, match=r"of the corpus would go .* more than"):
        way(id_field="id", max_removed_share=0.1)(corpus)
    with pytest.raises(
        TooManyDuplicatesError, match=r"more than max_group_size=1; its text begins"
    ):
        way(id_field="id", max_group_size=1)(corpus)
    assert len(way(id_field="id", max_removed_share=0.5, max_group_size=3)(corpus))


def test_one_source_that_loses_too_much_is_refused():
    texts = [f"text {number}" for number in range(2_000)] + ["boilerplate"] * 1_000
    frame = pd.DataFrame({"text": texts, "site": ["good"] * 2_000 + ["bad"] * 1_000})
    with pytest.raises(TooManyDuplicatesError, match=r"999 of 1,000 documents of source 'bad'"):
        ExactDuplicates(source_field="site", max_removed_share=0.5)(frame)


def test_a_summary_counts_by_source(corpus):
    summary = FuzzyDuplicates(id_field="id", source_field="source").summarize(corpus)
    found = FuzzyDuplicates(id_field="id")(corpus).merge(corpus, on="id")
    gone = found[~found["keep"]]
    assert (summary.documents, summary.in_groups) == (300, len(found))
    assert (summary.groups, summary.duplicates) == (60, len(gone))
    assert summary.sources == {
        name: (
            int((corpus["source"].fillna("null") == name).sum()),
            int((gone["source"].fillna("null") == name).sum()),
        )
        for name in ("books", "null", "web")
    }
    assert summary.compared == summary.accepted + summary.rejected
    assert summary.accepted == summary.duplicates == sum(summary.similarities)
    largest = summary.largest[0]
    assert largest.size == 3
    assert largest.beginning in set(corpus["text"].dropna().str[:200])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"text_field": "txt"}, ValueError, r"no column 'txt'.* Did you mean 'text'"),
        ({"text_field": "quality", "id_field": "id"}, TypeError, "holds float64, not strings"),
        ({"id_field": "idd"}, ValueError, r"no column 'idd'.* Did you mean 'id'"),
        ({"keep_by": ["score"], "id_field": "id"}, ValueError, "no column 'score'"),
        ({"by": "sources", "id_field": "id"}, ValueError, "Did you mean 'source'"),
    ],
)
def test_a_wrong_column_is_refused_at_the_call(options, error, message, corpus):
    frame = dd.from_pandas(corpus, npartitions=2)
    with pytest.raises(error, match=message):
        ExactDuplicates(**options)(frame)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_removed_share": 2}, "max_removed_share=2 is not from 0 to 1"),
        ({"max_group_size": 0}, "must be at least 1"),
        ({"text_field": None}, "text_field=None is not a column name"),
        ({"id_field": 3}, "id_field=3 is not a column name"),
        ({"by": ""}, "by='' is not a text"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": 1 << 32}, "seed=4294967296 must be below 4294967296"),
        ({"token_ngrams": None}, "token_ngrams=None is a NoneType: pass a whole number"),
        ({"keep_by": [3]}, "keep_by=3 is not"),
        ({"threshold": 1.5}, "threshold=1.5 is not from 0 to 1"),
        ({"bands": 20}, "bands=20 and rows=None: give both"),
        ({"measure": "cosine"}, "measure='cosine' is not one of"),
        ({"char_ngrams": 0}, "char_ngrams=0 must be at least 1"),
        ({"verify": "yes"}, "verify='yes' is a str"),
    ],
)
def test_a_wrong_setting_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FuzzyDuplicates(**options)


def test_a_missing_library_is_named_with_the_cure(corpus, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else find(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r"needs numba.*pip install .*\[dedup]"):
        FuzzyDuplicates(id_field="id")(corpus)
    assert len(ExactDuplicates(id_field="id")(corpus))


def test_settings_load_no_compiler_and_no_framework(run_python):
    run_python("""
import sys
from gpuclassify import ExactDuplicates, FuzzyDuplicates, SemanticDuplicates
repr((ExactDuplicates(), FuzzyDuplicates(), SemanticDuplicates()))
assert not {"torch", "numba", "sklearn", "cudf"} & set(sys.modules)
""")


def test_what_is_no_result_is_refused(corpus):
    found = ExactDuplicates(id_field="id")(corpus)
    with pytest.raises(ValueError, match="with the column 'keep'"):
        remove_duplicates(corpus, found.drop(columns="keep"))
    with pytest.raises(ValueError, match="'url', which the frame does not have"):
        remove_duplicates(corpus, found.rename(columns={"id": "url"}))
    with pytest.raises(TypeError, match="convert one of them"):
        remove_duplicates(corpus, found.assign(id=range(len(found))))
    with pytest.raises(TypeError, match="pass a DataFrame"):
        ExactDuplicates()(corpus["text"])


def test_older_spellings():
    fuzzy = FuzzyDuplicates(
        id_field="id",
        num_buckets=20,
        hashes_per_bucket=13,
        false_positive_check=False,
        jaccard_threshold=0.7,
        buckets_per_shuffle=3,
        use_64_bit_hash=False,
        perform_removal=False,
    )
    assert (fuzzy.bands, fuzzy.rows, fuzzy.verify, fuzzy.bands_per_pass) == (20, 13, False, 3)
    assert fuzzy == FuzzyDuplicates(
        id_field="id",
        num_bands=20,
        minhashes_per_band=13,
        bands_per_iteration=3,
        verify=False,
        min_similarity=0.7,
        compare_by="characters",
    )
    assert ExactDuplicates(hash_method="md5", id_field="x") == ExactDuplicates(id_field="x")
    assert FuzzyDuplicates(false_positive_check=True, compare_by="words") == FuzzyDuplicates()
    with pytest.raises(TypeError, match="nothing is removed by finding"):
        ExactDuplicates(perform_removal=True)
    with pytest.raises(TypeError, match="Deduplicate reads and writes files"):
        FuzzyDuplicates(input_path="crawl/", output_path="clean/")
    with pytest.raises(TypeError, match="'bands' twice"):
        FuzzyDuplicates(bands=3, num_bands=3)


def test_components_in_rounds_are_those_of_the_tree(corpus):
    frame = dd.from_pandas(corpus, npartitions=5)
    tree, rounds = (
        FuzzyDuplicates(id_field="id", components=where, **FUZZY)(frame)
        for where in ("tree", "rounds")
    )
    pd.testing.assert_frame_equal(plain(rounds), plain(tree))


def test_a_false_chain_is_one_group_only_without_verification():
    words = [f"word{number}" for number in range(400)]
    texts = [" ".join(words[first : first + 100]) for first in range(0, 300, 10)]
    frame = pd.DataFrame({"id": range(len(texts)), "text": texts})
    options = {"id_field": "id", "bands": 60, "rows": 3}
    chain = FuzzyDuplicates(verify=False, **options)(frame)
    assert chain["group"].nunique() == 1
    assert chain["similarity"].isna().sum() == len(texts) - 1
    broken = FuzzyDuplicates(min_similarity=0.75, **options)(frame)
    assert broken["group"].nunique() > 8
    kept = frame.set_index("id")["text"]
    for group in broken.groupby("group"):
        rows = group[1].set_index("keep")
        best = ngrams_of(kept[rows.loc[True, "id"]], 3)
        for row in group[1][~group[1]["keep"]].itertuples():
            own = ngrams_of(kept[row.id], 3)
            assert row.similarity == np.float32(len(own & best) / len(own | best))
            assert row.similarity >= 0.75
    assert FuzzyDuplicates(min_similarity=0.75, **options).summarize(frame).rejected > 0


@pytest.mark.parametrize("ids", [[1, 1, 2], ["a", None, "b"], [0.5, 1.5, 2.5], [[1], [2], [3]]])
def test_positions_get_another_name_beside_a_column_id_that_is_none(ids):
    frame = pd.DataFrame({"id": ids, "text": ["a", "a", "b"]})
    found = ExactDuplicates()(frame)
    assert found["position"].tolist() == [0, 1]
    assert remove_duplicates(frame, found)["text"].tolist() == ["a", "b"]
    assert ExactDuplicates().remove(frame).equals(frame[[True, False, True]])
    with pytest.raises(ValueError, match="'id' or 'position', and the frame has both"):
        ExactDuplicates()(frame.assign(position=1))


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("option", ["text_field", "id_field", "by", "keep_by", "source_field"])
def test_two_columns_of_one_name_are_told(option, is_lazy):
    frame = pd.DataFrame([["a", 1, 2]], columns=["text", "url", "url"])
    if option == "text_field":
        frame.columns = ["text", "text", "url"]
    given = {} if option == "text_field" else {option: "url"}
    dataset = dd.from_pandas(frame, npartitions=1) if is_lazy else frame
    with pytest.raises(ValueError, match=r"2 columns are called '(text|url)': rename all but one"):
        ExactDuplicates(**given)(dataset)
