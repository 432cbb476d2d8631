"""Files of Hub repositories as input: pinned, with few requests, and with a token that stays."""

import io

import cloudpickle
import pandas as pd
import pytest
from hub_client import REPO, TOKEN, assert_clean
from job_faults import double

from gpuclassify.hub.calls import DatasetAccessError, DatasetMissingError
from gpuclassify.jobs.input.files import find_files
from gpuclassify.jobs.input.readers import JsonlReader, ParquetReader, read_files
from gpuclassify.jobs.ledger.manifest import JobChangedError
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.hub import hub_uri
from gpuclassify.jobs.stores.store import UnreadableInputError
from tests.hub_server import CUTS, File
from tests.processes import local_client

URL = f"hf://datasets/{REPO}"
FILES = 3


def contents(number, rows=400):
    """One file as JSON lines and as Parquet, with texts of several lengths."""
    ids = range(number * rows, (number + 1) * rows)
    frame = pd.DataFrame({"id": ids, "text": [f"text {i} " + "ü" * (i % 90) for i in ids]})
    parquet = io.BytesIO()
    frame.to_parquet(parquet, row_group_size=100)
    lines = frame.to_json(orient="records", lines=True, force_ascii=False).encode()
    return {
        f"lines/{number}.jsonl": File(lines),
        f"large/{number}.jsonl": File(lines, is_large=True),
        f"rows/{number}.parquet": File(parquet.getvalue(), is_large=True),
    }


@pytest.fixture
def repo(hub):
    files = {}
    for number in range(FILES):
        files |= contents(number)
    return hub.add(REPO, files)


@pytest.fixture
def options(hub):
    return {"endpoint": hub.url}


@pytest.mark.parametrize("part_bytes", [None, 3_000])
@pytest.mark.parametrize("pattern", ["lines/*.jsonl", "large", "*/*.parquet", "rows/1.parquet"])
def test_what_is_read_is_what_a_local_copy_holds(repo, options, tmp_path, pattern, part_bytes):
    for name, file in repo.tree().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(file.data)
    local = read_files([f"{tmp_path}/{pattern}"], part_bytes=part_bytes)
    ddf = read_files([f"{URL}/{pattern}"], part_bytes=part_bytes, storage_options=options)
    assert ddf.npartitions == local.npartitions
    pd.testing.assert_frame_equal(ddf.compute(), local.compute())


def test_a_part_of_lines_is_one_request_and_one_of_rows_two(hub, repo, options):
    for pattern, most in [("lines/*.jsonl", 1), ("large/*.jsonl", 1), ("rows", 1)]:
        hub.requests.clear()
        inputs = [f"{URL}/{pattern}", f"{URL}/{pattern}"]
        ddf = read_files(inputs, part_bytes=3_000, storage_options=options)
        api = hub.count("GET", "/api/") + hub.count("POST", "/api/")
        assert api <= 4, "a commit, the repository, and listings"
        assert hub.count("GET", "/resolve/") == FILES
        hub.requests.clear()
        ddf.compute()
        assert ddf.npartitions >= 2 * FILES
        assert hub.count("GET", "/api/") + hub.count("POST", "/api/") == 0
        assert hub.count("GET", "/resolve/") <= most * ddf.npartitions


def test_large_files_are_read_in_ranges(hub, repo, options, monkeypatch):
    monkeypatch.setattr("gpuclassify.jobs.stores.hub.WHOLE_FILE_BYTES", 1_000)
    monkeypatch.setattr("gpuclassify.jobs.stores.hub.AHEAD_BYTES", 1_000)
    monkeypatch.setattr("gpuclassify.jobs.input.parts.LINE_BYTES", 10)
    monkeypatch.setattr("gpuclassify.jobs.stores.hub.LINE_BYTES", 10)
    for pattern in ("large/*.jsonl", "rows/*.parquet"):
        ddf = read_files([f"{URL}/{pattern}"], part_bytes=3_000, storage_options=options)
        assert ddf.compute()["id"].tolist() == list(range(FILES * 400))
    assert {r.status for r in hub.requests if r.path.startswith("/store/")} == {206}


def test_a_revision_means_one_commit_from_planning_on(hub, repo, options):
    sha = repo.sha_of("main")
    ddf = read_files([f"{URL}/lines/*.jsonl", f"{URL}/large/*.jsonl"], storage_options=options)
    repo.commit({"lines/0.jsonl": File(b'{"id": 0, "text": "other"}\n')}, "all else is gone")
    assert len(ddf.compute()) == 2 * FILES * 400
    assert len(read_files([f"{URL}/lines"], storage_options=options).compute()) == 1
    for revision in (sha, sha.upper()):
        old = [f"{URL}@{revision}/lines/*.jsonl"]
        assert len(read_files(old, storage_options=options).compute()) == FILES * 400
        assert all(f"@{sha}/" in file.path for file in find_files(old, options))


def test_a_job_goes_on_at_its_commit_and_at_no_other(repo, options, tmp_path):
    repo.branches["refs/pr/1"] = [repo.sha_of("main")]

    def job(revision):
        url = f"{URL}@{revision}/lines/*.jsonl"
        reader = JsonlReader(url, part_bytes=9_000, storage_options=options)
        return Pipeline([reader, double, ParquetWriter(f"{tmp_path}/out")])

    first = job("main").run()
    sha = repo.sha_of("main")
    for same in (sha, sha.upper(), "refs/pr/1", "refs%2Fpr%2F1"):
        assert job(same).run().resumed_parts == first.parts
    repo.commit(repo.tree() | {"new.txt": File(b"")}, "another commit")
    with pytest.raises(JobChangedError, match=repo.sha_of("main")):
        job("main").run()
    assert job(sha).run().resumed_parts == first.parts


def test_a_busy_hub_is_asked_again(hub, repo, options):
    hub.fail("GET", r"/api/datasets/acme/books/revision", 429, 503, Retry_After="0")
    hub.fail("GET", "/tree/", 503)
    hub.fail("GET", "/resolve/", 429, "drop", Retry_After="0")
    ddf = read_files([f"{URL}/large/*.jsonl"], storage_options=options)
    assert len(ddf.compute(scheduler="sync")) == FILES * 400
    assert sum(r.status in (429, 503) for r in hub.requests) == 4


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("pattern", ["large/*.jsonl", "rows/*.parquet"])
def test_what_a_short_answer_lacks_is_asked_for_again(hub, repo, options, pattern, cut):
    ddf = read_files([f"{URL}/{pattern}"], storage_options=options)
    hub.fail("GET", "/store/", *[CUTS[cut]] * 3)
    assert sorted(ddf.compute(scheduler="sync")["id"]) == list(range(FILES * 400))


def test_a_private_repository_is_read_on_workers_and_its_token_stays_in_memory(
    hub, repo, options, tmp_path
):
    repo.is_private = True
    secret = {**options, "token": TOKEN}
    with local_client(processes=True, threads_per_worker=2) as client:
        ddf = read_files([f"{URL}/large/*.jsonl"], part_bytes=9_000, storage_options=secret)
        assert len(client.compute(ddf).result()) == FILES * 400
        reader = ParquetReader(f"{URL}/rows", storage_options=secret)
        pipeline = Pipeline([reader, double, ParquetWriter(f"{tmp_path}/out")])
        assert pipeline.run(client).rows_read == FILES * 400
    held = [ddf.__dask_graph__(), ddf.optimize().expr, reader, pipeline, pipeline.prepare()]
    assert not any(TOKEN.encode() in cloudpickle.dumps(each) for each in held)
    assert TOKEN not in repr([reader, pipeline, reader.find_parts()])
    books = (tmp_path / "out/_gpuclassify").rglob("*.json*")
    assert not any(TOKEN in path.read_text() for path in books)
    assert "secret" not in (tmp_path / "out/_gpuclassify/job.json").read_text()
    stores = [request for request in hub.requests if request.path.startswith("/store/")]
    assert {request.host for request in stores} == {"localhost"}
    assert not any(request.has_token for request in stores)


def test_errors_name_the_cure_and_hold_no_secret(hub, repo, options, tmp_path):
    repo.is_private = True
    wrong = "hf_wrongwrongwrong"
    with pytest.raises(DatasetAccessError, match="pass a token with token=") as caught:
        read_files([f"{URL}/lines"], storage_options={**options, "token": wrong})
    sha = repo.sha_of("main")
    with pytest.raises(DatasetMissingError) as other:  # the listing's own errors
        read_files([f"{URL}@{sha}/lines"], storage_options=options)
    repo.is_private = False
    hub.fail("GET", "/tree/", 403)
    with pytest.raises(DatasetAccessError, match="403") as fourth:
        read_files([f"{URL}/large"], storage_options=options)
    hub.fail("GET", "/store/", 403)
    with pytest.raises(DatasetAccessError, match="403") as third:
        read_files([f"{URL}/large"], storage_options=options)
    for err in (caught.value, other.value, third.value, fourth.value):
        assert_clean(err, [wrong, "signature=secret"])
    with pytest.raises(DatasetMissingError, match="no such revision"):
        read_files([f"{URL}@v9/lines"], storage_options=options)
    with pytest.raises(UnreadableInputError, match=r"no such input: hf://.*nothing"):
        read_files([f"{URL}/nothing"], storage_options=options)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        (f"{URL}/a/*.jsonl", ("dataset", REPO, "main", "a/*.jsonl")),
        (f"{URL}@v1.0/a", ("dataset", REPO, "v1.0", "a")),
        (f"{URL}@refs/convert/parquet/a", ("dataset", REPO, "refs/convert/parquet", "a")),
        (f"{URL}@refs%2Fpr%2F3", ("dataset", REPO, "refs/pr/3", "")),
        ("hf://acme/model/a.jsonl", ("model", "acme/model", "main", "a.jsonl")),
        ("hf://buckets/acme/scratch/a.jsonl", None),
        ("s3://datasets/acme/books/a", None),
        ("books/a.jsonl", None),
    ],
)
def test_urls_are_taken_apart_and_put_together(url, parts):
    found = hub_uri(url)
    assert (found and (found.type, found.id, found.revision, found.path_in_repo)) == parts
    assert found is None or hub_uri(found.to_uri()) == found
