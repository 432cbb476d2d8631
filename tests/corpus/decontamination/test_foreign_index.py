"""Indexes of test items that somebody else wrote, changed, or can write to."""

import functools
import hashlib
import io
import json
import multiprocessing.util
import os
import shutil
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pytest

from gpuclassify import Decontaminate
from gpuclassify.corpus.decontamination import index as index_module

ITEMS = [
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen",
    "which river flows through the old town of Bern before it meets the Rhine",
    "a b c d e f g h i",
    "xylophones zigzag quietly",  # shorter than an n-gram
]
DOCUMENTS = [f"they asked {item}, and nobody knew" for item in ITEMS] + ["a clean document"]
MADE = {"ngram": 5, "min_words": 2}
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload([__name__])


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    index_module._opened.cache_clear()
    return folder


@pytest.fixture
def saved(tmp_path):
    """Folder of an index that is as it was written."""
    folder = tmp_path / "saved"
    Decontaminate(against=pd.DataFrame({"question": ITEMS}), index_dir=folder, **MADE).prepare()
    (written,) = folder.iterdir()
    return written


def find(folder):
    """Contaminated documents, by an index, and the items that they hold."""
    mapper = Decontaminate(against=str(folder), passages_field="passages", **MADE)
    found = mapper(pd.DataFrame({"text": pd.Series(DOCUMENTS, dtype="str")}))
    return found["contaminated"].tolist(), found["contaminated_by"].dropna().tolist()


RIGHT = [True, True, True, True, False], ["frame#0", "frame#1", "frame#2", "frame#3"]


def seal(folder, change=dict):
    """Write index.json for the files that are there, as whoever knows the format can."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "index.json"
    }
    about = json.loads((folder / "index.json").read_text())
    del about["sha256"]
    about |= {"files": files, "digest": digest_of(files)}
    write_sealed(folder, change(about))


def digest_of(files):
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def write_sealed(folder, about):
    body = json.dumps(about).encode()
    seal = b', "sha256": "%s"}' % hashlib.sha256(body).hexdigest().encode()
    (folder / "index.json").write_bytes(body[:-1] + seal)


def test_forging_without_a_change_is_no_forgery(saved):
    seal(saved)
    assert find(saved) == RIGHT


# Values of index.json that could become paths, or break what reads them.


def set_to(**values):
    return lambda about: about | values


def place_files(home):
    """Name a folder of the reader as the place of the copies, and a file to write there."""

    def change(about):
        files = {"authorized_keys": hashlib.sha256(b"ssh-ed25519 AAAA").hexdigest()}
        return about | {"digest": str(home), "files": files}

    return change


CHANGES = {
    "absolute digest": lambda home: set_to(digest=str(home)),
    "relative digest": lambda home: set_to(digest="../../home"),
    "digest of other files": lambda home: set_to(digest="0" * 64),
    "foreign file": place_files,
    "absolute file": lambda home: lambda about: about | with_files({str(home / "a.pth"): "0" * 64}),
    "parent's file": lambda home: lambda about: about | with_files({"../a.pth": "0" * 64}),
    "one file more": lambda home: (
        lambda about: about | with_files(about["files"] | {"authorized_keys": "0" * 64})
    ),
    "files in a list": lambda home: set_to(files=["text.npy"]),
    "digests that are lists": lambda home: (
        lambda about: about | with_files({name: [0] for name in about["files"]})
    ),
    "no files": lambda home: set_to(files=None),
    "other format": lambda home: set_to(format="\x1b]0;x\x07"),
    "boilerplate in a list": lambda home: set_to(boilerplate=[]),
}


def with_files(files):
    return {"files": files, "digest": digest_of(files)}


@pytest.fixture
def serve(tmp_path):
    """Function that serves a folder by a web server of this machine, or in memory."""
    servers = []

    def served(folder, kind):
        if kind == "memory":
            target = f"/{tmp_path.name}"
            fsspec.filesystem("memory").put(str(folder), target, recursive=True)
            return f"memory:/{target}"
        handler = functools.partial(Quiet, directory=str(folder))
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield served
    for server in servers:
        server.shutdown()
        server.server_close()
    fsspec.filesystem("memory").store.clear()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("kind", ["http", "memory"])
def test_an_index_elsewhere_is_copied_into_a_folder_of_this_user(saved, serve, temporary, kind):
    assert find(serve(saved, kind)) == RIGHT
    (private,) = temporary.iterdir()
    assert (private.name, private.stat().st_mode & 0o777) == (f"gpuclassify-{os.getuid()}", 0o700)
    (copy,) = (private / "indexes").iterdir()
    assert copy.name == json.loads((saved / "index.json").read_text())["digest"]


@pytest.mark.parametrize("kind", ["http", "memory", "local"])
@pytest.mark.parametrize("name", CHANGES)
def test_values_of_an_index_lead_to_no_other_file(saved, serve, tmp_path, temporary, name, kind):
    home = tmp_path / "home"
    home.mkdir()
    (saved / "authorized_keys").write_bytes(b"ssh-ed25519 AAAA")
    about = json.loads((saved / "index.json").read_text())
    write_sealed(saved, CHANGES[name](home)(about))
    url = str(saved) if kind == "local" else serve(saved, kind)
    with pytest.raises(ValueError, match=r"index of test items in .* cannot be used") as caught:
        find(url)
    assert str(caught.value).isprintable()
    assert not [*home.iterdir()] and not [*temporary.rglob("*.npy"), *temporary.rglob("*key*")]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"format": 2' + b"0" * 5000 + b"}",
    ],
)
def test_an_index_json_that_cannot_be_read_is_named(saved, content):
    seal = b', "sha256": "%s"}' % hashlib.sha256(content).hexdigest().encode()
    for text in (content, content[:-1] + seal):
        (saved / "index.json").write_bytes(text)
        with pytest.raises(ValueError, match=r"saved/\w+ cannot be used: index.json is not as"):
            find(saved)


# Arrays, which compiled code reads without checks of its own.


def edited(name, edit):
    def write(folder):
        path = folder / f"{name}.npy"
        np.save(path, edit(np.load(path).copy()))

    return write


def put(place, value):
    def edit(array):
        array[place] = value
        return array

    return edit


def headed(name, **changes):
    """Write another header before the bytes of an array."""

    def write(folder):
        array, header = np.load(folder / f"{name}.npy"), io.BytesIO()
        form = np.lib.format.header_data_from_array_1_0(array) | changes
        np.lib.format.write_array_header_1_0(header, form)
        (folder / f"{name}.npy").write_bytes(header.getvalue() + array.tobytes())

    return write


def content(name, data):
    return lambda folder: (folder / f"{name}.npy").write_bytes(data)


EMPTY = 2**32 - 1
FORGED = {
    "settings: none": edited("settings", lambda a: a[:0]),
    "settings: no n": edited("settings", lambda a: a[:1]),
    "settings: another n": edited("settings", put(1, 6)),
    "settings: huge n": edited("settings", put(1, 2**62)),
    "settings: n of 0": edited("settings", put(1, 0)),
    "settings: many widths": edited("settings", lambda a: np.append(a, np.arange(900, dtype="u8"))),
    "settings: huge width": edited("settings", lambda a: np.append(a, a.dtype.type(2**63))),
    "text: other type": edited("text", lambda a: a.astype(np.int8)),
    "text: shorter": edited("text", lambda a: a[:9]),
    "text: no UTF-8": edited("text", put(0, 0xFF)),
    "text: cut character": edited("text", put(2, 0xF0)),
    "text: no spaces": edited("text", lambda a: a | 0x60),
    "starts: other type": edited("starts", lambda a: a.astype(np.int64)),
    "starts: other bytes' order": edited("starts", lambda a: a.astype(">u4")),
    "starts: too far": edited("starts", put(-1, 2**31)),
    "starts: one too far": edited("starts", put(3, 2**32 - 1)),
    "starts: not ascending": edited("starts", lambda a: np.sort(a)[::-1]),
    "starts: none": edited("starts", lambda a: a[:0]),
    "starts: two dimensions": edited("starts", lambda a: a[None]),
    "places: too far": edited("places", put(0, 2**31)),
    "places: beyond the last word": edited("places", lambda a: a + a.dtype.type(40)),
    "places: fewer": edited("places", lambda a: a[:-1]),
    "widths: zero": edited("widths", put(0, 0)),
    "widths: most": edited("widths", put(slice(None), 255)),
    "keys: more": edited("keys", lambda a: np.append(a, a)),
    "keys: fewer": edited("keys", lambda a: a[:-1]),
    "slots: full": edited("slots", put(slice(None), 0)),
    "slots: of no power of two": edited("slots", lambda a: a[:-1]),
    "slots: none": edited("slots", lambda a: a[:0]),
    "slots: too far": edited("slots", lambda a: np.where(a == EMPTY, a, a.dtype.type(2**31))),
    "slots: empty": edited("slots", put(slice(None), EMPTY)),
    "bits: none": edited("bits", lambda a: a[:0]),
    "bits: of no power of two": edited("bits", lambda a: np.append(a, a)[:3]),
    "bits: nothing passes": edited("bits", put(slice(None), 0)),
    "short_bits: none": edited("short_bits", lambda a: a[:0]),
    "short_bits: nothing passes": edited("short_bits", put(slice(None), 0)),
    "owner_starts: too far": edited("owner_starts", put(-1, 2**31)),
    "owner_starts: not ascending": edited("owner_starts", put(1, 2**31)),
    "owner_starts: fewer": edited("owner_starts", lambda a: a[:-1]),
    "owners: too far": edited("owners", put(0, 2**31)),
    "counts: zero": edited("counts", put(slice(None), 0)),
    "counts: fewer": edited("counts", lambda a: a[:-1]),
    "item_text_offsets: too far": edited("item_text_offsets", put(-1, 2**40)),
    "item_text_offsets: not ascending": edited("item_text_offsets", put(1, 2**40)),
    "item_text_offsets: negative": edited("item_text_offsets", put(0, -(2**40))),
    "item_text_offsets: none": edited("item_text_offsets", lambda a: a[:0]),
    "item_id_offsets: fewer": edited("item_id_offsets", lambda a: a[:-1]),
    "item_id: no UTF-8": edited("item_id", put(0, 0xFF)),
    "item_source: shorter": edited("item_source", lambda a: a[:1]),
    "a header of more rows": headed("keys", shape=(10**12,)),
    "a header of negative rows": headed("keys", shape=(-1,)),
    "a header of objects": headed("keys", descr="|O"),
    "a header of other order": headed("keys", fortran_order=True),
    "a header that nests": content("keys", b"\x93NUMPY\x01\x00\x10\x27" + b"-" * 9999 + b"1\n"),
    "a pickle": content("keys", b"\x93NUMPY\x01\x00"),
    "no bytes": content("slots", b""),
}  # fmt: skip


class Child:
    """Process that may crash or hang; the next call starts another one."""

    def __init__(self):
        self.process = None

    def call(self, function, *arguments):
        """Return a function's result, or the type and text of its error."""
        if self.process is None:
            self.channel, other_end = CHILDREN.Pipe()
            self.process = CHILDREN.Process(target=answer_calls, args=(other_end,))
            self.process.start()
            other_end.close()
        self.channel.send((function, arguments))
        try:
            assert self.channel.poll(120), "the process does not end"
            return self.channel.recv()
        except BaseException:
            self.stop()
            raise

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def answer_calls(channel):
    while True:
        function, arguments = channel.recv()
        try:
            channel.send(function(*arguments))
        except Exception as err:
            channel.send((type(err).__name__, str(err)))


@pytest.fixture(scope="module")
def child():
    multiprocessing.util.get_temp_dir()  # before a test names another folder for it
    child = Child()
    yield child
    child.stop()


@pytest.mark.parametrize("name", FORGED)
def test_arrays_that_do_not_fit_end_as_an_error(child, saved, name):
    FORGED[name](saved)
    seal(saved)
    error, message = child.call(find, saved)
    assert error == "ValueError", message
    assert f"index of test items in {saved} cannot be used" in message


@pytest.mark.parametrize("name", sorted(index_module._DTYPES))
def test_a_file_with_another_byte_is_not_as_it_was_written(saved, name):
    data = bytearray((saved / name).read_bytes())
    data[-1] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{saved} cannot be used: {name} is not as it was"):
        find(saved)


# Other users of the machine.


@pytest.mark.parametrize("bad", ["link", "open", "file", "owner"])
def test_a_folder_for_copies_that_is_not_private_is_refused(
    saved, serve, temporary, tmp_path, monkeypatch, bad
):
    private, elsewhere = temporary / f"gpuclassify-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if bad == "link":
        private.symlink_to(elsewhere)
    elif bad == "open":
        private.mkdir()
        private.chmod(0o755)
    elif bad == "file":
        private.touch()
    else:
        private.mkdir(mode=0o700)
        owner = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: owner)
    with pytest.raises(PermissionError, match="is open to other users: remove it"):
        find(serve(saved, "memory"))
    assert not [*elsewhere.iterdir()]


def truncate_after_opening(folder, temporary):
    tempfile.tempdir = str(temporary)
    find(folder)
    for path in folder.glob("*.npy"):
        os.truncate(path, 0)
    return find(folder)


@pytest.mark.parametrize("shared", ["files", "folder", "link"])
def test_files_that_others_can_write_to_are_not_mapped(child, saved, temporary, shared):
    if shared == "files":
        (saved / "keys.npy").chmod(0o666)
    elif shared == "folder":
        saved.chmod(0o777)
    else:
        saved.rename(saved.parent / "target")
        saved.symlink_to(saved.parent / "target")
    assert child.call(truncate_after_opening, saved, temporary) == RIGHT


def test_an_index_of_this_user_is_mapped_where_it_is(saved, temporary):
    find(saved)
    assert not [*temporary.iterdir()]
    maps = Path("/proc/self/maps")
    assert not maps.exists() or f"{saved}/keys.npy" in maps.read_text()


def test_links_among_the_files_are_refused(saved, tmp_path):
    shutil.move(saved / "keys.npy", tmp_path / "keys.npy")
    (saved / "keys.npy").symlink_to(tmp_path / "keys.npy")
    with pytest.raises(ValueError, match="goes by the link"):
        find(saved)


def test_an_index_that_was_edited_in_index_dir_is_built_again(tmp_path, caplog):
    made = {"against": pd.DataFrame({"question": ITEMS}), "index_dir": tmp_path / "shared", **MADE}
    Decontaminate(**made).prepare()
    (folder,) = (tmp_path / "shared").iterdir()
    edited("bits", put(slice(None), 0))(folder)
    index_module._opened.cache_clear()
    found = Decontaminate(**made)(pd.DataFrame({"text": pd.Series(DOCUMENTS, dtype="str")}))
    assert found["contaminated"].tolist() == RIGHT[0]
    assert "is built again" in caplog.text
