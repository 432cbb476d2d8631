"""Plans: what a sample tells of a job, against transformers' tokenizers and the whole input."""

import gzip
import json
import random
from contextlib import nullcontext
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify import AegisClassifier, DomainClassifier, FineWebEduClassifier, QualityClassifier
from gpuclassify.commands.plan import plan
from gpuclassify.inference.residency import MODELS
from gpuclassify.jobs.input.readers import FileReader, JsonlReader, ParquetReader
from gpuclassify.jobs.input.sample import MOST_PARTITIONS, sample_files
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.plan import time_range
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.pages import readable_time
from gpuclassify.workers import device_report
from gpuclassify.workers.machine import CpuLoad, LoadMeter
from gpuclassify.workers.run_context import collected_stats
from tests.hub_server import HubServer
from tests.oracle import plain_tokenizer
from tests.replicas import safety_template, sample_texts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
ROWS = 3_000
TEXTS = sample_texts(400, seed=5)


def make_rows(count, seed=0):
    """Documents of some hundred tokens; every fiftieth is null."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(TEXTS, k=rng.randint(1, 10))) for _ in range(count)]
    return [{"text": None if row % 50 == 9 else text, "id": row} for row, text in enumerate(texts)]


def lines(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The same rows in order of their ids: as JSON lines, packed, and Parquet."""
    folder, rows = tmp_path_factory.mktemp("corpus"), make_rows(ROWS)
    (folder / "jsonl").mkdir()
    (folder / "parquet").mkdir()
    for number in range(6):
        own = rows[number * 500 : number * 500 + 500]
        (folder / f"jsonl/{number}.jsonl").write_bytes(lines(own))
        pd.DataFrame(own).to_parquet(folder / f"parquet/{number}.parquet", row_group_size=60)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    return folder


def untimed(reader, *stages, **options):
    on_error = options.pop("on_error", "raise")
    return Pipeline([reader, *stages], on_error=on_error).plan(trial_seconds=None, **options)


@pytest.fixture(params=["jsonl", "packed", "parquet", "frame"])
def small(request, tmp_path):
    """A reader of 130 rows, and the rows."""
    own = make_rows(130, seed=1)
    frame = pd.DataFrame(own)
    if request.param == "parquet":
        frame.to_parquet(tmp_path / "in.parquet", row_group_size=40)
        return ParquetReader(f"{tmp_path}/in.parquet"), own
    if request.param == "frame":
        return dd.from_pandas(frame, npartitions=3), own
    packed = request.param == "packed"
    path = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
    path.write_bytes(gzip.compress(lines(own)) if packed else lines(own))
    return JsonlReader(str(path)), own


def test_tokens_are_those_of_the_models_own_tokenizer(small, checkpoint, tmp_path):
    reader, own = small
    path = checkpoint("fineweb-edu")
    classifier = FineWebEduClassifier(
        model=path, max_seq_length=96, max_chars=700, truncated_field="is_cut"
    )
    found = untimed(reader, classifier, ParquetWriter(f"{tmp_path}/out"), sample_rows=10_000)
    texts = [row["text"] for row in own if row["text"] is not None]
    tokenizer = plain_tokenizer(path)
    lengths = [len(ids) for ids in tokenizer([text[:700] for text in texts])["input_ids"]]
    assert (found.rows, found.is_exact) == (130, True)
    assert found.text_bytes == pytest.approx(sum(len(text.encode()) for text in texts))
    assert found.null_share == pytest.approx(3 / 130)
    (told,) = found.classifiers
    assert told.tokens == pytest.approx(np.minimum(lengths, 96).sum())
    assert told.mean_tokens == pytest.approx(np.mean(lengths))
    quantiles = np.quantile(lengths, [0.5, 0.95, 1], method="inverted_cdf").tolist()
    assert [told.median_tokens, told.p95_tokens, told.most_tokens] == quantiles
    assert told.limit_tokens == 96
    is_cut = classifier(pd.DataFrame(own))["is_cut"]
    assert told.truncated_share == pytest.approx(is_cut.sum() / len(texts))
    assert not (tmp_path / "out").exists()


def test_windows_of_long_texts_all_count(corpus, checkpoint):
    path, cut = checkpoint("quality"), {"max_seq_length": 64, "window_overlap": 10}
    classifier = QualityClassifier(model=path, long_text="windows", **cut)
    reader = ParquetReader(f"{corpus}/parquet/0.parquet")
    (told,) = untimed(reader, classifier, sample_rows=10_000).classifiers
    texts = [row["text"] for row in make_rows(ROWS)[:500] if row["text"] is not None]
    windows = plain_tokenizer(path)(
        texts, truncation=True, max_length=64, stride=10, return_overflowing_tokens=True
    )["input_ids"]
    assert told.tokens == pytest.approx(sum(map(len, windows)), rel=0.05)
    assert told.truncated_share == 0


def test_callables_decide_which_rows_reach_a_classifier(corpus, checkpoint):
    reader = ParquetReader(f"{corpus}/parquet")
    classifier = DomainClassifier(model=checkpoint("domain"))
    whole = untimed(reader, classifier, sample_rows=200).classifiers[0]

    def half(frame):
        return frame[frame["id"] % 2 == 0]

    kept = untimed(reader, half, classifier, sample_rows=200)
    assert kept.warnings == ()
    assert 0.35 < kept.classifiers[0].tokens / whole.tokens < 0.65

    def only_games(frame):
        return frame[frame["domain_pred"] == "Games"]

    edu = FineWebEduClassifier(model=checkpoint("fineweb-edu"))
    after = untimed(reader, classifier, only_games, edu, sample_rows=200)
    assert "only_games" in after.warnings[0]
    assert after.classifiers[1].tokens > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("jsonl", {"part_bytes": 20_000}), ("jsonl", {}), ("parquet", {}), ("packed.jsonl.gz", {})],
)
def test_samples_tell_the_whole_without_a_bias(corpus, name, options):
    source = FileReader(f"{corpus}/{name}", **options).find_parts()
    true = [ROWS, sum(len((row["text"] or "").encode()) for row in make_rows(ROWS))]
    estimates, draws = [], []
    for seed in range(10):
        # A compressed file is read to its end, one of lines in stretches.
        stretch_bytes = 4_000 if name == "jsonl" else 1 << 20
        sample, _ = sample_files(source, 150, seed, "raise", stretch_bytes=stretch_bytes)
        assert len(sample.frame) == 150
        assert sample.is_exact == (name != "jsonl")
        draws.append(set(sample.frame["id"]))
        assert name.endswith("gz") or {row // 300 for row in draws[-1]} == set(range(10))
        sizes = [len(text.encode()) for text in sample.frame["text"].fillna("")]
        estimates.append([sample.rows / true[0], sample.rows * np.mean(sizes) / true[1]])
    again, _ = sample_files(source, 150, seed, "raise", stretch_bytes=stretch_bytes)
    assert draws[-2] != draws[-1] == set(again.frame["id"])
    assert np.ptp(estimates, axis=0).max() < 0.5
    assert np.mean(estimates, axis=0) == pytest.approx([1, 1], abs=0.06)


def test_the_beginning_of_a_large_compressed_file_stands_for_it(corpus):
    source = FileReader(f"{corpus}/packed.jsonl.gz").find_parts()
    sample, _ = sample_files(source, 150, 0, "raise", stretch_bytes=16 << 10)
    assert sample.frame["id"].max() < ROWS / 2
    assert sample.rows == pytest.approx(ROWS, rel=0.2)
    assert (sample.pieces, sample.is_exact) == (1, False)


def test_partitions_of_a_dask_frame_are_sampled(checkpoint):
    frame = dd.from_pandas(pd.DataFrame(make_rows(ROWS)), npartitions=40)
    computed = []

    def note(part):
        if len(part):
            computed.append(int(part["id"].min()))
        return part

    frame = frame.map_partitions(note, meta=frame._meta)
    found = untimed(frame, DomainClassifier(model=checkpoint("domain")), sample_rows=80)
    assert len(computed) == MOST_PARTITIONS
    assert {first // (ROWS // 4) for first in computed} == {0, 1, 2, 3}
    assert found.rows == pytest.approx(ROWS, rel=0.05)
    assert found.parts == 40
    assert found.input_bytes is None


def test_long_lines_and_many_short_files_are_found(tmp_path):
    for number in range(150):
        (tmp_path / f"{number}.jsonl").write_bytes(lines([{"text": "word " * number}]))
    (tmp_path / "long").mkdir()
    (tmp_path / "long/a.jsonl").write_bytes(lines([{"text": "word " * 120_000}] * 6))
    found = untimed(JsonlReader(f"{tmp_path}/*.jsonl"))
    assert found.sample_rows >= 50
    assert 75 < found.rows < 300
    assert untimed(JsonlReader(f"{tmp_path}/long")).rows == 6


def test_the_stages_are_run_and_time_is_scaled_by_tokens(corpus, checkpoint):
    seen = []

    def note(frame):
        seen.append(set(frame.index))
        return frame

    classifiers = [
        DomainClassifier(model=checkpoint("domain"), autocast=False),
        FineWebEduClassifier(model=checkpoint("fineweb-edu"), autocast=False),
    ]
    pipeline = Pipeline([ParquetReader(f"{corpus}/parquet"), note, *classifiers])
    found = pipeline.plan(trial_seconds=1e6, sample_rows=40)  # all of it, however slow the machine
    tokens = sum(own.tokens for own in found.classifiers)
    assert found.time.unit == "tokens"
    assert found.time.seconds == pytest.approx(tokens / found.time.units_per_second)
    assert 0 < found.time.rows_timed <= len(set().union(*seen))
    assert found.worker_bytes > sum(own.weights_bytes for own in found.classifiers)
    shown = str(found)
    for words in ("in one process here", "tokens to read", "a worker"):
        assert words in shown
    assert json.loads(json.dumps(found.as_dict()))["rows"] == ROWS


LOAD = {"cores": 2, "usable_cores": 2, "other_cores": 1.5, "load_average": 8.0}


@pytest.mark.parametrize(
    ("runs", "load", "expected"),
    [
        ([(10, 1.0)] * 4, None, (10, 10, 10)),
        ([(10, 1.0), (10, 2.0), (20, 1.0)], None, (10, 5, 20)),
        ([(10, 1.0), (0, 3.0), (30, 4.0)], None, (20, 10, 20)),  # rows without text
        ([(0, 1.0)], None, (0, 0, 0)),
        # Idle and alone, as measured.
        ([(10, 1.0)], {"other_cores": 0.0, "load_average": 0.0}, (10, 10, 10)),
        # Three quarters of the cores were others': a quarter of the time without them, and five
        # times that with eight more at two cores.
        ([(10, 1.0)], {}, (10, 2.5, 12.5)),
        # Measured in a quiet moment of a busy hour.
        ([(10, 1.0)], {"other_cores": 0.0}, (10, 10, 50)),
        # One of eight cores may be used, and two are free.
        ([(10, 1.0)], {"cores": 8, "usable_cores": 1, "other_cores": 6.0}, (10, 10, 11.25)),
        # Others use all: no more than ten times as fast without them.
        ([(10, 1.0)], {"other_cores": 2.0, "load_average": 0.0}, (10, 1, 10)),
    ],
)
def test_the_time_is_a_range_from_an_idle_machine_to_a_busy_one(runs, load, expected):
    load = None if load is None else CpuLoad(**{**LOAD, **load})
    assert time_range(100, runs, load) == pytest.approx(expected)


def test_a_plan_tells_the_load_that_it_saw(corpus, checkpoint, monkeypatch):
    monkeypatch.setattr(LoadMeter, "read", lambda meter: CpuLoad(**LOAD))
    classifier = DomainClassifier(model=checkpoint("domain"), autocast=False)
    found = Pipeline([ParquetReader(f"{corpus}/parquet"), classifier]).plan(trial_seconds=0.1)
    shown, timed = " ".join(str(found).split()), found.time
    assert "used 1.5 of 2 cores meanwhile; the load average before was 8.0" in shown
    assert timed.fastest_seconds <= timed.seconds / 4 and timed.slowest_seconds > timed.seconds
    least, most = map(readable_time, (timed.fastest_seconds, timed.slowest_seconds))
    assert f"between {least} and {most}, of the models' work" in shown
    assert f"between {least} and {most})" in repr(found)
    assert json.loads(json.dumps(found.as_dict()))["time"]["load"] == LOAD


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_trial_leaves_in_this_process_the_models_that_were_there(corpus, checkpoint, error):
    MODELS.evict()
    resident = DomainClassifier(model=checkpoint("domain"), autocast=False)
    resident.setup()
    before, seen = MODELS.keys(), set()

    def look(frame):
        seen.update(MODELS.keys())
        if error is not None and len(seen) == 2:
            raise error
        return frame

    edu = FineWebEduClassifier(model=checkpoint("fineweb-edu"), autocast=False)
    pipeline = Pipeline([ParquetReader(f"{corpus}/parquet"), look, resident, edu])
    with nullcontext() if error is None else pytest.raises(error):
        pipeline.plan(trial_seconds=0.1, sample_rows=8)
    assert (len(before), len(seen)) == (1, 2)
    assert MODELS.keys() == before


def test_prompts_count_as_they_are_run_and_weights_of_a_shared_decoder_once(
    safety_models, tmp_path
):
    frame = pd.DataFrame({"text": sample_texts(30)})
    frame.to_parquet(tmp_path / "in.parquet")
    reader = ParquetReader(f"{tmp_path}/in.parquet")
    shared = {"base_model": safety_models.base, "template": safety_template()}
    first = AegisClassifier(model=safety_models.defensive, label_field="a", **shared)
    second = AegisClassifier(model=safety_models.permissive, label_field="b", **shared)
    one, two = untimed(reader, first), untimed(reader, first, second)
    base = (Path(safety_models.base) / "model.safetensors").stat().st_size
    assert 0 < two.worker_bytes - one.worker_bytes < base
    with collected_stats() as runs:
        first(frame)
    assert one.classifiers[0].tokens == sum(run.tokens for run in runs)


def test_the_largest_part_is_told(corpus, checkpoint):
    classifier = DomainClassifier(model=checkpoint("domain"), score_field="scores")
    for most, rows in ((1, 500), (4, 2_000), (None, 3_000)):  # files of a part
        reader = ParquetReader(f"{corpus}/parquet", part_bytes=10**9, files_per_partition=most)
        found = untimed(reader, classifier, sample_rows=100)
        assert (found.largest_part_rows, found.warnings) == (rows, ())


def test_broken_files_and_lines_stop_a_plan_or_are_counted(tmp_path, checkpoint):
    own = lines(make_rows(60)) + b'{"text": 5}\n'
    (tmp_path / "a.jsonl").write_bytes(own)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(own)[:-40])
    classifier = DomainClassifier(model=checkpoint("domain"))
    with pytest.raises(UnreadableInputError, match=r"b\.jsonl\.gz"):
        untimed(JsonlReader([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl.gz"]), classifier)
    found = untimed(JsonlReader(str(tmp_path)), classifier, on_error="quarantine")
    assert found.left_out == {"line": 1, "file": 1}
    pd.DataFrame(make_rows(60)).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:500])
    found = untimed(ParquetReader(f"{tmp_path}/*.parquet"), classifier, on_error="quarantine")
    assert found.left_out == {"file": 1}
    assert found.rows == 60


def test_inputs_without_rows_are_refused_and_without_any_text_planned(tmp_path, checkpoint):
    classifier = DomainClassifier(model=checkpoint("domain"), autocast=False)
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(UnreadableInputError, match="neither rows nor columns"):
        untimed(JsonlReader(str(tmp_path)), classifier)
    empty = pd.DataFrame({"text": pd.Series([], dtype="str")})
    empty.to_parquet(tmp_path / "a.parquet")
    for reader in (ParquetReader(f"{tmp_path}/a.parquet"), dd.from_pandas(empty, npartitions=1)):
        with pytest.raises(UnreadableInputError, match="no rows to plan"):
            untimed(reader, classifier)
    pd.DataFrame({"text": pd.Series([None] * 5, dtype="str")}).to_parquet(tmp_path / "n.parquet")
    found = Pipeline([ParquetReader(f"{tmp_path}/n.parquet"), classifier]).plan(trial_seconds=0.1)
    assert (found.null_share, found.time.unit) == (1, "rows")
    assert found.classifiers[0].tokens == 0
    assert "100.0% of the rows without text" in str(found)
    with pytest.raises(TypeError, match="no stages"):
        Pipeline([]).plan()
    for setting in ({"sample_rows": 0}, {"seed": -1}):
        [(name, value)] = setting.items()
        with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
            Pipeline([ParquetReader(f"{tmp_path}/a.parquet"), classifier]).plan(**setting)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(plan, [*map(str, words)], obj={"debug": False})


def test_the_command_shows_a_plan_and_writes_nothing(run, corpus, checkpoint, tmp_path):
    words = ["--classifier", "domain", "--model", checkpoint("domain"), "--sample-rows", 60]
    done = run(f"{corpus}/parquet", *words, "--no-time", "--max-seq-length", 500)
    assert done.exit_code == 0, done.output
    assert "3,000 rows" in done.stdout
    assert "not read to their end (limit 500 tokens, 2,000 characters)" in done.stdout
    told = json.loads(run(f"{corpus}/parquet", *words, "--no-time", "--json").stdout)
    assert (told["rows"], told["time"]) == (ROWS, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("times", "settings", "is_told"),
    [(4.1, (), True), (1.1, (), False), (4.1, ("--dtype", "float32"), False)],
)
def test_a_plan_tells_of_bfloat16_where_it_is_faster_and_nobody_chose(
    run, corpus, checkpoint, monkeypatch, times, settings, is_told
):
    monkeypatch.setattr(device_report, "bfloat16_speed_up", lambda: times)
    monkeypatch.setattr(device_report, "_seconds_to_hint", 0.0)  # as after models that are not tiny
    words = ["--classifier", "domain", "--model", checkpoint("domain"), "--sample-rows", 20]
    done = run(f"{corpus}/parquet", *words, *settings)
    assert done.exit_code == 0, done.output
    assert ("matrices 4.1 times as fast" in " ".join(done.stdout.split())) is is_told


def test_without_weights_everything_but_the_time_is_told(run, corpus, checkpoint, tmp_path):
    for path in checkpoint("domain").rglob("*.json"):
        copy = tmp_path / "model" / path.relative_to(checkpoint("domain"))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    words = [f"{corpus}/parquet", "--classifier", "domain", "--model", "./model"]
    done = run(*words)
    assert (done.exit_code, "With --no-time" in done.output) == (2, True)
    told = json.loads(run(*words, "--no-time", "--json", "--sample-rows", 60).stdout)
    (classifier,) = told["classifiers"]
    assert classifier["weights_bytes"] is told["worker_bytes"] is None
    assert classifier["tokens"] > 0


def test_no_weights_are_fetched_for_a_plan_without_time(corpus, checkpoint, run_python, tmp_path):
    path = checkpoint("domain")
    held = [found for found in path.rglob("*") if found.is_file()]
    files = {found.relative_to(path).as_posix(): found.read_bytes() for found in held}
    weights = len(files["model.safetensors"])
    with HubServer(tokens=[]) as server:
        server.add("acme/domains", files)
        script = f"""
from click.testing import CliRunner
from gpuclassify.commands.plan import plan
words = ["{corpus}/parquet", "--classifier", "domain", "--model", "acme/domains", "--no-time",
         "--json", "--sample-rows", "60"]
print(CliRunner().invoke(plan, words, obj={{"debug": True}}, catch_exceptions=False).stdout)
"""
        home = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        (told,) = json.loads(run_python(script, **home))["classifiers"]
        # Of which tokenizer.json is larger than these small weights.
        asked = [each for each in server.requests if "tokenizer" not in each.path]
    assert told["weights_bytes"] > weights / 3  # in bfloat16, or in float32
    assert 0 < max(request.sent_bytes for request in asked) < weights


def test_options_and_files_of_settings_are_those_of_a_job(run, corpus, checkpoint, tmp_path):
    words = [f"{corpus}/parquet", "--classifier", "domain", "--model", checkpoint("domain")]
    assert run(*words, "--max-seq-length", 32, "--dump-config", "job.yaml").exit_code == 0
    done = run("--config", "job.yaml", "--no-time", "--json", "--sample-rows", 60)
    assert json.loads(done.stdout)["classifiers"][0]["limit_tokens"] == 32
    done = run(*words[:1], "out", *words[1:])
    assert (done.exit_code, "leave out OUTPUT" in done.output) == (2, True)
    done = run(*words[1:])
    assert (done.exit_code, "a job needs input" in done.output) == (2, True)
