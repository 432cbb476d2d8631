"""`sample`: exact counts, weights without bias, and the same rows however they are cut."""

import itertools
import json
import logging

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify import AnnotationWriter, FileReader, Pipeline, sample
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores import sampling
from gpuclassify.frames.hashing import row_keys

ROWS = 3_000


def make_corpus(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "id": [f"doc-{row}" for row in range(rows)],
            "label": rng.choice(["a", "b", None], rows, p=[0.9, 0.09, 0.01]),
            "source": rng.integers(0, 3, rows),
            "edu": rng.gamma(2, 1, rows),
            "text": [f"text of {row}" for row in range(rows)],
        }
    )


CORPUS = make_corpus()
KINDS = {
    "all": {},
    "by": {"by": ["label", "source"]},
    "near": {"near": "edu", "score": 2.5},
    "both": {"by": "label", "near": "edu", "score": 2.5, "width": 1},
}


def draw(frame, n=20, **settings):
    return sample(frame, n, **{"id_field": "id", **settings})


@pytest.mark.parametrize("partitions", [1, 7, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_weights_do_not_depend_on_partitions(kind, partitions):
    settings = KINDS[kind]
    whole = draw(CORPUS, **settings)
    shuffled = CORPUS.sample(frac=1, random_state=partitions)
    parts = draw(dd.from_pandas(shuffled, npartitions=partitions, sort=False), **settings)
    pd.testing.assert_frame_equal(parts.astype(whole.dtypes), whole)
    pd.testing.assert_frame_equal(whole.drop(columns="weight"), matching(whole["id"]))


def test_partitions_that_dask_joins_give_their_rows(tmp_path):
    frame = CORPUS.assign(id=np.arange(ROWS) - 1_500, text=CORPUS["text"] * 20)
    dd.from_pandas(frame, npartitions=30).to_parquet(tmp_path / "corpus")
    lazy = dd.read_parquet(tmp_path / "corpus")
    lazy = lazy[lazy["id"] > -1_600]
    assert len(lazy[["id", "label"]].to_delayed()) < 30  # as is meant to be tried here
    rows, whole = draw(lazy, by="label"), draw(frame, by="label")
    pd.testing.assert_frame_equal(rows.astype(whole.dtypes), whole)


def matching(ids):
    return CORPUS.set_index("id").loc[ids].reset_index()[[*CORPUS.columns]]


def test_each_stratum_has_exactly_as_many_rows_and_the_weight_of_all():
    rows = draw(CORPUS, 50, by=["label", "source"])
    columns = ["label", "source"]
    in_all = CORPUS.groupby(columns, dropna=False).size()
    strata = rows.groupby(columns, dropna=False)
    pd.testing.assert_series_equal(strata.size(), in_all.clip(upper=50))
    pd.testing.assert_series_equal(strata["weight"].sum(), in_all.astype(float), check_names=False)
    assert in_all.min() < 50 < in_all.max()
    assert (strata["weight"].nunique() == 1).all()


def test_a_finer_or_larger_sample_has_the_rows_of_a_coarser_one():
    coarse = draw(CORPUS, 50, by="label")
    for finer in (draw(CORPUS, 60, by="label"), draw(CORPUS, 50, by=["label", "source"])):
        assert set(coarse["id"]) < set(finer["id"])
    assert set(coarse["id"]) != set(draw(CORPUS, 50, by="label", seed=1)["id"])


def test_new_rows_displace_no_more_than_they_are():
    before = set(draw(CORPUS, 50, seed=1)["id"])
    more = make_corpus(ROWS + 300, seed=0).iloc[ROWS:]
    after = set(draw(pd.concat([CORPUS, more]), 50, seed=1)["id"])
    assert before - after and len(before - after) == len(after & set(more["id"])) < 15


@pytest.mark.parametrize("settings", [{}, KINDS["near"], {**KINDS["near"], "width": 2}])
def test_weighted_sums_are_unbiased_over_simulated_corpora(settings):
    """Each of 2,000 strata is a corpus; a tolerance of 4 standard errors."""
    rng, count, rows = np.random.default_rng(3), 2_000, 40
    frame = pd.DataFrame({"corpus": np.repeat(np.arange(count), rows), "id": range(count * rows)})
    frame["edu"] = rng.gamma(2, 1, len(frame))
    drawn = draw(frame, 8, by="corpus", **settings)
    assert (drawn.groupby("corpus").size() == 8).all()
    drawn["sum"] = drawn["edu"] * drawn["weight"]
    sums = drawn.groupby("corpus")[["weight", "sum"]].sum()
    errors = np.stack([sums["weight"] - rows, sums["sum"] - frame.groupby("corpus")["edu"].sum()])
    tolerance = 4 * errors.std(axis=1) / np.sqrt(count) + 1e-9
    assert (np.abs(errors.mean(axis=1)) <= tolerance).all()
    if not settings:
        assert np.ptp(errors[0]) < 1e-9  # in each corpus weights sum up to its rows


def test_rows_near_a_score_are_drawn_more_often():
    near = draw(CORPUS, 200, near="edu", score=2.5)["edu"]
    far = draw(CORPUS, 200)["edu"]
    assert (near.sub(2.5).abs() < 0.5).mean() > 2 * (far.sub(2.5).abs() < 0.5).mean()
    assert len(draw(CORPUS, ROWS, near="edu", score=2.5)) == ROWS
    assert set(draw(CORPUS, ROWS, near="edu", score=2.5)["weight"]) == {1.0}


def test_rows_without_a_score_are_left_out_and_counted(caplog):
    frame = CORPUS.assign(edu=CORPUS["edu"].mask(CORPUS["edu"] < 1))
    with caplog.at_level(logging.WARNING):
        rows = draw(frame, ROWS, near="edu", score=2.5)
    assert len(rows) == frame["edu"].notna().sum()
    assert f"{frame['edu'].isna().sum()} rows have no edu" in caplog.text
    with pytest.raises(ValueError, match="no rows to draw from with a edu"):
        draw(frame.assign(edu=np.nan), near="edu", score=2.5)
    infinite = draw(frame.fillna({"edu": np.inf}), ROWS, near="edu", score=2.5)
    assert infinite["id"].tolist() == rows["id"].tolist()


def test_the_first_rows_are_a_sample_too():
    means = [draw(CORPUS, 200, seed=seed)["edu"].head(20).mean() for seed in range(40)]
    error = CORPUS["edu"].std() / np.sqrt(40 * 20)
    assert abs(np.mean(means) - CORPUS["edu"].mean()) < 4 * error


def test_the_numbers_of_ids_stay_the_same_next_year():
    rule = sampling.Draw(1, (), None, 0.0, 1.0, "id", 0)
    texts = rule.keys(pd.DataFrame({"id": ["a", "b"]}))
    numbers = rule.keys(pd.DataFrame({"id": pd.array([1, 2], "Int64")}))
    assert texts.tolist() == TEXT_KEYS
    assert numbers.tolist() == row_keys("0", np.array([1, 2])).tolist() == NUMBER_KEYS


def test_integers_and_texts_in_a_column_of_objects_have_the_numbers_of_their_own_columns():
    rule = sampling.Draw(1, (), None, 0.0, 1.0, "id", 0)
    small, large = [5, -1, -(1 << 63)], [(1 << 64) - 1]
    integers = [pd.Series(small), pd.Series(large, dtype="uint64"), pd.Series([7], dtype="Int32")]
    texts, others = pd.Series(["5", "b"]), pd.Series([True, 1 << 64, 0.5], dtype=object)
    alone = [rule.keys(pd.DataFrame({"id": ids})).tolist() for ids in (*integers, texts, others)]
    ids = [*small, *large, np.int32(7), *texts, *others]
    mixed = rule.keys(pd.DataFrame({"id": pd.Series(ids, dtype=object)})).tolist()
    assert mixed == [*itertools.chain(*alone)]
    assert mixed[0] != mixed[5]  # 5 and "5"
    corpus = CORPUS.assign(id=range(ROWS))
    parts = [corpus[:2_000], corpus[2_000:].astype({"id": object})]
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_map(lambda part: parts[part], [0, 1], meta=corpus[:0])
    assert [*draw(lazy)["id"]] == [*draw(corpus)["id"]]


TEXT_KEYS = [5468858448691611746, 6465079696760461959]
NUMBER_KEYS = [4047728091875069215, 13909686335433150882]


WRONG = {
    "no-id": ({"id_field": None}, ValueError, "pass FileReader"),
    "unknown-id": ({"id_field": "idd"}, ValueError, "Did you mean 'id'"),
    "same-id": ({"id_field": "source", "n": 2_000}, ValueError, "two rows have the same id_field"),
    "null-id": ({"id_field": "label"}, ValueError, "rows without an id"),
    "unknown-column": ({"by": "lable"}, ValueError, "Did you mean 'label'"),
    "text-near": ({"near": "text", "score": 1.0}, TypeError, "not numbers"),
    "no-width": ({"near": "edu"}, ValueError, "name the score to be near to"),
    "none": ({"n": 0}, ValueError, "n=0 must be at least 1"),
    "taken": ({"weight_field": "edu"}, ValueError, "name that of the sample's weights"),
}


@pytest.mark.parametrize(("settings", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls_say_what_to_pass(settings, kind, message):
    with pytest.raises(kind, match=message):
        draw(CORPUS, **settings)


ENDS = {
    "one class": ({"label": "a"}, {"by": "label"}),
    "all null": ({"label": None}, {"by": "label"}),
    "ties": ({"edu": 2.5}, {"near": "edu", "score": 2.5}),
}


@pytest.mark.parametrize(("change", "settings"), ENDS.values(), ids=ENDS)
def test_what_tells_no_rows_apart_changes_no_sample(change, settings):
    plain, rows = draw(CORPUS), draw(CORPUS.assign(**change), **settings)
    assert rows["id"].tolist() == plain["id"].tolist()
    if "by" in settings:
        assert rows["weight"].tolist() == plain["weight"].tolist() == [ROWS / 20] * 20


def test_too_many_strata_are_refused(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_STRATA", 100)
    with pytest.raises(ValueError, match="more than 100 groups"):
        draw(CORPUS, by="text")
    with pytest.raises(ValueError, match="no rows to draw from"):
        draw(CORPUS.head(0))


@pytest.fixture(scope="module", params=["parquet", "jsonl"])
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "crawl").mkdir()
    for number in range(3):
        part = CORPUS.iloc[number * 1_000 : (number + 1) * 1_000][["id", "text", "source"]]
        path = folder / f"crawl/{number}.{request.param}"
        if request.param == "parquet":
            part.to_parquet(path, row_group_size=90, index=False)
        else:
            part.to_json(path, orient="records", lines=True)
    labels = CORPUS.set_index("id")["label"]
    stages = [FileReader(str(folder / "crawl")), Labelled(labels)]
    Pipeline([*stages, AnnotationWriter(str(folder / "notes"))]).run(report=lambda *_: None)
    return folder


class Labelled:
    """Stage that adds the labels of ids."""

    def __init__(self, labels):
        self.labels = labels

    def __call__(self, frame):
        return frame.assign(label=frame["id"].map(self.labels).astype("str"))


def test_files_are_cut_by_annotations_and_give_the_same_rows(files):
    def rows(**settings):
        where = {"annotations": str(files / "notes")}
        reader = FileReader(str(files / "crawl"), **where, **settings.pop("reading", {}))
        return sample(reader, 30, by=["label", "source"], **settings)

    whole = rows()
    for reading in ({"part_bytes": 3_000}, {"files_per_partition": 3}):
        pd.testing.assert_frame_equal(rows(reading=reading), whole)
    frame = whole.assign(source=whole["source"].astype("int64"))
    known = matching(whole["id"])
    assert frame["text"].tolist() == known["text"].tolist()
    assert frame["label"].fillna("-").tolist() == known["label"].fillna("-").tolist()
    of_ids, of_frame = rows(id_field="id"), draw(CORPUS, 30, by=["label", "source"])
    assert of_ids["id"].tolist() == of_frame["id"].tolist() != whole["id"].tolist()
    assert of_ids["weight"].tolist() == of_frame["weight"].tolist()


def test_the_command_writes_what_label_studio_and_argilla_read(files, tmp_path):
    def run(*words):
        notes = ["--annotations", str(files / "notes")]
        return CliRunner().invoke(main, ["sample", str(files / "crawl"), *words, *notes])

    lines, array = tmp_path / "look.jsonl", tmp_path / "look.json"
    result = run(str(lines), "-n", "4", "--by", "label")
    assert result.exit_code == 0, result.output
    assert "12 rows, which stand for 3,000" in result.stdout
    assert run(str(array), "-n", "4", "--by", "label").exit_code == 0
    objects = [json.loads(line) for line in lines.read_text().splitlines()]
    assert objects == json.loads(array.read_text())
    assert [*objects[0]] == ["id", "text", "source", "label", "weight"]
    again = run(str(lines))
    assert again.exit_code == 2 and "there already" in again.output
    assert run(str(lines), "--overwrite", "-n", "2", "--near", "source:1").exit_code == 0
    assert len(lines.read_text().splitlines()) == 2
    for words in (["x.txt"], ["x.json", "--near", "source"], ["x.json", "--near", ":2"]):
        wrong = run(*words)
        assert wrong.exit_code == 2
        assert "such as --near" in wrong.output or "ends with none of .jsonl" in wrong.output
