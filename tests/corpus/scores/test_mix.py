"""Mixtures: tokens counted as pandas counts them, copies as they are expected, rows repeated."""

import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner
from dask.base import tokenize
from scipy.stats import binom

from gpuclassify import (
    AnnotationWriter,
    Mix,
    MixCopies,
    Pipeline,
    RepeatRows,
    Thresholds,
    read_files,
    sample,
    score_edges,
)
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores import mix as mix_module
from gpuclassify.jobs.input.readers import FileReader

TOPICS = ("News", "Code", None)


def corpus(rows=6_000, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "id": [f"doc-{row}" for row in range(rows)],
            "topic": pd.Series(rng.choice([0, 1, 2], rows)).map(dict(enumerate(TOPICS))),
            "bucket": rng.integers(0, 2, rows),
            "tokens": pd.array(rng.integers(1, 100, rows), "Int64"),
        }
    )


WEIGHTS = [
    {"topic": "News", "bucket": 1, "weight": 3},
    {"topic": "News", "bucket": 0, "weight": 1},
    {"topic": "Code", "weight": 4},
]


def plan(frame, tokens=300_000, **options):
    options = {"by": ["topic", "bucket"], "weights": WEIGHTS, **options}
    return Mix.plan(frame, tokens=tokens, **options)


def test_cells_have_what_pandas_counts_and_what_weights_ask():
    frame = corpus()
    frame.loc[::50, "tokens"] = pd.NA
    mix = plan(frame)
    named = frame.assign(topic=frame["topic"].fillna("none"))
    sums = named.groupby(["topic", "bucket"])["tokens"].agg(["size", "sum"])
    assert len(mix.cells) == len(sums) == 6
    for cell, each in mix.cells.items():
        topic, bucket = json.loads(cell)
        expected = sums.loc[(topic or "none", bucket)]
        assert (each.rows, each.tokens) == tuple(expected)
    cells = mix.cells
    assert cells['["News", 1]'].asked == pytest.approx(300_000 * 3 / 8)
    assert cells['["News", 1]'].epochs == pytest.approx(112_500 / cells['["News", 1]'].tokens)
    code = [cells[f'["Code", {bucket}]'] for bucket in (0, 1)]
    assert sum(each.asked for each in code) == pytest.approx(150_000)
    assert code[0].epochs == code[1].epochs  # as many of each as there are
    assert cells["[null, 0]"].epochs == cells["[null, 0]"].asked == 0
    assert mix.missing == 0 and sum(each.asked for each in cells.values()) == pytest.approx(3e5)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_nan_is_null_in_cells(kind):
    values = pa.array([1.0, float("nan"), None, float("nan"), 2.5, None], kind)
    grades = pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([values])))
    mix = Mix.plan(pd.DataFrame({"grade": grades, "tokens": range(6)}), by="grade", tokens=10)
    counts = {cell: (each.rows, each.tokens) for cell, each in mix.cells.items()}
    assert counts == {"[1]": (1, 0), "[2.5]": (1, 4), "[null]": (4, 11)}


def test_without_weights_all_cells_are_repeated_alike():
    frame = corpus()
    mix = plan(frame, tokens=2.5 * frame["tokens"].sum(), weights=None)
    assert {each.epochs for each in mix.cells.values()} == {2.5}


@pytest.mark.parametrize("topic", ["News", None])
def test_one_cell_is_repeated_as_often_as_asked(topic):
    frame = corpus().assign(topic=topic)
    mix = Mix.plan(frame, by="topic", tokens=2 * int(frame["tokens"].sum()))
    assert {cell: each.epochs for cell, each in mix.cells.items()} == {json.dumps([topic]): 2.0}
    assert set(MixCopies(mix, id_field="id")(frame)["copies"]) == {2}


def test_the_picture_shows_what_is_asked_against_what_there_is():
    """As characters, of which the longest bar has 24, and in hundredths of the page's width."""
    frame = pd.DataFrame({"topic": ["a", "b\x1b", "c"], "tokens": [100, 50, 0]})
    weights = [{"topic": "a", "weight": 1}, {"topic": "b\x1b", "weight": 3}]
    mix = Mix.plan(frame, by="topic", tokens=100, weights=weights)
    lines = [line.split("  ")[-1].strip() for line in str(mix).splitlines()[1:4]]
    assert lines == ["█" * 6 + "░" * 18, "█" * 18, "–"]
    assert "\x1b" not in str(mix) and "b\\x1b" in str(mix)
    page = mix.html()
    for width in ("100.0%", "25.0%", "50.0%", "75.0%"):
        assert f"width: {width}" in page


def test_tokens_that_repeats_cannot_give_are_missing(caplog):
    frame = corpus()
    mix = plan(frame, tokens=10_000_000, max_epochs=3)
    for cell, each in mix.cells.items():
        if each.asked:
            assert each.epochs == 3 and each.missing == pytest.approx(each.asked - 3 * each.tokens)
            assert cell.startswith(('["News"', '["Code"'))
    assert "tokens are missing, with at most 3 repeats" in caplog.text
    assert "are missing" in str(mix) and "are missing" in mix.html()
    copies = MixCopies(mix, id_field="id")(frame)["copies"]
    assert set(copies[frame["topic"].notna()]) == {3} and set(copies[frame["topic"].isna()]) == {0}


def assert_expected(mix, frame):
    """Each row has its cell's whole epochs, and as many rows one more as a coin would give."""
    codes = [json.dumps([None if pd.isna(topic) else topic, int(bucket)])
             for topic, bucket in zip(frame["topic"], frame["bucket"], strict=True)]  # fmt: skip
    for cell, rows in frame.groupby(codes):
        epochs, copies = mix.cells[cell].epochs, rows["copies"]
        whole = int(epochs)
        assert copies.between(whole, whole + 1).all()
        low, high = binom.interval(0.9999, len(rows), epochs - whole)
        assert low <= (copies - whole).sum() <= high


def test_copies_are_as_many_as_expected():
    frame = corpus(60_000)
    mix = plan(frame, tokens=3_000_000)
    frame["copies"] = MixCopies(mix, id_field="id")(frame)["copies"]
    assert_expected(mix, frame)
    total = (frame["tokens"] * frame["copies"]).sum()
    assert total == pytest.approx(3_000_000, rel=0.01)


def test_the_expected_copies_are_those_asked_for_over_many_seeds():
    frame, counts = corpus(200).assign(topic="News", bucket=1, tokens=10), []
    mix = Mix.plan(frame, by="topic", tokens=2_600)
    for seed in range(2_000):
        mapper = MixCopies(replace(mix, seed=seed), id_field="id")
        counts.append(mapper.map_frame(frame)["copies"].sum())
    assert np.mean(counts) == pytest.approx(260, abs=4 * np.sqrt(200 * 0.21 / 2_000))
    assert np.std(counts) == pytest.approx(np.sqrt(200 * 0.3 * 0.7), rel=0.1)


@pytest.mark.parametrize("ids", ["text", "number"])
def test_neither_partitions_nor_order_change_anything(ids):
    frame = corpus(1_000)
    if ids == "number":
        frame["id"] = np.arange(1_000) * 7
    whole = plan(frame, tokens=60_000)
    expected = MixCopies(whole, id_field="id")(frame)
    other = MixCopies(plan(frame, tokens=60_000, seed=1), id_field="id")(frame)["copies"]
    assert (other != expected["copies"]).any()
    shuffled = frame.sample(frac=1, random_state=1)
    datasets = [dd.from_pandas(frame, npartitions=n) for n in (1, 7, 100)]
    for dataset in (*datasets, dd.from_pandas(shuffled, npartitions=7, sort=False)):
        assert plan(dataset, tokens=60_000).digest() == whole.digest()
        lazy = MixCopies(whole, id_field="id")(dataset)
        assert lazy._meta.dtypes["copies"] == pd.Int64Dtype()
        found = lazy.compute().sort_index()
        assert found["copies"].tolist() == expected["copies"].tolist()
        assert found.index.tolist() == frame.index.tolist()
    known = frame[frame["topic"] == "News"]  # what else there is changes nothing
    assert MixCopies(whole, id_field="id")(known)["copies"].tolist() == (
        expected["copies"][frame["topic"] == "News"].tolist()
    )


@pytest.mark.parametrize(
    ("read", "most"),
    [
        (plan, 1),
        (lambda ddf: Thresholds.fit(ddf, score="tokens", label="bucket", recall=0.8), 1),
        (lambda ddf: sample(ddf, 1, by="topic", id_field="id"), 2),  # 2: those that have drawn rows
    ],
)
def test_each_partition_is_read_once(read, most):
    reads = Counter()

    def part(number):
        reads[number] += 1
        return corpus(900, seed=number).assign(id=np.arange(900) + 900 * number)

    parts = dd.from_map(part, range(5), meta=corpus(1).assign(id=0).iloc[:0])
    with dask.config.set(scheduler="sync"):
        read(parts)
    assert set(reads) == set(range(5)) and max(reads.values()) == most


@pytest.mark.parametrize(
    "read",
    [
        plan,
        lambda ddf: Thresholds.fit(ddf, score="tokens", label="bucket", by="topic", recall=0.8),
        lambda ddf: score_edges(ddf, "tokens", by="topic", n=4),
    ],
)
def test_results_of_partitions_are_joined_by_tree(read):
    """The client gets one result, and no task joins those of more than eight."""
    found, most = [], []
    frame = corpus(3_000)

    def get(graph, keys, **options):
        tasks = graph.__dask_graph__() if hasattr(graph, "__dask_graph__") else graph
        most.append(max(len(task.dependencies) for task in tasks.values()))
        results = dask.get(graph, keys, **options)
        found.append(len(list(dask.core.flatten(keys))))
        return results

    with dask.config.set(scheduler=get):
        result = read(dd.from_pandas(frame, npartitions=100))
    assert set(found) == {1} and max(most) <= 8
    assert result == read(frame)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_without_ids_rows_are_known_by_their_places(suffix, tmp_path):
    frame = corpus(9_000).drop(columns="id").assign(text="text")
    (tmp_path / "crawl").mkdir()
    for number in range(3):
        part, path = frame[number::3], tmp_path / f"crawl/{number}.{suffix}"
        if suffix == "parquet":
            part.to_parquet(path, index=False, row_group_size=500)
        else:
            part.to_json(path, orient="records", lines=True)
    crawl, mix = str(tmp_path / "crawl"), plan(frame, tokens=520_000)

    def copies(seed=0, **reading):
        notes = tmp_path / f"notes-{seed}-{len(reading)}"
        stages = [FileReader(crawl, **reading), MixCopies(replace(mix, seed=seed))]
        Pipeline([*stages, AnnotationWriter(str(notes))]).run(report=lambda *_: None)
        written = pd.concat(map(pd.read_parquet, notes.rglob("part-*.parquet")))
        assert [*written] == ["_file", "_place", "_left_out", "copies"]
        return read_files(crawl, annotations=str(notes)).compute()

    found = copies()
    assert found["copies"].tolist() == copies(part_bytes=5_000)["copies"].tolist()
    assert found["copies"].tolist() != copies(seed=1)["copies"].tolist()
    assert_expected(mix, found)
    with pytest.raises(ValueError, match=r"id_field= is missing.*Name a column of ids"):
        MixCopies(mix)(frame)


@pytest.mark.parametrize("npartitions", [None, 1, 7, 100])
def test_rows_are_repeated(npartitions):
    frame = corpus(100).assign(copies=pd.array([0, 1, 2, 3, None] * 20, "Int64"))
    dataset = frame if npartitions is None else dd.from_pandas(frame, npartitions=npartitions)
    found = RepeatRows("copies")(dataset)
    found = found if npartitions is None else found.compute()
    expected = frame.loc[frame.index.repeat(frame["copies"].fillna(0).astype(int))]
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    assert len(RepeatRows()(frame.iloc[:0])) == 0
    for wrong in (-1, 1_001, 10**9, 2**62):
        copies = [*range(99), wrong]
        with pytest.raises(ValueError, match=f"from 0 to 1,000; found {wrong} in .* of row 99"):
            RepeatRows()(frame.assign(copies=copies))
    with pytest.raises(TypeError, match="copies are whole numbers"):
        RepeatRows("topic")(frame)


def test_copies_that_no_memory_holds_are_refused_before_any_is_taken():
    frame = pd.DataFrame({"text": ["x" * (100 << 20)], "copies": [1_000]})
    with pytest.raises(MemoryError, match=r"the 1,000 copies of 1 rows need 97\.66 GiB, and "):
        RepeatRows()(frame)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"weights": [{"topic": "Sport", "weight": 1}]}, "no row is of it; cells are"),
        ({}, {"weights": [{"topc": "News", "weight": 1}]}, "values of"),
        ({}, {"weights": [{"topic": "News"}]}, "give a weight"),
        ({}, {"weights": [{"topic": "News", "weight": -1}]}, "0 or more"),
        ({}, {"weights": [{"topic": "News", "weight": 0}]}, "are all 0"),
        ({}, {"weights": []}, "or none"),
        ({}, {"weights": [*WEIGHTS, {"topic": "News", "weight": 1}]}, 'the cell .* is of'),
        ({}, {"tokens": 0}, "tokens=0 must be above 0"),
        ({}, {"max_epochs": 0}, "max_epochs=0 must be"),
        ({}, {"max_epochs": 10**9}, "must be at most 1,000"),
        ({"tokens": 2**61}, {}, r"adds up to more than 2\*\*62 tokens"),
        ({}, {"by": "topik"}, "Did you mean 'topic'"),
        ({}, {"token_field": "n_tokens"}, "no column 'n_tokens'"),
        ({"tokens": 0.5}, {}, "weights are whole"),
        ({"tokens": -5}, {}, "0 or more"),
        ({"tokens": 0}, {}, "6,000 rows have no token in 'tokens'"),
        ({"tokens": pd.array([None] * 6_000, "Int64")}, {}, "6,000 rows have no token"),
        ({"topic": None}, {}, "no row is of it; cells are null, 0, null, 1"),
        ({}, {"by": "id", "weights": None}, "more than 1,000 groups"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(change, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plan(corpus().assign(**change), **options)


def test_a_mix_is_saved_and_its_copies_need_ids(tmp_path):
    frame, path = corpus(), tmp_path / "mix.json"
    mix = plan(frame)
    mix.save(path)
    assert Mix.load(path) == mix
    mapper = MixCopies(path, id_field="id")
    assert tokenize(pickle.loads(pickle.dumps(mapper))) == tokenize(MixCopies(mix, id_field="id"))
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match="another digest"):
        Mix.load(path)
    with pytest.raises(ValueError, match="rows without an id"):
        mapper(frame.assign(id=None).astype({"id": "str"}))
    with pytest.raises(ValueError, match="no column 'id'"):
        mapper(frame.drop(columns="id"))
    with pytest.raises(ValueError, match=r"already has \['copies'\]"):
        mapper(mapper(frame))
    with pytest.raises(ValueError, match="'id' is a column that is read"):
        MixCopies(mix, id_field="id", copies_field="id", overwrite=True)(frame)
    copies = mapper(frame.assign(topic="Sport"))["copies"]
    assert set(copies) == {0}  # of a cell that the mix does not know


@pytest.fixture
def counted_here(monkeypatch):
    """A list that grows with each partition that this process counts; workers have copies of it."""
    calls, count = [], mix_module._part_counts

    def noting(*arguments):
        calls.append(arguments)
        return count(*arguments)

    monkeypatch.setattr(mix_module, "_part_counts", noting)
    return calls


def test_the_corpus_is_counted_once_by_the_workers(counted_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame, whole = corpus(900), tmp_path / "crawl/1.jsonl"
    whole.parent.mkdir()
    for number in range(3):
        path = whole.with_name(f"{number}.jsonl")
        frame[number::3].to_json(path, orient="records", lines=True)
    with whole.open("a") as file:
        file.write('{"id": \n')
    words = ("mix", "crawl", "copies", "--by", "topic", "--by", "bucket", "--tokens", "6e4",
             "--id-field", "id", "--on-error", "quarantine", "--workers", "1",
             "--page", "page.html")  # fmt: skip

    def run(*more):
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == (0 if more else 3), done.output
        return done.stdout

    expected = plan(frame, tokens=60_000, weights=None)
    counted_here.clear()
    assert json.loads(run("--plan", "--json")) == json.loads(expected.as_json())
    assert not Path("copies").exists()
    assert run().startswith(str(expected))
    kept = Path("copies/_mix/mix.json")
    assert Mix.load(kept) == expected
    before, first = kept.stat(), sorted(Path("copies").glob("part-*"))[0]
    first.unlink()
    Path("copies/_SUCCESS").unlink()
    Path("page.html").unlink()
    assert run().startswith(str(expected))  # and does what is missing
    assert first.exists() and kept.stat().st_mtime_ns == before.st_mtime_ns
    assert Path("page.html").exists()
    assert counted_here == []
    found = pd.concat(map(pd.read_parquet, Path("copies").glob("part-*.parquet")))
    copies = MixCopies(expected, id_field="id")(frame)["copies"]
    assert found["copies"].sum() == copies.sum()
    changed = CliRunner().invoke(main, [*words, "--max-epochs", "7"])
    assert changed.exit_code == 2 and "max_epochs" in changed.output


def test_the_command_writes_copies_and_select_the_mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = corpus(900)
    texts = frame[["id"]].assign(text=[f"text {row}" for row in range(900)])
    Path("crawl").mkdir()
    for number in range(3):
        some = texts[300 * number : 300 * (number + 1)]
        some.to_parquet(f"crawl/{number}.parquet", index=False, row_group_size=50)

    def counted(part):
        rows = frame.set_index("id").loc[part["id"]]
        return part.assign(**{name: rows[name].array for name in ("topic", "bucket", "tokens")})

    stages = [FileReader("crawl"), counted, AnnotationWriter("notes")]
    Pipeline(stages).run(report=lambda *_: None)
    lines = [f"- {json.dumps(entry)}\n" for entry in WEIGHTS]
    Path("mix.yaml").write_text("".join(lines))

    def run(*arguments):
        return CliRunner().invoke(main, [*map(str, arguments)])

    options = ("--annotations", "notes", "--by", "topic", "--by", "bucket", "--tokens", "6e4",
               "--weights", "mix.yaml", "--id-field", "id", "--part-size", "2kB")  # fmt: skip
    mix = plan(frame, tokens=60_000)
    done = run("mix", "crawl", "copies", *options, "--plan", "--page", "page.html")
    assert done.exit_code == 0 and done.stdout.strip() == str(mix), done.output
    assert Path("page.html").read_text().count('class="name"') == 7
    assert not Path("copies").exists()
    done = run("mix", "crawl", "copies", *options, "--workers", 1)
    assert done.exit_code == 0, done.output
    expected = MixCopies(mix, id_field="id")(frame)["copies"]
    assert read_files("crawl", annotations="copies").compute()["copies"].tolist() == [*expected]
    done = run("select", "crawl", "out", "--annotations", "copies", "--copies", "copies",
               "--workers", 1)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = read_files("out").compute()
    assert found["id"].tolist() == frame["id"].repeat(expected).tolist()
    done = run("mix", "crawl", "by-place", *options[:-4], "--workers", 1)  # without ids
    assert done.exit_code == 0, done.output
    by_place = read_files("crawl", annotations="by-place").compute()["copies"]
    assert by_place.tolist() != [*expected] and abs(by_place.sum() - expected.sum()) < 100
    for wrong, message in ((["--weights", "no.yaml"], "no.yaml"), (["--by", "topik"], "topi")):
        done = run("mix", "crawl", "more", *options, *wrong)
        assert done.exit_code == 2 and message in done.output
