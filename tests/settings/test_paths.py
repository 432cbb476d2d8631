"""No permission to look is no absence, on every Python and file system."""

import errno
import os

import fsspec
import pytest

from gpuclassify import hub
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.settings.paths import exists, is_directory, is_file

ASKED = (exists, is_file, is_directory)


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("file", (True, True, False)),
        ("folder", (True, False, True)),
        ("folder/link", (True, True, False)),
        ("dangling", (False, False, False)),
        ("nothing/below", (False, False, False)),
        ("file/below", (False, False, False)),
        ("long" * 100, (False, False, False)),
        ("zero\0byte", (False, False, False)),
    ],
)
def test_what_is_there_is_told_as_pathlib_tells_it(tmp_path, name, answers):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")

    assert tuple(ask(tmp_path / name) for ask in ASKED) == answers


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP])
@pytest.mark.parametrize("ask", ASKED)
def test_a_place_that_cannot_be_looked_at_is_an_error(tmp_path, monkeypatch, ask, number):
    def fail(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "stat", fail)

    with pytest.raises(OSError, match=os.strerror(number)):
        ask(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_output_that_cannot_be_looked_at_is_an_error(tmp_path, monkeypatch, number):
    files = fsspec.filesystem("file", skip_instance_cache=True)
    directory = open_store(str(tmp_path))
    vars(directory)["_opened"] = files, str(tmp_path)
    directory.replace("here", b"")
    assert (directory.has("here"), directory.has("elsewhere")) == (True, False)

    def fail(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "info", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        directory.has("here")


def test_a_folder_of_a_model_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "config.json").write_text("{}")
    listed = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="closed"):
        hub.resolve(tmp_path)
