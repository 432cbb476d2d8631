"""Files of a web server: with ranges and without, that fail, and that change; and no secret."""

import contextlib
import gzip
import json
import logging
import re
import time

import aiohttp
import pandas as pd
import pytest
from distributed import Client

from gpuclassify.hub import calls
from gpuclassify.jobs.input.files import ChangedInputError
from gpuclassify.jobs.input.readers import FileReader, read_files
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.store import UnreadableInputError
from tests.hub_server import CUTS, Answer, HttpServer, RefusalError, cut_to, ranged_answer

SECRET = "Signature=c0ffee"
ROWS = pd.DataFrame({"id": range(2_000), "text": [f"text {n} " + "ü" * 50 for n in range(2_000)]})


class WebServer(HttpServer):
    """Files by their paths; `has_ranges` and `headers` say what the server knows."""

    def __init__(self):
        super().__init__()
        self.files, self.has_ranges, self.headers = {}, True, {"ETag": '"1"'}

    def _answer(self, call):
        if call.path not in self.files:
            raise RefusalError(404)
        if self.has_ranges:
            return ranged_answer(self.files[call.path], call, self.headers)
        return Answer(200, self.files[call.path], self.headers)


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)
    with WebServer() as server:
        lines = ROWS.to_json(orient="records", lines=True, force_ascii=False).encode()
        server.files["/a.jsonl"] = lines
        server.files["/a.jsonl.gz"] = gzip.compress(lines, mtime=0)
        server.files["/a.parquet"] = ROWS.to_parquet(row_group_size=200)
        yield server


def url(web, name):
    """As a store signs it."""
    return f"{web.url}/{name}?{SECRET}"


def same(frame):
    return frame


def job(web, name, out, **options):
    reader = FileReader(url(web, name), part_bytes=20_000, **options)
    return Pipeline([reader, same, ParquetWriter(f"{out}")], on_error="quarantine")


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_files_are_read_with_ranges_and_without(web, tmp_path, name, has_ranges):
    web.has_ranges = has_ranges
    summary = job(web, name, tmp_path / "out").run()
    found = pd.concat(map(pd.read_parquet, summary.files)).sort_values("id", ignore_index=True)
    assert found["id"].tolist() == ROWS["id"].tolist()
    assert found["text"].tolist() == ROWS["text"].tolist()
    is_cut = name == "a.parquet" or (has_ranges and name == "a.jsonl")
    assert (summary.parts > 5) == is_cut
    assert job(web, name, tmp_path / "out").run().resumed_parts == summary.parts


def test_a_page_leads_to_no_other_host_and_to_no_file_of_this_machine(web, tmp_path):
    (tmp_path / "secret.jsonl").write_text('{"id": 0, "text": "secret"}\n')
    with WebServer() as other:
        other.files["/b.jsonl"] = other.files["/dir/b.jsonl"] = web.files["/a.jsonl"]
        links = [
            "a.jsonl",
            f"{other.url}/b.jsonl",
            f"{other.url}/dir/b.jsonl",
            f"//{other.url.partition('//')[2]}/b.jsonl",
            f"file://{tmp_path}/secret.jsonl",
            f"{web.url}/dir/@{other.url.partition('//')[2]}/b.jsonl",
        ]
        page = "".join(f'<a href="{link}">x</a>' for link in links)
        web.files["/dir/"] = web.files["/dir"] = page.encode()
        web.files["/dir/a.jsonl"] = web.files["/a.jsonl"]
        web.headers |= {"Content-Type": "text/html"}
        reader = FileReader([f"{web.url}/dir/"], storage_options={"headers": {"X-Key": "secret"}})
        with contextlib.suppress(UnreadableInputError, OSError):
            reader.find_parts("whole")
        assert web.requests and other.requests == []


def test_files_of_no_byte_and_of_one(web):
    web.files |= {"/none.jsonl": b"", "/one.jsonl": b"\n"}
    names = [f"{web.url}/{name}.jsonl" for name in ("none", "one", "a")]
    assert len(read_files(names).compute()) == len(ROWS)


def hang():
    time.sleep(3)


def half():
    """The server goes in the middle of what it has promised."""
    refusal = RefusalError(200)
    refusal.answer = Answer(206, b"{", {"Content-Length": 1_000, "Connection": "close"})
    raise refusal


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_what_a_short_answer_lacks_is_asked_for_again(web, tmp_path, name, has_ranges, cut):
    web.has_ranges = has_ranges
    planned = job(web, name, tmp_path / "out").prepare()
    web.fail("GET", f"/{name}", *[CUTS[cut], None, None] * 4)
    summary = planned.run()
    assert sorted(pd.concat(map(pd.read_parquet, summary.files))["id"]) == ROWS["id"].tolist()
    assert not summary.left_out


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_server_may_answer_with_less_than_it_is_asked_for(web, tmp_path, name):
    web.fail("GET", f"/{name}", *[cut_to(4_000)] * 1_000)
    summary = job(web, name, tmp_path / "out").run()
    assert sorted(pd.concat(map(pd.read_parquet, summary.files))["id"]) == ROWS["id"].tolist()
    assert not summary.left_out


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_stays_cut_is_no_row_in_quarantine(web, tmp_path, name, has_ranges):
    web.has_ranges = has_ranges
    planned = job(web, name, tmp_path / "out").prepare()
    cut = CUTS["nothing" if has_ranges else "half"]
    web.fail("GET", f"/{name}", *[None] * has_ranges, *[cut] * 100)
    with pytest.raises(OSError, match=rf"{web.url}/{name}.*of the file's [\d,]+ bytes"):
        planned.run()
    assert not (tmp_path / "out/_SUCCESS").exists()


FAULTS = [
    (404, ChangedInputError, "is not what it was when the job began, it is gone"),
    (500, OSError, "ClientResponseError: 500"),
    (403, OSError, "ClientResponseError: 403"),
    ("drop", OSError, "ServerDisconnectedError"),
    (hang, TimeoutError, "TimeoutError"),
    (half, OSError, "ClientPayloadError"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("outcome", [500, 429, "drop", hang, half])
def test_a_server_that_fails_for_a_moment_is_asked_again(web, tmp_path, caplog, name, outcome):
    quickly = {"timeout": aiohttp.ClientTimeout(total=1)}
    planned = job(web, name, tmp_path / "out", storage_options={"client_kwargs": quickly}).prepare()
    web.fail("GET", f"/{name}", outcome, None, outcome, outcome)
    web.fail("HEAD", f"/{name}", 503, 503)
    summary = planned.run()
    found = pd.concat(map(pd.read_parquet, summary.files))
    assert sorted(found["id"]) == ROWS["id"].tolist()
    assert f"{web.url}/{name}: " in caplog.text
    assert "it is asked again" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(("outcome", "kind", "words"), FAULTS, ids=[str(f[2]) for f in FAULTS])
def test_a_server_that_fails_in_the_middle_is_told_and_the_job_goes_on(
    web, tmp_path, outcome, kind, words
):
    quickly = {"timeout": aiohttp.ClientTimeout(total=1)}

    def fail(done, total, summary):
        if done == 3:
            # The first request of a part asks whether there are ranges.
            web.fail("GET", "/a.jsonl", *[None] * (outcome != 404), *[outcome] * 12)
            if outcome == 404:
                web.fail("HEAD", "/a.jsonl", 404)

    options = {"storage_options": {"client_kwargs": quickly}}
    with pytest.raises(kind, match=words) as caught:
        job(web, "a.jsonl", tmp_path / "out", **options).run(report=fail)
    where = "" if outcome == 404 else r", from byte \d\d+: "
    assert re.search(f"{web.url}/a.jsonl{where}", str(caught.value))
    assert SECRET not in repr((caught.value, caught.value.__notes__))
    web._faults.clear()
    summary = job(web, "a.jsonl", tmp_path / "out", **options).run()
    assert summary.resumed_parts >= 3
    assert summary.rows_written + summary.resumed_rows >= len(ROWS)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_file_that_cannot_be_had_is_told_before_the_job(web, tmp_path, status):
    web.fail("HEAD", "a.jsonl", *[status] * 9)
    web.fail("GET", "a.jsonl", *[status] * 9)
    words = "no such input" if status == 404 else f"{status}.* Check address"
    with pytest.raises((UnreadableInputError, OSError), match=words) as caught:
        job(web, "a.jsonl", tmp_path / "out").run()
    assert SECRET not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"ETag": '"{}"'}, r"a\.jsonl is .*, it was written again"),
        ({"Last-Modified": "Thu, 0{} Jan 2026 00:00:00 GMT"}, r"a\.jsonl .*, it was written again"),
        ({}, r"has \d+ bytes and had \d+"),
    ],
    ids=str,
)
def test_a_file_that_changes_between_planning_and_reading(web, tmp_path, headers, words):
    web.headers = {name: value.format(1) for name, value in headers.items()}

    def change(done, total, summary):
        if done == 3:
            web.headers = {name: value.format(2) for name, value in headers.items()}
            web.files["/a.jsonl"] += b"" if headers else b"{}\n"

    with pytest.raises(ChangedInputError, match=words) as caught:
        job(web, "a.jsonl", tmp_path / "out").run(report=change)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("tag", ['"1"', None])
def test_a_digest_tells_other_bytes_at_the_end_whatever_the_server_says(web, tmp_path, tag):
    web.headers = {"ETag": tag} if tag else {}

    def change(done, total, summary):
        if done == 3:
            web.files["/a.jsonl"] = web.files["/a.jsonl"].replace(b"text 1", b"text 2")

    with pytest.raises(ChangedInputError, match="holds other bytes, as many as before"):
        job(web, "a.jsonl", tmp_path / "out", input_digest=True).run(report=change)
    assert not (tmp_path / "out/_SUCCESS").exists()
    reads = web.count("GET", "/a.jsonl")
    job(web, "a.jsonl", tmp_path / "new", input_digest=True).run()
    assert web.count("GET", "/a.jsonl") < reads + 100  # not all of it for each part


def failing(frame):
    if len(frame):
        raise RuntimeError("the stage failed")
    return frame


def test_a_signed_url_is_a_secret(web, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "gpuclassify")
    web.files["/broken.jsonl"] = web.files["/a.jsonl"] + b"no json\n"
    reader = FileReader(url(web, "broken.jsonl"), part_bytes=20_000)
    writer = ParquetWriter(f"{tmp_path}/out")
    with Client(n_workers=1, processes=False, dashboard_address=None) as client:
        Pipeline([reader, same, writer], on_error="quarantine").run(client)
        with pytest.raises(RuntimeError) as caught:
            other = ParquetWriter(f"{tmp_path}/no")
            Pipeline([reader, failing, other], on_error="quarantine").run(client)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert json.loads(next((tmp_path / "out/_quarantine").iterdir()).read_bytes())["offset"]
    told = repr((reader, caught.value, caught.value.__notes__))
    for secret in (SECRET, "c0ffee"):
        assert secret not in told
        assert secret not in caplog.text
        assert not any(secret.encode() in content for content in written)
