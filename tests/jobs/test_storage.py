import errno
import os
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem

from gpuclassify.jobs.input.files import find_files
from gpuclassify.jobs.ledger.records import SCRATCH
from gpuclassify.jobs.stores import store
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnsupportedStorageError


def test_many_files_are_removed_several_at_a_time(tmp_path):
    together = threading.Barrier(4)

    class Files(LocalFileSystem):
        def rm_file(self, path):
            together.wait(timeout=30)
            super().rm_file(path)

    names = [f"part-{number}" for number in range(7)]
    for name in names:
        (tmp_path / name).touch()
    store = open_store(str(tmp_path))
    vars(store)["_opened"] = Files(), str(tmp_path)
    store.remove(*names, "part-gone")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["{}/file", "{}/file/out", "memory://file-{}", "{}/out"])
def test_a_file_in_the_place_of_a_directory_or_above_it_is_refused(tmp_path, path):
    (tmp_path / "file").touch()
    directory = open_store(path.format(tmp_path))
    if path.startswith("memory"):
        directory.filesystem.pipe_file(directory.root, b"")
    if path == "{}/out":
        directory.refuse_file()
        return
    with pytest.raises(NotADirectoryError, match=r"file.* is a file: name a directory"):
        directory.refuse_file()


def test_a_file_system_that_links_only_within_a_folder_is_refused(tmp_path, monkeypatch):
    link = os.link

    def within_a_folder(source, target):
        if os.path.dirname(source) != os.path.dirname(target):  # noqa: PTH120
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)
        link(source, target)

    directory = open_store(str(tmp_path))
    directory.make(SCRATCH)
    directory.check_creates(SCRATCH)
    monkeypatch.setattr(os, "link", within_a_folder)
    with pytest.raises(UnsupportedStorageError, match="a local path with hard links, or to s3"):
        directory.check_creates(SCRATCH)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == []


@pytest.mark.parametrize("is_other", [False, True])
def test_a_container_of_the_same_name_and_number_keeps_its_files(tmp_path, monkeypatch, is_other):
    namespace = store._NAMESPACE
    if is_other:
        monkeypatch.setattr(store, "_NAMESPACE", "0" * 8)
    directory = open_store(str(tmp_path))
    name = f".part.{store.new_mark()}"  # from a process with the same ID
    (tmp_path / name).touch()
    monkeypatch.setattr(store, "_NAMESPACE", namespace)
    directory.sweep("")
    assert (tmp_path / name).exists() == is_other
    os.utime(tmp_path / name, (0, 0)) if is_other else None
    directory.sweep("")
    assert not (tmp_path / name).exists()


def test_a_file_of_time_0_has_a_version_of_its_own(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    os.utime(path, (0, 0))
    before = [file.version for file in find_files([str(path)], {})]
    path.chmod(0o600)
    assert [file.version for file in find_files([str(path)], {})] == before == ["0.0"]


@pytest.mark.parametrize(
    ("info", "md5"),
    [
        ({"ETag": '"900150983cd24fb0d6963f7d28e17f72"'}, "900150983cd24fb0d6963f7d28e17f72"),
        ({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}, "900150983cd24fb0d6963f7d28e17f72"),
        ({"content_settings": {"content_md5": bytearray(b"\x90\x01")}}, "9001"),
        *(({"ETag": none}, None) for none in (None, "", '""')),
        ({"content_settings": {"content_md5": bytearray()}}, None),
        ({}, None),
    ],
)
def test_a_store_that_reports_no_md5_reports_none(tmp_path, info, md5):
    assert open_store(str(tmp_path)).reported_md5(info) == md5
