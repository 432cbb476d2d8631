"""An S3 store as input and output; moto answers, and boto3 is the oracle."""

import functools
import gzip
import hashlib
import json
import logging

import job_faults as faults
import numpy as np
import pandas as pd
import pytest

from gpuclassify import Deduplicate, ExactDuplicates, to_parquet
from gpuclassify.jobs.input.files import (
    ChangedInputError,
    check_unchanged,
    find_files,
    with_digests,
)
from gpuclassify.jobs.input.readers import JsonlReader, ParquetReader, read_files
from gpuclassify.jobs.ledger.manifest import CARD
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError, UnsupportedStorageError
from tests.hub_server import CUTS, Answer, RefusalError, cut_to


def job(prefix, stage=faults.double, **options):
    return faults.job(prefix, stage, 16_000, **options)


def tags(bucket, prefix):
    """Names and ETags of the output's files."""
    return {path: info["ETag"] for path, info in bucket.find(f"{prefix}/out", detail=True).items()}


def conflict():
    refusal = RefusalError(409)
    body = b"<Error><Code>ConditionalRequestConflict</Code><Message>again</Message></Error>"
    refusal.answer = Answer(409, body, {"Content-Type": "application/xml"})
    raise refusal


@pytest.mark.parametrize(
    "outcome", ["drop", 503, 412, conflict], ids=["drop", "503", "412", "conflict"]
)
def test_an_attempt_knows_whether_it_counts_whatever_the_store_answers(store, outcome):
    """A lost answer, a busy store, various refusals, a conflict."""
    directory = open_store(f"s3://{store.bucket}/create-{outcome}")
    store.fail("PUT", f"create-{outcome}/mine", outcome)
    assert directory.create("mine", b"1", "")
    assert not directory.create("mine", b"2", "")
    store.fail("PUT", f"create-{outcome}/mine", outcome)
    assert not directory.create("mine", b"2", "")
    assert directory.read("mine") == b"1"


def test_a_store_without_conditional_writes_is_refused(store, bucket):
    """The probe looks missing whenever it is to be created."""
    directory = open_store(f"s3://{store.bucket}/out")
    store.fail("PUT", "/out/.probe", None, functools.partial(store.remove, "out/.probe"))
    with pytest.raises(UnsupportedStorageError, match=r"s3://documents/out .* two attempts"):
        directory.check_creates("attempts")


def test_a_finished_job_changes_nothing_and_another_removes_its_own_alone(bucket, prefix):
    job(prefix).run()
    first = tags(bucket, prefix)
    assert job(prefix).run().resumed_parts == 6
    again = tags(bucket, prefix)
    reports = {path for path in first if "/_report/" in path}
    assert {path for path in {**first, **again} if first.get(path) != again.get(path)} <= reports
    bucket.pipe(f"{prefix}/out/notes.txt", b"mine")
    bucket.pipe(f"{prefix}/out/_gpuclassify/records/mine.json", b"mine")
    summary = job(prefix, faults.with_process).run(restart=True)
    found = set(tags(bucket, prefix))
    parts = {path for path in found if path.endswith(".parquet")}
    assert parts == {path.removeprefix("s3://") for path in summary.files}
    assert not parts & set(first)
    assert {path.rpartition("/")[2] for path in found} >= {"notes.txt", "mine.json"}


@pytest.mark.parametrize("cut", [*CUTS, "all capped"])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_what_a_short_answer_lacks_is_asked_for_again(store, bucket, monkeypatch, cut, kind):
    monkeypatch.setattr("gpuclassify.hub.calls.FIRST_WAIT_SECONDS", 0.01)
    prefix = f"s3://{store.bucket}/short-{cut}-{kind}".replace(" ", "-")
    rows = pd.DataFrame({"id": range(2_000), "text": [f"text {n} " * 9 for n in range(2_000)]})
    content = rows.to_json(orient="records", lines=True).encode()
    content = gzip.compress(content) if kind == "jsonl.gz" else content
    bucket.pipe(f"{prefix}/a.{kind}", rows.to_parquet() if kind == "parquet" else content)
    ddf = read_files([f"{prefix}/a.{kind}"], part_bytes=20_000)
    capped = cut_to(3_000, **{"x-amz-checksum-crc32": None})
    outcomes = [capped] * 999 if cut == "all capped" else [CUTS[cut], None] * 4
    stored = hashlib.sha256(bucket.cat(f"{prefix}/a.{kind}")).hexdigest()
    store.fail("GET", f"{prefix[5:]}/a.{kind}", *outcomes)
    assert sorted(ddf.compute()["id"]) == [*range(2_000)]
    store.fail("GET", f"{prefix[5:]}/a.{kind}", *outcomes)
    assert open_store(prefix).digest(f"a.{kind}") == stored


def test_formats_ranges_and_quarantine(store, bucket, tmp_path):
    chance = np.random.default_rng(0)
    texts = [chance.bytes(99).hex() for _ in range(9_000)]
    frame = pd.DataFrame({"id": range(9_000), "text": texts})
    lines = frame.to_json(orient="records", lines=True).encode()
    prefix = f"s3://{store.bucket}/formats"
    bucket.pipe(f"{prefix}/a.jsonl", lines + b"no json\n")
    bucket.pipe(f"{prefix}/a.parquet", frame.to_parquet(row_group_size=1_000))
    for reader in (JsonlReader, ParquetReader):
        suffix = reader.file_format
        before = len(store.requests)
        source = reader(f"{prefix}/a.{suffix}", part_bytes=200_000)
        writer = ParquetWriter(f"{prefix}/{suffix}")
        summary = Pipeline([source, same, writer], on_error="quarantine").run()
        sent = [r for r in store.requests[before:] if r.method == "GET" and "/a." in r.path]
        assert {request.status for request in sent} == {206}
        # Samples and the ends of lines come on top.
        assert sum(request.sent_bytes for request in sent) < 5 * len(lines)
        found = pd.concat(pd.read_parquet(bucket.open(path)) for path in summary.files)
        assert found.sort_values("id")["text"].tolist() == frame["text"].tolist()
        assert sum(summary.left_out.values()) == (suffix == "jsonl")
    [problems] = bucket.ls(f"{prefix}/jsonl/_quarantine")
    assert json.loads(bucket.cat(problems))["offset"] == len(lines)


def same(frame):
    return frame


def wrong_region():
    refusal = RefusalError(400)
    body = (
        b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-east-1' is "
        b"wrong; expecting 'eu-west-1'</Message></Error>"
    )
    refusal.answer = Answer(400, body, {"Content-Type": "application/xml"})
    raise refusal


WRONG = [
    ({"secret": "n0t-this"}, "PermissionError: The request signature .* does not match"),
    ({"key": "AKIAUNKNOWN"}, "PermissionError: The AWS Access Key Id .* does not exist"),
    ({"profile": "unknown"}, "ProfileNotFound: .*unknown"),
]


@pytest.mark.parametrize(
    ("change", "words"), WRONG, ids=[next(iter(options)) for options, _ in WRONG]
)
def test_wrong_credentials_are_told(store, prefix, tmp_path, change, words):
    options = {**store.options, **change}
    match = (
        rf"^s3://documents/.*: {words}.*Check .*credentials: storage_options= gives endpoint_url"
    )
    reader = JsonlReader(f"{prefix}/in/*.jsonl", storage_options=options)
    with pytest.raises(OSError, match=match) as caught:
        Pipeline([reader, same, ParquetWriter(f"{tmp_path}/out")]).run()
    assert options["secret"] not in str(caught.value)
    faults.write_input(tmp_path / "here")
    writer = ParquetWriter(f"{prefix}/out", storage_options=options)
    with pytest.raises(OSError, match=r"^s3://documents/.*/out: .*Check .*credentials"):
        Pipeline([JsonlReader(f"{tmp_path}/here/*.jsonl"), same, writer]).run()


def test_wrong_buckets_regions_and_addresses_are_told(store, bucket, prefix):
    with pytest.raises(UnreadableInputError, match="no such input: s3://nothing/"):
        job("s3://nothing").run()
    reader = JsonlReader(f"{prefix}/in/*.jsonl")
    with pytest.raises(FileNotFoundError, match=r"/out: .*bucket does not exist\..*Check"):
        Pipeline([reader, same, ParquetWriter("s3://nothing/out")]).run()
    assert not bucket.exists("s3://nothing")  # a typo creates no bucket
    store.fail("GET", ".*", *[wrong_region] * 9)
    store.fail("HEAD", ".*", *[wrong_region] * 9)
    with pytest.raises(OSError, match=r"region 'us-east-1' is wrong; expecting 'eu-west-1'.*Check"):
        job(prefix).run()
    store._faults.clear()


def test_no_secret_is_written_logged_or_shown(store, bucket, prefix, caplog):
    caplog.set_level(logging.DEBUG, "gpuclassify")
    options = store.options
    reader = JsonlReader(f"{prefix}/in/*.jsonl", storage_options=options, part_bytes=16_000)
    writer = ParquetWriter(f"{prefix}/out", storage_options=options)
    pipeline = Pipeline([reader, faults.double, writer])
    summary = pipeline.run()
    store.fail("PUT", "/other/part-", *[403] * 9)
    other = ParquetWriter(f"{prefix}/other", storage_options=options)
    with pytest.raises(PermissionError) as caught:
        Pipeline([reader, faults.double, other]).run()
    store._faults.clear()
    written = [bucket.cat(path) for path in bucket.find(prefix)]
    shown = repr((reader, writer, pipeline, summary, caught.value, caught.value.__notes__))
    for secret in (options["key"], options["secret"]):
        assert secret not in shown
        assert secret not in caplog.text
        assert not any(secret.encode() in content for content in written)


@pytest.mark.slow
def test_rows_in_folders_are_there_once_and_are_mended(prefix, bucket):
    reader = JsonlReader(f"{prefix}/in/*.jsonl", part_bytes=16_000)
    writer = ParquetWriter(f"{prefix}/out", partition_by="remainder", output_bytes=0)
    made = Pipeline([reader, faults.with_remainder, writer])
    summary = made.run()
    files = sorted(bucket.glob(f"{prefix}/out/remainder=*/*.parquet"))
    assert [f"s3://{path}" for path in files] == summary.files
    before = tags(bucket, prefix)
    bucket.rm_file(files[1])
    again = made.run()
    assert summary.parts - again.resumed_parts == 1
    after = tags(bucket, prefix)
    assert {path: after[path] for path in files} == {path: before[path] for path in files}
    assert not bucket.find(f"{prefix}/out/_gpuclassify/whole")
    found = read_files(f"{prefix}/out").compute()
    assert sorted(found["id"]) == [n for n in range(600) if n % 3]
    assert (found["remainder"] == found["id"] % 7 % 3).all()


def test_digests_of_input_are_the_tags_of_its_objects(prefix, store, bucket):
    """Every write changes the tag, so that nothing is read."""
    url = f"{prefix}/in/a.jsonl"
    bucket.pipe_file(url, b'{"text": "a"}\n')
    found = find_files([url], {})
    reads = store.count("GET", "a.jsonl")
    assert with_digests(found, {}) == found
    check_unchanged(found[0], {}, is_last=True)
    assert store.count("GET", "a.jsonl") == reads
    bucket.pipe_file(url, b'{"text": "b"}\n')
    with pytest.raises(ChangedInputError, match="was written again"):
        check_unchanged(found[0], {})


@pytest.mark.parametrize("name", ["run[1]", "star*", "what?", "[!a]?*"])
def test_names_that_look_like_patterns_are_names(store, bucket, prefix, name):
    """The pattern would match the output next to it, which stays unchanged."""
    other = f"{prefix}/runs/run1-star-whats-bb"
    bucket.pipe(f"{other}/mine.parquet", b"mine")
    out = f"{prefix}/runs/{name}"
    rows = [n for n in range(600) if n % 3]
    reader = JsonlReader(f"{prefix}/in/*.jsonl", part_bytes=16_000)
    for restart in (False, True):
        summary = Pipeline([reader, faults.double, ParquetWriter(out)]).run(restart=restart)
    assert sorted(read_files(summary.files).compute()["id"]) == rows
    assert sorted(read_files(out).compute()["id"]) == rows
    assert bucket.exists(f"{out}/_SUCCESS")
    assert bucket.exists(f"{out}/_gpuclassify/manifest.jsonl")
    found = bucket.find(out)
    assert [path.rpartition("/")[2] for path in found if "/." in path] == [CARD]
    assert {path.rpartition("/")[2] for path in found if path.endswith(".parquet")} == {
        path.rpartition("/")[2] for path in summary.files
    }
    frame = read_files(f"{prefix}/in")
    for overwrite in (False, True):
        written = to_parquet(frame, f"{out}-frame", overwrite=overwrite)
    assert sorted(bucket.find(f"{out}-frame")) == sorted(written)
    assert len(read_files(f"{out}-frame").compute()) == 600
    clean = ParquetWriter(f"{out}-clean")
    for restart in (False, True):
        found = Deduplicate(reader, ExactDuplicates(id_field="id"), clean).run(restart=restart)
    assert found.removal.rows_written == 600
    assert bucket.cat(f"{other}/mine.parquet") == b"mine"
