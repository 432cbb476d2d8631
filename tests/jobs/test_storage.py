import threading

import pytest
from fsspec.implementations.local import LocalFileSystem

from gpuclassify.jobs.storage import Directory, open_directory


def test_many_files_are_removed_several_at_a_time(tmp_path):
    together = threading.Barrier(4)

    class Store(LocalFileSystem):
        def rm_file(self, path):
            together.wait(timeout=30)
            super().rm_file(path)

    names = [f"part-{number}" for number in range(7)]
    for name in names:
        (tmp_path / name).touch()
    Directory(Store(), str(tmp_path)).remove(*names, "part-gone")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["{}/file", "{}/file/out", "memory://file-{}", "{}/out"])
def test_a_file_in_the_place_of_a_directory_or_above_it_is_refused(tmp_path, path):
    (tmp_path / "file").touch()
    directory = open_directory(path.format(tmp_path))
    if path.startswith("memory"):
        directory.filesystem.pipe_file(directory.root, b"")
    if path == "{}/out":
        directory.refuse_file()
        return
    with pytest.raises(NotADirectoryError, match=r"file.* is a file: name a directory"):
        directory.refuse_file()
