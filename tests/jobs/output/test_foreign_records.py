"""Files in an output affect nothing outside of it: no name or link leads out."""

import hashlib
import json
import os
import shutil

import pandas as pd
import pytest

from gpuclassify import JsonlReader, ParquetReader, ParquetWriter, Pipeline, read_files
from gpuclassify.jobs.ledger.manifest import manifest_of
from gpuclassify.jobs.ledger.records import sealed
from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.stores.opening import open_store

pytestmark = pytest.mark.contract


def same(frame):
    return frame


def job(folder, out="out", by="k"):
    reader = ParquetReader(f"{folder}/in", part_bytes=1)
    writer = ParquetWriter(f"{folder}/{out}", partition_by=by, output_bytes=0)
    return Pipeline([reader, same, writer])


@pytest.fixture
def outputs(tmp_path):
    """An output, and another one of the same job."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        frame = pd.DataFrame({"id": range(4), "k": [1, 2, 1, 2], "text": f"text {number}"})
        frame.to_parquet(tmp_path / f"in/{number}.parquet")
    for out in ("out", "other"):
        job(tmp_path, out).run()
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite(path, change):
    """Change a file of the metadata, and seal it as a job does."""
    values = json.loads(path.read_text())
    values.pop("sha256")
    change(values)
    path.write_bytes(sealed(values))


def link_rows(out, other):
    shutil.rmtree(out / "k=1")
    (out / "k=1").symlink_to(other / "k=1")


def link_records(out, other):
    shutil.rmtree(out / "_gpuclassify/records")
    (out / "_gpuclassify/records").symlink_to(other / "_gpuclassify/records")


def link_scratch(out, other):
    shutil.rmtree(out / "_gpuclassify/attempts")
    (out / "_gpuclassify/attempts").symlink_to(other)


def link_description(out, other):
    (out / "_gpuclassify/job.json").unlink()
    (out / "_gpuclassify/job.json").symlink_to(other / "_gpuclassify/job.json")


@pytest.mark.parametrize("plant", [link_rows, link_records, link_scratch, link_description])
@pytest.mark.parametrize("restart", [False, True])
def test_links_in_an_output_lead_to_no_other(outputs, plant, restart):
    out, other = outputs / "out", outputs / "other"
    plant(out, other)
    keys = json.loads((other / "_gpuclassify/job.json").read_text())
    if plant is not link_description:
        described = out / "_gpuclassify/job.json"
        rewrite(described, lambda job: job.update(earlier=[keys["key"], *keys["earlier"]]))
    before = contents(other)
    with pytest.raises(ValueError, match=r"goes by the link .*remove it, or take another"):
        job(outputs).run(restart=restart)
    assert contents(other) == before


NAMES = ["../secret.txt", "{}/secret.txt", "link.txt", "sub/secret.txt", "pipe"]


@pytest.fixture
def planted(outputs):
    """Plant files outside of the output; return a function that changes a record."""
    out = outputs / "out"
    (outputs / "secret.txt").write_text('{"password": 1}\n')
    (out / "link.txt").symlink_to(outputs / "secret.txt")
    (out / "sub").symlink_to(outputs)
    os.mkfifo(out / "pipe")
    record = sorted((out / "_gpuclassify/records").iterdir())[0]
    return lambda change: rewrite(record, change)


@pytest.mark.parametrize("name", NAMES)
def test_a_report_shows_nothing_that_a_record_names_elsewhere(planted, outputs, name):
    named = name.format(outputs)
    planted(lambda record: record.update(quarantine={named: "0" * 64}))
    with pytest.raises(ValueError, match=r"leads out of it|by the link|neither a regular file nor"):
        write_report(open_store(f"{outputs}/out"))
    assert "password" not in (outputs / "out/_report/report.json").read_text()
    with pytest.raises(ValueError, match=r"leads out of it|by the link|neither a regular file nor"):
        manifest_of(open_store(f"{outputs}/out")).examine()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_elsewhere_is_read_written_or_removed_by_name(planted, outputs, name):
    directory, named = open_store(f"{outputs}/out"), name.format(outputs)
    before = contents(outputs)
    for call in (
        directory.read,
        directory.digest,
        directory.remove,
        directory.remove_folder,
        lambda each: directory.replace(each, b"other"),
    ):
        with pytest.raises(ValueError, match=r"no job wrote it so: remove it"):
            call(named)
    assert contents(outputs) == before


@pytest.mark.parametrize("name", ["../secret.txt", "link.txt"])
def test_nothing_elsewhere_is_uploaded(planted, outputs, name):
    from gpuclassify.jobs.output import hub_writer

    target = HubWriter("acme/books", staging=f"{outputs}/out").target
    file = hub_writer.StagedFile(name, "data/a.parquet", "0" * 64)
    with pytest.raises(ValueError, match="no job wrote it so"):
        hub_writer.upload(file, target, open_store(f"{outputs}/out"))


@pytest.mark.parametrize("key", ["../../x", "/etc/pas", "12345678/../a"])
def test_a_description_whose_key_is_none_is_damaged(outputs, key):
    rewrite(outputs / "out/_gpuclassify/job.json", lambda job: job.update(key=key))
    with pytest.raises(ValueError, match="is damaged, and not what a job wrote"):
        manifest_of(open_store(f"{outputs}/out"))


@pytest.mark.parametrize("parts", [10**12, -1])
def test_a_description_of_impossible_parts_is_damaged(outputs, parts):
    out = outputs / "out"
    rewrite(out / "_gpuclassify/job.json", lambda job: job.update(parts=parts))
    for look in (manifest_of, write_report):
        with pytest.raises(ValueError, match=r"job\.json is damaged"):
            look(open_store(str(out)))


def forge_code(code):
    return lambda job: job["identity"]["stage 1 same"].update(code=code)


DESCRIPTIONS = {
    **{
        f"code is {code!r:.30}": forge_code(code)
        for code in (None, 3, "x", [], [["class", "x"]], {"function": None}, {"numba": ["1"]})
    },
    "format is a path": lambda job: job["identity"]["output"].update(format="../../x"),
    "format is another": lambda job: job["identity"]["output"].update(format="exe"),
    "compression is none": lambda job: job["identity"]["output"].update(
        format="jsonl", compression="../x"
    ),
    "no format": lambda job: job["identity"]["output"].pop("format"),
    "output is text": lambda job: job["identity"].update(output="parquet"),
    "no identity": lambda job: job.pop("identity"),
    "no key": lambda job: job.pop("key"),
    "key is a number": lambda job: job.update(key=12345678),
    "parts are text": lambda job: job.update(parts="2"),
    "parts are a fraction": lambda job: job.update(parts=1.5),
    "parts are without end": lambda job: job.update(parts=float("inf")),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_of_which_no_names_can_be_made_is_damaged(outputs, name):
    rewrite(outputs / "out/_gpuclassify/job.json", DESCRIPTIONS[name])
    for look in (manifest_of, write_report):
        with pytest.raises(ValueError, match=r"out/_gpuclassify/job\.json is damaged"):
            look(open_store(f"{outputs}/out"))


@pytest.mark.parametrize(
    "code",
    [
        *({}, {"": ""}, {"class": "x" * 10**6}, {"a function": "\x1b[31m"}),
        *({"x" * 10**6: "1"}, {"\x1b[31m": "1"}, {"y" * 10**6 + " source": "\x00"}),
    ],
)
def test_forged_parts_of_code_are_told_in_short_and_never_taken(outputs, code):
    rewrite(outputs / "out/_gpuclassify/job.json", forge_code(code))
    with pytest.raises(ValueError, match="stage 1 same") as caught:
        job(outputs).run()
    assert len(str(caught.value)) < 3000 and "\x1b" not in str(caught.value)
    assert "accept_changed_code=True" in str(caught.value)


SEALED = {
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000,
    "a list": b"[1",
    "a huge number": b'{"a": 1' + b"0" * 5000,
    "no JSON": b"{",
}


@pytest.mark.parametrize("name", SEALED)
@pytest.mark.parametrize("file", ["job.json", "records"])
def test_sealed_content_that_is_no_object_is_damaged(outputs, name, file):
    path = outputs / "out/_gpuclassify" / file
    path = sorted(path.iterdir())[0] if path.is_dir() else path
    body = SEALED[name] + (b"]" if name == "a list" else b"}")
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(b'%s, "sha256": "%s"}' % (body[:-1], digest))
    if file == "job.json":
        with pytest.raises(ValueError, match=r"out/_gpuclassify/job\.json is damaged"):
            manifest_of(open_store(f"{outputs}/out"))
    else:
        recorded = manifest_of(open_store(f"{outputs}/out")).records()
        assert list(recorded.values()).count(None) == 1


def test_a_record_without_its_fields_is_damaged(outputs):
    record = sorted((outputs / "out/_gpuclassify/records").iterdir())[0]
    rewrite(record, lambda values: values.pop("digest"))
    recorded = manifest_of(open_store(f"{outputs}/out")).records()
    assert list(recorded.values()).count(None) == 1


@pytest.mark.parametrize(
    "folders", [None, [], {"k": "../x"}, {"k": ["int64"]}, {"k": 10**400}, "k", "absent"]
)
def test_types_of_folders_that_are_none_are_not_taken(tmp_path, folders):
    pd.DataFrame({"id": [1], "k": [1]}).to_parquet(tmp_path / "in", partition_cols=["k"])
    (tmp_path / "in/_gpuclassify").mkdir()
    content = {} if folders == "absent" else {"folders": folders}
    (tmp_path / "in/_gpuclassify/job.json").write_bytes(sealed(content))
    assert read_files(tmp_path / "in").compute()["k"].tolist() == [1]


@pytest.mark.parametrize("name", ["_lang", ".lang", "__k"])
def test_folders_that_readers_pass_over_are_refused(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", name: "de"}))
    writer = ParquetWriter(f"{tmp_path}/out", partition_by=["text", name])
    with pytest.raises(ValueError, match=rf"partition_by='{name}' .*pass over: give the column"):
        Pipeline([JsonlReader(f"{tmp_path}/a.jsonl"), same, writer]).prepare()
    assert not (tmp_path / "out").exists()


def test_a_description_beside_an_input_that_is_no_file_hangs_nothing(tmp_path):
    """Types of folders' columns are looked up there."""
    pd.DataFrame({"id": [1], "k": [1]}).to_parquet(tmp_path / "in", partition_cols=["k"])
    (tmp_path / "in/_gpuclassify").mkdir()
    os.mkfifo(tmp_path / "in/_gpuclassify/job.json")
    assert read_files(tmp_path / "in").compute()["k"].tolist() == [1]
