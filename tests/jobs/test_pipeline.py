"""Pipelines: input, output, refusals, and repeated runs."""

import gzip
import json
import pickle
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dask._dispatch import get_collection_type
from dask.dataframe.dask_expr._backends import dataframe_creation_dispatch
from dask.dataframe.dispatch import get_parallel_type, make_meta_dispatch
from distributed import Client

from gpuclassify import DomainClassifier, QualityClassifier, classify
from gpuclassify.jobs import execution
from gpuclassify.jobs.input import schema
from gpuclassify.jobs.input.readers import FileReader, JsonlReader, ParquetReader
from gpuclassify.jobs.input.schema import to_frame
from gpuclassify.jobs.ledger.manifest import CARD, REPORTS, JobChangedError
from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stages import Function, ToBackend
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.workers import secrets
from tests.replicas import sample_texts, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SECRET = "not-for-anybodys-eyes"


@pytest.fixture
def records():
    texts = [*sample_texts(40, seed=3), None, ""]
    return [{"id": row, "text": text, "more": [row]} for row, text in enumerate(texts)]


@pytest.fixture
def source(tmp_path, records):
    """JSON lines with several compressions, and one name twice."""
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    for folder in ("a", "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
    (tmp_path / "in/a/0.jsonl").write_bytes(b"".join(lines[:15]))
    (tmp_path / "in/a/1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[15:20])))
    (tmp_path / "in/b/0.jsonl").write_bytes(b"".join(lines[20:30]))
    with (
        pa.OSFile(str(tmp_path / "in/b/1.jsonl.zst"), "wb") as sink,
        pa.CompressedOutputStream(sink, "zstd") as stream,
    ):
        stream.write(b"".join(lines[30:]))
    (tmp_path / "in/b/2.jsonl").write_bytes(b"")
    return f"{tmp_path}/in/**/*.jsonl*"


def same(frame):
    return frame


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))


def read_parquet(folder):
    return pd.read_parquet(folder).sort_values("id", ignore_index=True)


# Output.


@pytest.mark.parametrize("backend", ["pandas", pytest.param("cudf", marks=pytest.mark.gpu)])
def test_a_job_gives_what_the_classifiers_give(
    domain, checkpoint, source, records, tmp_path, backend
):
    quality = QualityClassifier(model=checkpoint("quality"), autocast=False, filter_by=["High"])
    pipeline = Pipeline(
        [JsonlReader(source, fields=["text", "id"], part_bytes=500), same], backend=backend
    )
    pipeline.add_stage(domain(score_field="s")).add_stage(quality).add_stage(ToBackend("pandas"))
    summary = pipeline.add_stage(ParquetWriter(f"{tmp_path}/out")).run()
    frame = pd.DataFrame(records)[["text", "id"]].astype({"text": "str"})
    expected = quality(domain(score_field="s")(frame)).reset_index(drop=True)
    found = read_parquet(tmp_path / "out")
    assert 0 < len(found) < len(frame)
    pd.testing.assert_frame_equal(
        found.drop(columns="s"), expected.drop(columns="s"), check_dtype=False
    )
    for one, other in zip(found["s"], expected["s"], strict=True):
        assert one == pytest.approx(list(other), abs=1e-5)
    assert (summary.rows_read, summary.rows_written) == (42, len(expected))
    assert summary.columns["quality_pred"] == {"High": len(expected)}
    assert summary.totals["rows"] == 84  # of both classifiers
    assert sum(summary.lengths["text"].values()) == 41


class OnGpu:
    """Stand-in for a cudf frame that counts moves there and back."""

    copies = Counter()

    def __init__(self, frame):
        self.frame = frame
        self.columns = frame.columns
        self.iloc = self

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, key):
        return OnGpu(self.frame[key])

    @staticmethod
    def from_arrow(table):
        OnGpu.copies["up"] += 1
        return OnGpu(table.to_pandas())

    def to_arrow(self, preserve_index):
        OnGpu.copies["down"] += 1
        return pa.Table.from_pandas(self.frame, preserve_index=preserve_index)


class Seen(PartitionMap):
    """A stage that gets frames, and reads texts without moving them."""

    text_fields = ("text",)

    def check(self, frame):
        pass

    def meta(self, frame):
        return frame

    def map_frame(self, frame, meta_dtypes=None):
        assert isinstance(frame, OnGpu)
        return frame


def test_a_part_goes_to_the_gpu_and_back_once_and_only_for_stages_that_see_it(
    source, domain, tmp_path, monkeypatch
):
    monkeypatch.setattr(schema, "import_cudf", lambda: SimpleNamespace(DataFrame=OnGpu))
    OnGpu.copies.clear()
    reader = JsonlReader(source, fields=["text", "id"])

    def run(name, *stages):
        stages = [reader, *stages, ParquetWriter(f"{tmp_path}/{name}")]
        return Pipeline(stages, backend="cudf", source_field="id").run()

    classified = run("classified", domain(), ToBackend("pandas"), same)
    assert not OnGpu.copies
    seen = run("seen", Seen())
    assert OnGpu.copies == {"up": seen.parts, "down": seen.parts}
    assert sum(seen.lengths["text"].values()) == 41
    assert (seen.lengths, seen.sources) == (classified.lengths, classified.sources)


def test_missing_cudf_is_told_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudf", None)
    frame = pd.DataFrame({"text": ["a"]})
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpuclassify\[gpu]'"):
        to_frame(pa.table(frame), "cudf")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpuclassify\[gpu]'"):
        ToBackend("cudf").map_frame(frame)
    lazy = dd.from_pandas(frame, npartitions=1)
    for move in (ToBackend("cudf"), lambda ddf: classify(ddf, [ToBackend("cudf")])):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpuclassify\[gpu]'"):
            move(lazy)  # before anything is computed


class OfCudf(pd.DataFrame):
    """Stand-in for a cudf frame, whose library is recognized by name."""

    _constructor = property(lambda self: OfCudf)


OfCudf.__name__ = "DataFrame"
OfCudf.__module__ = "cudf.core"


class CudfOfDask:
    """Stand-in for the functions that dask_cudf registers."""

    @staticmethod
    def to_backend(frame):
        return frame.map_partitions(OfCudf, meta=OfCudf(frame._meta))


def test_moving_a_lazy_frame_tells_its_library_at_the_call(domain, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudf", SimpleNamespace(DataFrame=OfCudf))
    backend = "gpuclassify.frames.cudf"
    monkeypatch.setitem(sys.modules, backend, ModuleType(backend))
    monkeypatch.setitem(dataframe_creation_dispatch._lookup, "cudf", CudfOfDask())
    for dispatch in (get_collection_type, get_parallel_type, make_meta_dispatch):
        monkeypatch.setitem(dispatch._lookup, OfCudf, dispatch.dispatch(pd.DataFrame))
    lazy = dd.from_pandas(pd.DataFrame({"text": ["a", "b"]}), npartitions=2)
    for move in (ToBackend("cudf"), lambda ddf: classify(ddf, [Function(same), ToBackend("cudf")])):
        there = move(lazy)
        assert isinstance(there._meta, OfCudf)
        parts = dask.compute(*there.to_delayed(), scheduler="sync")
        assert all(isinstance(part, OfCudf) for part in parts)
        assert ToBackend("cudf")(there) is there
    assert ToBackend("pandas")(lazy) is lazy
    assert classify(lazy, [ToBackend("pandas")]) is lazy


@pytest.mark.parametrize("compression", [None, "gzip", "zstd"])
def test_json_lines_come_out_as_they_went_in(source, records, tmp_path, compression):
    writer = JsonlWriter(f"{tmp_path}/out", compression=compression)
    Pipeline([JsonlReader(source), same, writer]).run()
    found = FileReader(f"{tmp_path}/out")
    assert [file.path for file in found.find_parts().files] == sorted(
        f"{tmp_path}/out/{name}" for name in files(tmp_path / "out") if name.startswith("part-")
    )
    Pipeline([found, same, JsonlWriter(f"{tmp_path}/plain")]).run()
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "plain").glob("part-*"))
        for line in path.read_text().splitlines()
    ]
    assert sorted(lines, key=lambda record: record["id"]) == records


def test_parquet_goes_in_by_row_groups_and_comes_out_in_the_same_order(tmp_path):
    frame = pd.DataFrame({"text": [f"t{i}" for i in range(100)], "id": range(100)})
    (tmp_path / "in").mkdir()
    frame[:70].to_parquet(tmp_path / "in/a.parquet", row_group_size=10)
    frame[70:].to_parquet(tmp_path / "in/b.parquet", row_group_size=30)
    reader = ParquetReader(f"{tmp_path}/in", part_bytes=1)
    for files, options in ((8, {"output_bytes": 0}), (1, {})):
        writer = ParquetWriter(f"{tmp_path}/out-{files}", **options)
        summary = Pipeline([reader, same, writer]).run()
        assert len(summary.files) == files
        assert pd.concat(map(pd.read_parquet, summary.files))["id"].tolist() == list(range(100))


def test_urls_and_storage_options_work_and_stay_secret(records, tmp_path, caplog):
    options = {"key": SECRET}
    frame = pd.DataFrame(records)[["text", "id"]]
    frame.to_parquet("memory://secret/in/a.parquet")
    reader = ParquetReader("memory://secret/in/*.parquet", storage_options=options)
    writer = ParquetWriter("memory://secret/out", storage_options=options)
    pipeline = Pipeline([reader, same, writer])
    job = pipeline.prepare()
    summary = job.run()
    assert secrets.recall(job.spec.directory.options_name, {}) == options
    assert summary.files == [f"memory:///secret/out/{name}" for name in job.manifest.names()]
    assert len(pd.read_parquet(summary.files[0])) == 42
    shown = f"{pipeline} {reader} {writer} {job.spec} {summary} {caplog.text}"
    filesystem = writer.directory.filesystem
    written = b"".join(map(filesystem.cat_file, filesystem.find("/secret/out")))
    assert SECRET.encode() not in pickle.dumps(job.spec) + written + shown.encode()
    assert pipeline.run().resumed_parts == 1


def test_options_reach_workers_that_join_later(folder_of_two_parts):
    pipeline = Pipeline([JsonlReader(f"{folder_of_two_parts}/in"), same])
    writer = JsonlWriter(f"{folder_of_two_parts}/out", storage_options={"auto_mkdir": True})
    with Client(n_workers=1, processes=False, dashboard_address=None) as client:
        job = pipeline.add_stage(writer).prepare()
        job.run(client)
        secrets.remember(job.spec.directory.options_name, {})
        client.cluster.scale(2)
        client.wait_for_workers(2)
        assert secrets.recall(job.spec.directory.options_name, {}) == {"auto_mkdir": True}


@pytest.fixture
def folder_of_two_parts(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / f"in/{name}.jsonl").write_text('{"text": "river", "id": 1}\n')
    return tmp_path


def test_a_dask_frame_is_a_source_and_its_key_is_the_jobs_identity(domain, tmp_path):
    frame = pd.DataFrame({"text": sample_texts(30)}, index=[*range(15), *range(15)])
    lazy = dd.from_pandas(frame, npartitions=4, sort=False)
    writer = ParquetWriter(f"{tmp_path}/out", output_bytes=0)
    summary = Pipeline([lazy, domain(), writer]).run()
    found = pd.concat(map(pd.read_parquet, summary.files))
    pd.testing.assert_frame_equal(found, domain()(frame), check_dtype=False, check_names=False)
    assert Pipeline([lazy, domain(), writer]).run().resumed_parts == 4
    with Client(n_workers=1, processes=False, dashboard_address=None) as client:
        (tmp_path / "out" / Path(summary.files[2]).name).unlink()
        assert Pipeline([lazy, domain(), writer]).run(client).resumed_parts == 3
    other = dd.from_pandas(frame[:-1], npartitions=4, sort=False)
    with pytest.raises(JobChangedError, match="input Dask key was"):
        Pipeline([other, domain(), writer]).run()


def test_inputs_without_any_row_give_parts_without_any(tmp_path, domain):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "in/a.parquet")
    summary = Pipeline(
        [ParquetReader(f"{tmp_path}/in"), domain(), ParquetWriter(f"{tmp_path}/out")]
    ).run()
    assert pd.read_parquet(summary.files[0]).columns.tolist() == ["text", "domain_pred"]


def test_thousands_of_files_are_planned(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3_000):
        (tmp_path / f"in/{number:05d}.jsonl").write_bytes(b'{"text": "a"}\n')
    reader = JsonlReader(f"{tmp_path}/in", part_bytes=14)
    assert len(reader.find_parts().parts) == len(reader.find_parts().files) == 3_000


# Refusals before anything is written.


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "of 0 stages ends with nothing"),
        ([JsonlReader("in"), same], "ends with function"),
        (["in/*.jsonl", same, ParquetWriter("out")], "begins with a str: its first stage must be"),
        ([pd.DataFrame(), ParquetWriter("out")], "begins with a DataFrame"),
    ],
)
def test_a_pipeline_begins_with_a_reader_and_ends_with_a_writer(stages, words):
    with pytest.raises(TypeError, match=words):
        Pipeline(stages).run()


def wrong_without_rows(frame):
    return frame.assign(first=frame["text"].iloc[0])


def vary(frame):
    return frame.assign(more=1) if len(frame) else frame


def a_series(frame):
    return frame["text"]


@pytest.mark.parametrize(
    ("stage", "error", "words"),
    [
        (5, TypeError, "got a int as a stage"),
        (DomainClassifier, TypeError, r"got the class .*: write DomainClassifier\(\)"),
        (wrong_without_rows, ValueError, "wrong_without_rows fails for a frame without rows"),
        (a_series, ValueError, "returned a Series"),
        (vary, TypeError, r"returned columns .*'more'"),
        (DomainClassifier(model="./nowhere"), FileNotFoundError, "nowhere"),
        (DomainClassifier(model="m", text_field="txt"), ValueError, "no text column 'txt'"),
    ],
)
def test_stages_that_cannot_work_are_refused(folder_of_two_parts, stage, error, words):
    folder = folder_of_two_parts
    with pytest.raises(error, match=words):
        Pipeline([JsonlReader(f"{folder}/in"), stage, ParquetWriter(f"{folder}/out")]).run()
    assert stage is vary or not (folder / "out").exists()


def test_readers_and_writers_refuse_what_is_not_theirs(source, tmp_path):
    with pytest.raises(UnreadableInputError, match=r"ParquetReader got .*jsonl"):
        ParquetReader(source).find_parts()
    with pytest.raises(ValueError, match="compression='bz2'"):
        JsonlWriter("out", compression="bz2")
    with pytest.raises(ValueError, match="backend='cupy'"):
        Pipeline(backend="cupy")
    with pytest.raises(ValueError, match="Did you mean 'quarantine'"):
        Pipeline(on_error="quarantin")
    for reader in (f"{tmp_path}/in", f"{tmp_path}/**/*.jsonl"):
        with pytest.raises(ValueError, match="lies in the input"):
            Pipeline([JsonlReader(reader), same, JsonlWriter(f"{tmp_path}/in/out")]).run()
    with pytest.raises(ValueError, match="lies in the output directory"):
        Pipeline([JsonlReader(f"{tmp_path}/in/a"), same, ParquetWriter(f"{tmp_path}/in")]).run()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        Pipeline([JsonlReader(f"{tmp_path}/in"), same, ParquetWriter(f"{tmp_path}/file")]).run()


def test_an_output_in_the_input_is_seen_through_symbolic_links(source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "in")
    through, straight = f"{tmp_path}/link", f"{tmp_path}/in"
    for read, write in [(straight, through), (through, straight)]:
        for pattern in (read, f"{read}/**", f"{read}/*/*.jsonl"):
            with pytest.raises(ValueError, match="lies in the input"):
                Pipeline([FileReader(pattern), same, JsonlWriter(f"{write}/out")]).run()
    options = {"auto_mkdir": True}
    with pytest.raises(ValueError, match="lies in the input"):
        writer = JsonlWriter(f"{straight}/out", storage_options=options)
        Pipeline([FileReader(straight), same, writer]).run()
    assert not (tmp_path / "in/out").exists()


def test_a_client_that_is_none_is_refused(folder_of_two_parts):
    folder = folder_of_two_parts
    pipeline = Pipeline([JsonlReader(f"{folder}/in"), same, ParquetWriter(f"{folder}/out")])
    with pytest.raises(TypeError, match=r"got 'tcp://host:8786' as its client: pass a .*Client"):
        pipeline.run("tcp://host:8786")


# Running again.


@pytest.fixture
def finished(folder_of_two_parts, checkpoint):
    """A finished job in ``out``, and a function that makes it again, changed or not."""
    folder = folder_of_two_parts
    shutil.copytree(checkpoint("domain"), folder / "model")

    def make(stages=None, reader=None, writer=None, **options):
        classifier = DomainClassifier(model=folder / "model", autocast=False, **options)
        return Pipeline(
            [
                reader or JsonlReader(f"{folder}/in"),
                *(stages or [classifier]),
                writer or ParquetWriter(f"{folder}/out"),
            ]
        )

    make().run()
    return make


def test_a_finished_job_is_left_as_it_is(finished, folder_of_two_parts):
    out = folder_of_two_parts / "out"
    before = {name: (out / name).stat().st_mtime_ns for name in files(out)}
    seen = []
    summary = finished().run(report=lambda done, total, _: seen.append((done, total)))
    assert seen == [(2, 2)]
    assert (summary.resumed_parts, summary.resumed_rows, summary.rows_read) == (2, 2, 2)
    after = {name: (out / name).stat().st_mtime_ns for name in files(out)}
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"_gpuclassify/manifest.jsonl", CARD, *REPORTS}


def test_what_changed_is_named_and_nothing_mixes(finished, folder_of_two_parts):
    folder = folder_of_two_parts
    before = files(folder / "out")
    for change, words in [
        ({"filter_by": ["Games"]}, r"stage 1 DomainClassifier filter_by was None and is .*Games"),
        ({"stages": [same]}, "stage 1 DomainClassifier is gone; stage 1 same is new"),
        ({"reader": JsonlReader(f"{folder}/in", fields=["text"])}, "input columns was"),
        ({"writer": ParquetWriter(f"{folder}/out", compression="lz4")}, "compression was 'zstd'"),
        ({"writer": JsonlWriter(f"{folder}/out")}, "output format was 'parquet'"),
    ]:
        with pytest.raises(JobChangedError, match=rf"{words}.*start over"):
            finished(**change).run()
    write_checkpoint(folder / "other", "domain", seed=9)
    shutil.copy(folder / "other/model.safetensors", folder / "model/model.safetensors")
    with pytest.raises(JobChangedError, match=r"model_revision was 'sha256:.* and is 'sha256:"):
        finished().run()
    with (folder / "in/b.jsonl").open("a") as file:
        file.write('{"text": "oven", "id": 2}\n')
    for name in "cdefg":
        (folder / f"in/{name}.jsonl").write_text("")
    (folder / "in/a.jsonl").rename(folder / "moved.jsonl")
    words = (
        r"differs: stage 1 DomainClassifier max_chars was \d+ and is 7; "
        r".*input parts was 2 and is 6; "
        r"input files gone: 1 \(\S*in/a.jsonl\); "
        r"input files new: 5 \(\S*c.jsonl; \S*d.jsonl; \S*e.jsonl; and 2 more\); "
        r"input files changed: 1 \(\S*in/b.jsonl, which was '27 bytes, .*' and is '53 bytes, .*'\)"
    )
    with pytest.raises(JobChangedError, match=words):
        finished(max_chars=7).run()
    assert files(folder / "out") == before


def test_starting_over_removes_what_jobs_wrote_and_nothing_else(finished, folder_of_two_parts):
    out = folder_of_two_parts / "out"
    (out / "notes.txt").write_text("mine")
    first = set(files(out))
    summary = finished(stages=[same]).run(restart=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert summary.resumed_parts == 0
    assert sorted(out.glob("*.parquet")) == sorted(map(Path, summary.files))
    assert not {name for name in files(out) if name in first} - {
        "notes.txt", "_gpuclassify/job.json", "_gpuclassify/manifest.jsonl", CARD, *REPORTS
    }  # fmt: skip
    late = out / next(name for name in first if name.startswith("part-"))
    late.write_bytes(b"of an attempt of the first job that came late")
    assert finished(stages=[same]).run().resumed_parts == 2
    assert not late.exists()


def test_a_planned_job_is_told_that_another_run_has_started_over(finished):
    planned = finished().prepare()
    finished().run(restart=True)
    words = "another run of this job has started over in .*/out meanwhile.*: run the job again"
    with pytest.raises(JobChangedError, match=words) as caught:
        planned.run()
    assert "accept_changed_code" not in str(caught.value)
    assert finished().run().resumed_parts == 2


def test_tasks_go_on_when_workers_leave(monkeypatch):
    """More tasks than the workers that are left may have are then under way."""
    monkeypatch.setattr(execution, "LOOK_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(execution, "FEWEST_TASKS", 2)
    threads = iter([{"a": 20}])
    with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None) as one:
        monkeypatch.setattr(one, "nthreads", lambda: next(threads, {"a": 1}))
        found = [*execution.run_tasks(one, abs, [(-number,) for number in range(60)])]
    assert sorted(found) == [*range(60)]
