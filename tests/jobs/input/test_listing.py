"""Nothing below an input is left out in silence, and nothing is read twice."""

import errno
import glob
import json
import os
from pathlib import Path

import pandas as pd
import pytest
from job_faults import in_process, write_input

from gpuclassify import FileReader, ParquetWriter, Pipeline, read_files
from gpuclassify.jobs.input.files import find_files
from gpuclassify.jobs.stores.store import UnreadableInputError

pytestmark = pytest.mark.contract


def write(path, number=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"id": number, "text": "a"}) + "\n")
    return path


def same(frame):
    return frame


def job(inputs, out="out", **options):
    return Pipeline([FileReader(inputs), same, ParquetWriter(str(out))], **options)


def names(inputs, folder):
    return [str(Path(file.path).relative_to(folder)) for file in find_files(inputs, {})]


def ids(out):
    return sorted(pd.concat(map(pd.read_parquet, Path(out).glob("*.parquet")))["id"])


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["in/a.jsonl", "in/b/b.jsonl", "in/b/c/c.jsonl", "in/d/d.jsonl"]):
        write(tmp_path / name, number)
    return tmp_path


@pytest.fixture
def closed(tree, monkeypatch, request):
    """A folder that cannot be listed, in the way of a disk, a server or a permission."""
    scandir = os.scandir

    def fail(path="."):
        if str(path).rstrip("/").endswith("in/b"):
            raise OSError(request.param, os.strerror(request.param), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    return os.strerror(request.param)


ERRORS = [errno.EACCES, errno.EIO, errno.ESTALE]


@pytest.mark.parametrize("closed", ERRORS, indirect=True)
@pytest.mark.parametrize("inputs", ["in", "file://{}/in", "in/*", "in/**/*.jsonl", "in/*/*.jsonl"])
def test_a_folder_that_cannot_be_listed_is_told_or_left_out_by_name(tree, closed, inputs):
    inputs = inputs.format(tree)
    with pytest.raises(
        UnreadableInputError, match=rf"{tree}/in/b cannot .*listed \({closed}.*quar"
    ):
        job(inputs).run()
    with pytest.raises(UnreadableInputError, match=rf"{tree}/in/b cannot be read"):
        read_files(inputs)
    summary = job(inputs, on_error="quarantine").run()
    assert summary.left_out == {"file": 1}
    assert ids("out") == ([3] if inputs == "in/*/*.jsonl" else [0, 3])
    [path] = Path("out/_quarantine").iterdir()
    assert json.loads(path.read_text())["source"].endswith("in/b")


@pytest.mark.parametrize("closed", ERRORS[:1], indirect=True)
def test_a_folder_that_a_pattern_does_not_name_may_be_closed(tree, closed):
    assert names(["in/d", "in/*.jsonl", "in/d*/*"], tree) == ["in/d/d.jsonl", "in/a.jsonl"]
    with pytest.raises(UnreadableInputError, match=r"in/b.* cannot be listed"):
        find_files(["in/b"], {})
    (tree / "in/b").rename(tree / "in/_b")
    assert names(["in"], tree) == ["in/a.jsonl", "in/d/d.jsonl"]


def read_closed(folder, answers):
    """As a user whom permissions hold for."""
    from job_faults import _drop_capabilities

    _drop_capabilities()
    try:
        read_files(f"{folder}/in")
    except UnreadableInputError as err:
        answers.put(str(err))


@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_a_folder_without_permission_is_told(tree, mode):
    from job_faults import PROCESSES

    (tree / "in/b").chmod(mode)
    answers = PROCESSES.Queue()
    process = in_process(read_closed, tree, answers)
    process.join()
    (tree / "in/b").chmod(0o700)
    assert "in/b cannot be read: it is a folder that cannot be listed (Permission" in answers.get()


def test_linked_folders_are_read_as_by_glob(tree):
    write(tree / "disk2/x/e.jsonl", 4)
    write(tree / "disk2/k=1/f.jsonl", 5)
    (tree / "in/far").symlink_to(tree / "disk2")
    (tree / "in/d/up").symlink_to("..")  # circles
    (tree / "in/b/self").symlink_to(".")
    (tree / "in/0-again").symlink_to("b")  # the folder's own name counts
    (tree / "in/0-again.jsonl").symlink_to("a.jsonl")
    (tree / "in/_hidden").symlink_to(tree / "disk2")
    found = read_files("in").compute()
    found_by_glob = glob.glob("in/**/*.jsonl", recursive=True)  # noqa: PTH207 (it follows links)
    real = {*map(os.path.realpath, found_by_glob)}
    assert sorted(found["id"]) == [0, 1, 2, 3, 4, 5]
    assert {file.real for file in find_files(["in"], {})} == real
    assert found.set_index("id")["k"][5] == 1
    assert names(["in"], tree) == [
        *("in/a.jsonl", "in/b/b.jsonl", "in/b/c/c.jsonl", "in/d/d.jsonl"),
        *("in/far/k=1/f.jsonl", "in/far/x/e.jsonl"),
    ]
    assert names(["in/*/*/*.jsonl"], tree)[-2:] == ["in/far/k=1/f.jsonl", "in/far/x/e.jsonl"]


def test_a_link_that_may_have_led_to_a_folder_is_told(tree):
    (tree / "in/far").symlink_to("/disk/that/is/gone")
    with pytest.raises(UnreadableInputError, match=r"in/far cannot be read: it is a link to /disk"):
        job("in").run()
    assert job("in", on_error="quarantine").run().left_out == {"file": 1}
    assert ids("out") == [0, 1, 2, 3]


def test_a_file_is_read_once_however_it_is_spelled(tree):
    (tree / "link").symlink_to("in")
    (tree / "other.jsonl").symlink_to("in/a.jsonl")
    spelled = ["in/a.jsonl", "in//a.jsonl", "./in/a.jsonl", "in/../in/a.jsonl", "link/a.jsonl"]
    spelled += ["other.jsonl", f"file://{tree}/in/a.jsonl", f"{tree}/link/../in/*.jsonl"]
    assert names(spelled, tree) == ["in/a.jsonl"]
    for one in spelled:
        assert len(find_files([one, "in"], {})) == 4


def test_a_job_goes_on_from_another_directory_and_through_a_link(tmp_path, monkeypatch):
    write_input(tmp_path / "in")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    first = job("in").run()
    for inputs in ("in/", f"{tmp_path}/in/*.jsonl", "link", "elsewhere/../in"):
        assert job(inputs).run().resumed_parts == first.parts
    monkeypatch.chdir(tmp_path / "elsewhere")
    for inputs in ("../in", "../elsewhere/../in/*"):
        assert job(inputs, tmp_path / "out").run().resumed_parts == first.parts
