"""Annotation sets that somebody else wrote or damaged: read right, or refused by name."""

import json
import os
import shutil
import socketserver
import threading

import fsspec
import pandas as pd
import pytest

from gpuclassify import AnnotationWriter, FileReader, Pipeline, read_files
from gpuclassify.jobs.ledger.records import sealed
from gpuclassify.jobs.stores.store import UnreadableInputError

KINDS = ("parquet", "jsonl", "jsonl.gz")
TEXTS = ("one", "three", "a", "seventeen")


def with_length(frame):
    return frame.assign(length=frame["text"].str.len().astype("Int64"))


@pytest.fixture(params=KINDS)
def crawl(request, tmp_path):
    """Two files of four rows each, the first of them as two parts."""
    root = tmp_path / "crawl"
    root.mkdir()
    for name in ("a", "b"):
        path, frame = root / f"{name}.{request.param}", pd.DataFrame({"text": TEXTS})
        if request.param == "parquet":
            frame.to_parquet(path, row_group_size=2)
        else:
            frame.to_json(path, orient="records", lines=True)
    return root


@pytest.fixture
def notes(crawl, tmp_path):
    annotate(crawl, tmp_path / "notes")
    return tmp_path / "notes"


def annotate(crawl, notes):
    writer = AnnotationWriter(str(notes), output_bytes=0)  # a file for each part
    reader = FileReader(str(crawl), part_bytes=30)
    Pipeline([reader, with_length, writer]).run(report=lambda *_: None)


def rewrite(path, change, line=0):
    """Change a line of JSON in a file of the metadata, and seal it as a job does."""
    is_job = path.name == "job.json"
    lines = [path.read_text()] if is_job else path.read_text().splitlines()
    values = json.loads(lines[line])
    values.pop("sha256")
    change(values)
    lines[line] = sealed(values).decode()
    path.write_text("\n".join(lines) if is_job else "".join(f"{text}\n" for text in lines))


def outcome(crawl, notes, columns=("length",)):
    """The lengths that are read with these columns, or the error, which names the set."""
    try:
        frame = read_files(str(crawl), annotations=str(notes), part_bytes=30)
        return frame[[*columns]].compute()["length"].tolist()
    except (UnreadableInputError, ValueError, FileNotFoundError) as err:
        assert str(notes) in str(err), err
        return str(err)


RIGHT = [len(text) for text in TEXTS] * 2


# No host hears of a set's reader.


@pytest.fixture
def stranger():
    """A server of some host, and what it heard."""
    heard = []

    class Listener(socketserver.BaseRequestHandler):
        def handle(self):
            heard.append("a connection")
            self.request.settimeout(2)
            self.request.sendall(b"220 welcome\r\n")
            for answer in (b"331 password?\r\n", b"230 welcome\r\n"):
                heard.append(self.request.recv(1000).decode(errors="replace"))
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", heard
        server.shutdown()


@pytest.mark.parametrize("crawl", ["parquet"], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        "ftp://{host}/crawl/c.parquet",
        "http://{host}/crawl/c.parquet",
        "webhdfs://{host}/crawl/c.parquet",
        "zip://crawl/c.parquet::http://{host}/crawl.zip",
        "zip://crawl/c.parquet::ftp://{host}/crawl.zip",
        "simplecache::ftp://{host}/crawl/c.parquet",
        "sftp://{host}/crawl/c.parquet",
        "smb://{host}/crawl/c.parquet",
        "s3://crawl/c.parquet",
        "no-such-protocol://{host}/crawl/c.parquet",
        "memory://crawl/c.parquet",
        "",
        "/",
        "../crawl/c.parquet",
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_credentials_go_to_no_host_that_a_set_names(crawl, tmp_path, stranger, name, scheme):
    host, heard = stranger
    root = f"{scheme}{crawl}"
    for path in crawl.iterdir() if scheme == "memory://" else ():
        fsspec.filesystem("memory").pipe_file(str(path), path.read_bytes())
    notes = tmp_path / "notes"
    annotate(root, notes)

    def plant(job):
        job["identity"]["input file"][name.format(host=host)] = "4 bytes, 1.0"

    rewrite(notes / "_gpuclassify/job.json", plant)
    secrets = {"username": "me", "password": "secret", "user": "me"}
    for options in ({"annotations_complete": True}, {"annotations_complete": False}):
        frame = read_files(root, annotations=str(notes), storage_options=secrets, **options)
        assert frame.compute()["length"].tolist() == RIGHT
    assert not heard


@pytest.mark.parametrize("crawl", ["parquet"], indirect=True)
@pytest.mark.parametrize(
    "pattern", ["{root}", "{root}/*.parquet", "{root}/[a-c].parquet", "{link}"]
)
def test_files_that_are_gone_are_told_by_their_names(crawl, notes, tmp_path, pattern):
    (crawl / "b.parquet").unlink()
    (tmp_path / "link").symlink_to(crawl)
    inputs = pattern.format(root=crawl, link=tmp_path / "link")
    with pytest.raises(UnreadableInputError, match=r"b\.parquet is gone"):
        read_files(inputs, annotations=str(notes))
    frame = read_files(f"{crawl}/a.parquet", annotations=str(notes))  # a set may be of more files
    assert frame.compute()["length"].tolist() == RIGHT[:4]
    with pytest.raises(UnreadableInputError, match=r"b\.parquet is gone"):
        read_files(inputs, annotations=str(notes))


# Records that state other rows than there are.


def noted(record):
    (file,) = record["source"]["annotated"]
    return record["source"]["annotated"], file


def half(record):
    ranges, file = noted(record)
    ranges[file][0] //= 2


def none(record):
    noted(record)[0].clear()


def negative(record):
    ranges, file = noted(record)
    ranges[file][0] = -ranges[file][0]


def twice(record):
    ranges, file = noted(record)
    ranges[file][0] *= 2
    record["rows_out"] *= 2


def doubled(record):
    ranges, file = noted(record)
    ranges[file][1:] = [0, 10**6]


def elsewhere(record):
    ranges, file = noted(record)
    ranges[file][1:] = [place + 10**9 for place in ranges[file][1:]]


def huge(record):
    ranges, file = noted(record)
    ranges[file] = [10**30, 0, 10**30 - 1]
    record["rows_out"] = 10**30


def fewer(record):
    ranges, file = noted(record)
    ranges[file] = [1, ranges[file][1], ranges[file][1]]
    record["rows_out"] = 1


def swapped(record):
    ranges, file = noted(record)
    ranges[file][1:] = ranges[file][:0:-1]
    ranges[file][1] += 1


def of_other_file(record):
    ranges, file = noted(record)
    ranges["/etc/passwd"] = ranges.pop(file)


def of_neighbour(record):
    ranges, file = noted(record)
    other = file.replace("/a.", "/b.") if "/a." in file else file.replace("/b.", "/a.")
    ranges[other] = ranges.pop(file)


def fractions(record):
    ranges, file = noted(record)
    ranges[file] = [value + 0.5 for value in ranges[file]]


STATED = (half, none, negative, twice, doubled, elsewhere, huge, fewer, swapped, of_other_file)
STATED += (of_neighbour, fractions)


@pytest.mark.parametrize("change", STATED)
@pytest.mark.parametrize("line", [0, 1])
def test_no_row_is_lost_or_doubled_by_what_a_record_states(crawl, notes, change, line):
    assert outcome(crawl, notes) == RIGHT
    rewrite(notes / "_gpuclassify/manifest.jsonl", change, line)
    assert isinstance(outcome(crawl, notes), str)


def test_a_set_has_no_fewer_parts_than_were_written(crawl, notes):
    rewrite(notes / "_gpuclassify/job.json", lambda job: job.update(parts=1))
    assert "job.json" in outcome(crawl, notes)


@pytest.mark.parametrize("crawl", ["parquet"], indirect=True)
def test_a_set_of_two_folders_with_one_key_has_each_row_once(crawl, notes, tmp_path):
    """As sets have it where a file returned to an earlier state, or somebody copied a folder."""
    shutil.copytree(notes, tmp_path / "copy")
    shutil.move(tmp_path / "copy", notes / "more-00001")
    assert outcome(crawl, notes) == RIGHT
    (notes / "more-00002/_gpuclassify").mkdir(parents=True)  # a run that was killed at once
    assert outcome(crawl, notes) == RIGHT


# Parts that are no files any more.


def as_link(path, copied):
    path.rename(copied)
    path.symlink_to(copied)
    return "goes by the link"


def as_folder_link(path, copied):
    path.parent.rename(copied)
    path.parent.symlink_to(copied)
    return "goes by the link"


def as_fifo(path, copied):
    path.unlink()
    os.mkfifo(path)
    opened = os.open(path, os.O_RDWR)  # without a writer, a reader would wait for ever
    threading.Timer(1, os.close, [opened]).start()
    return "neither a regular file"


@pytest.mark.parametrize("crawl", ["parquet", "jsonl"], indirect=True)
@pytest.mark.parametrize("change", [as_link, as_folder_link, as_fifo])
@pytest.mark.parametrize("columns", [["length"], ["text", "length"]])
def test_a_part_that_became_something_else_after_the_call_is_refused(
    crawl, notes, tmp_path, change, columns
):
    (path, *_) = crawl.iterdir()
    shutil.copy(path, path.with_stem("c"))
    annotate(crawl, notes)
    frame = read_files(str(crawl), annotations=str(notes))
    message = change(min(notes.glob("more-00001/part-*")), tmp_path / "elsewhere")
    with pytest.raises(UnreadableInputError, match=message):
        frame[columns].compute()


# Whatever a file of a set holds, an error names the file, or what is read is right.

VALUES = (..., None, -1, 10**400, "x", "../../x", [], {}, [[]], {"": None}, True, float("nan"))


def paths_of(values, path=()):
    """The places of values within JSON."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, name)
        if isinstance(value, (dict, list)) and len(path) < 4:
            yield from paths_of(value, (*path, name))


def put(values, path, value):
    *before, last = path
    for name in before:
        values = values[name]
    if value is ...:
        del values[last]
    else:
        values[last] = value


def check_damages(crawl, notes, per_place):
    for name in ("job.json", "manifest.jsonl"):
        path = notes / "_gpuclassify" / name
        content = path.read_bytes()
        values = json.loads(content.splitlines()[0] if name != "job.json" else content)
        places = [place for place in paths_of(values) if place != ("sha256",)]
        for number, place in enumerate(places):
            for value in [*VALUES[number:], *VALUES * 2][:per_place]:
                rewrite(path, lambda values: put(values, place, value))  # noqa: B023
                found = outcome(crawl, notes)
                assert found == RIGHT or isinstance(found, str), (name, place, value, found)
                path.write_bytes(content)
        for text in (b"", b"{", b"null", b"[" * 10**5, b"\xff", b"1" * 5000, b'{"a": ' * 10**5):
            path.write_bytes(sealed({}) if text == b"" else seal_text(text))
            found = outcome(crawl, notes)
            assert found == RIGHT or isinstance(found, str), (name, text[:10], found)
            path.write_bytes(content)


def seal_text(text):
    """Bytes with the digest that a job would have given them."""
    import hashlib

    digest = hashlib.sha256(text + b"}").hexdigest().encode()
    return text + b', "sha256": "' + digest + b'"}'


@pytest.mark.parametrize("crawl", ["parquet"], indirect=True)
def test_what_a_set_says_is_used_or_refused_by_name(crawl, notes):
    check_damages(crawl, notes, per_place=1)


@pytest.mark.slow
@pytest.mark.parametrize("crawl", ["parquet", "jsonl"], indirect=True)
def test_nothing_that_a_set_says_ends_without_its_name(crawl, notes):
    check_damages(crawl, notes, per_place=len(VALUES))


def test_rows_of_another_file_are_refused(tmp_path):
    """A record that swaps two files of equal size would give each the labels of the other."""
    root, notes = tmp_path / "crawl", tmp_path / "notes"
    root.mkdir()
    for name in ("a", "b"):
        pd.DataFrame({"text": [name, name * 2]}).to_parquet(root / f"{name}.parquet")
    reader = FileReader(str(root), part_bytes=10**6)
    Pipeline([reader, with_length, AnnotationWriter(str(notes))]).run(report=lambda *_: None)

    def swap(values):
        [*files] = values["source"]["annotated"].items()
        values["source"]["annotated"] = dict(reversed(files))

    rewrite(notes / "_gpuclassify/manifest.jsonl", swap)
    assert "are not of" in outcome(root, notes)
