"""Mixtures: tokens are counted as pandas counts them, and cells get the epochs that are asked."""

import json
from collections import Counter
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner

from gpuclassify import (
    AnnotationWriter,
    Mix,
    Pipeline,
    Thresholds,
    sample,
    score_edges,
)
from gpuclassify.commands.cli import main
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
        topic, bucket = cell
        expected = sums.loc[(topic or "none", bucket)]
        assert (each.rows, each.tokens) == tuple(expected)
    cells = mix.cells
    assert cells["News", 1].asked == pytest.approx(300_000 * 3 / 8)
    assert cells["News", 1].epochs == pytest.approx(112_500 / cells["News", 1].tokens)
    code = [cells["Code", bucket] for bucket in (0, 1)]
    assert sum(each.asked for each in code) == pytest.approx(150_000)
    assert code[0].epochs == code[1].epochs  # as many of each as there are
    assert cells[None, 0].epochs == cells[None, 0].asked == 0
    assert mix.missing == 0 and sum(each.asked for each in cells.values()) == pytest.approx(3e5)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_nan_is_null_in_cells(kind):
    values = pa.array([1.0, float("nan"), None, float("nan"), 2.5, None], kind)
    grades = pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([values])))
    mix = Mix.plan(pd.DataFrame({"grade": grades, "tokens": range(6)}), by="grade", tokens=10)
    counts = {cell: (each.rows, each.tokens) for cell, each in mix.cells.items()}
    assert counts == {(1,): (1, 0), (2.5,): (1, 4), (None,): (4, 11)}


def test_without_weights_all_cells_are_repeated_alike():
    frame = corpus()
    mix = plan(frame, tokens=2.5 * frame["tokens"].sum(), weights=None)
    assert {each.epochs for each in mix.cells.values()} == {2.5}


@pytest.mark.parametrize("topic", ["News", None])
def test_one_cell_is_repeated_as_often_as_asked(topic):
    frame = corpus().assign(topic=topic)
    mix = Mix.plan(frame, by="topic", tokens=2 * int(frame["tokens"].sum()))
    assert {cell: each.epochs for cell, each in mix.cells.items()} == {(topic,): 2.0}


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
            assert cell[0] in ("News", "Code")
    assert "tokens are missing, with at most 3 repeats" in caplog.text
    assert "are missing" in str(mix) and "are missing" in mix.html()


@pytest.mark.parametrize("npartitions", [1, 7, 100])
def test_neither_partitions_nor_order_change_anything(npartitions):
    frame = corpus(1_000)
    shuffled = frame.sample(frac=1, random_state=1)
    for rows in (frame, shuffled):
        dataset = dd.from_pandas(rows, npartitions=npartitions, sort=False)
        assert plan(dataset, tokens=60_000) == plan(frame, tokens=60_000)


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


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"weights": [{"topic": "Sport", "weight": 1}]}, "no row matches; cells are"),
        ({}, {"weights": [{"topc": "News", "weight": 1}]}, "values of"),
        ({}, {"weights": [{"topic": "News"}]}, "give a weight"),
        ({}, {"weights": [{"topic": "News", "weight": -1}]}, "0 or more"),
        ({}, {"weights": [{"topic": "News", "weight": 0}]}, "are all 0"),
        ({}, {"weights": []}, "or none"),
        ({}, {"weights": [*WEIGHTS, {"topic": "News", "weight": 1}]}, 'both match cell'),
        ({}, {"tokens": 0}, "tokens=0 must be above 0"),
        ({}, {"max_epochs": 0}, "max_epochs=0 must be"),
        ({}, {"max_epochs": 10**9}, "must be at most 1,000"),
        ({"tokens": 2**61}, {}, r"adds up to more than 2\*\*62 tokens"),
        ({}, {"by": "topik", "weights": None}, "Did you mean 'topic'"),
        ({}, {"by": "topik"}, r"values of \['topik'\] alone"),
        ({}, {"token_field": "n_tokens"}, "no column 'n_tokens'"),
        ({"tokens": 0.5}, {}, "weights are whole"),
        ({"tokens": -5}, {}, "0 or more"),
        ({"tokens": 0}, {}, "6,000 rows have no token in 'tokens'"),
        ({"tokens": pd.array([None] * 6_000, "Int64")}, {}, "6,000 rows have no token"),
        ({"topic": None}, {}, "no row matches; cells are null, 0, null, 1"),
        ({}, {"by": "id", "weights": None}, "more than 1,000 groups"),
        ({"weight": 1}, {"by": ["topic", "weight"], "weights": None}, "so rename the column"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(change, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plan(corpus().assign(**change), **options)


def test_a_mix_is_saved(tmp_path):
    path = tmp_path / "mix.json"
    mix = plan(corpus())
    mix.save(path)
    assert Mix.load(path) == mix
    path.write_text(path.read_text().replace('"max_epochs": 4', '"max_epochs": 5'))
    with pytest.raises(ValueError, match="another digest"):
        Mix.load(path)


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_the_command_counts_on_workers_and_leaves_out_broken_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame, whole = corpus(900), tmp_path / "crawl/1.jsonl"
    whole.parent.mkdir()
    for number in range(3):
        path = whole.with_name(f"{number}.jsonl")
        frame[number::3].to_json(path, orient="records", lines=True)
    with whole.open("a") as file:
        file.write('{"id": \n')
    words = ("mix", "crawl", "mix.json", "--by", "topic", "--by", "bucket", "--tokens", "6e4",
             "--workers", "1")  # fmt: skip
    expected = plan(frame, tokens=60_000, weights=None)
    done = run(*words, "--on-error", "quarantine", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(expected.as_json())
    assert Mix.load("mix.json") == expected
    assert run(*words).exit_code == 1


def test_the_command_prints_and_saves_the_mix(tmp_path, monkeypatch):
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
    options = ("--annotations", "notes", "--by", "topic", "--by", "bucket", "--tokens", "6e4",
               "--weights", "mix.yaml")  # fmt: skip
    mix = plan(frame, tokens=60_000)
    done = run("mix", "crawl", "mix.json", *options, "--page", "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == f"{mix}\nMix: mix.json\nPage: page.html"
    assert Path("page.html").read_text().count('class="name"') == 7
    assert Mix.load("mix.json") == mix
    done = run("mix", "crawl", "lack.json", *options, "--max-epochs", "1")
    assert Mix.load("lack.json").missing and done.output.count("tokens are missing") == 1
    for wrong, message in ((["--weights", "no.yaml"], "no.yaml"), (["--by", "topik"], "topi")):
        done = run("mix", "crawl", "more.json", *options, *wrong)
        assert done.exit_code == 2 and message in done.output
        assert not Path("more.json").exists()
