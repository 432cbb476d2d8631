"""One process holds a model for all of a machine, and what happens when somebody is killed."""

import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from gpuclassify import FastTextClassifier
from gpuclassify.classifiers.fasttext import host
from gpuclassify.classifiers.fasttext.host import HostClient, HostError

DEADLINE_SECONDS = 60


@pytest.fixture
def model(fasttext_model, tmp_path):
    """A file of this test's own, so that nobody else's process holds it."""
    path = tmp_path / "own.bin"
    path.write_bytes(fasttext_model("chars").read_bytes())
    return path


def processes(model):
    """The process that holds a model and its children, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                str(model) in process.cmdline()
                and "gpuclassify.classifiers.fasttext.host" in process.cmdline()
            ):
                found.append(process)
    alive = [one for one in found if one.status() != psutil.STATUS_ZOMBIE]
    return sorted(alive, key=lambda one: (one.create_time(), one.pid))


def wait_for(is_so):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_threads_and_processes_share_one_model(model, run_python):
    clients = [HostClient(model, "r") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = {*pool.map(lambda own: own.predict(["buy"], 1)[0].item(), clients)}
    assert len(answers) == 1
    assert len(processes(model)) == 4
    out = run_python(f"""
from pathlib import Path
from gpuclassify.classifiers.fasttext.host import HostClient
import psutil
other = HostClient(Path({str(model)!r}), "r")
print(other.predict(["buy"], 1)[0].item())
print(sum({str(model)!r} in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))
""")
    assert out.split() == [str(*answers), "5"]
    clients.clear()
    wait_for(lambda: not processes(model))


def test_a_killed_client_takes_child_and_host_along(model, run_python):
    code = f"""
import os, signal
import pandas as pd
from gpuclassify import FastTextClassifier
FastTextClassifier(model={str(model)!r})(pd.DataFrame({{"text": ["buy"]}}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(AssertionError):  # it was killed
        run_python(code)
    wait_for(lambda: not processes(model))


def test_a_killed_child_or_host_is_started_again(model, caplog):
    classifier, frame = FastTextClassifier(model=model), pd.DataFrame({"text": ["buy", "proof"]})
    expected = classifier(frame)
    parent, child = processes(model)
    child.kill()
    wait_for(lambda: len(processes(model)) == 1)
    pd.testing.assert_frame_equal(classifier(frame), expected)
    assert processes(model)[0] == parent
    for process in processes(model):
        process.kill()
    wait_for(lambda: not processes(model))
    pd.testing.assert_frame_equal(classifier(frame), expected)
    assert len(processes(model)) == 2
    classifier.teardown()
    wait_for(lambda: not processes(model))


def test_a_killed_host_that_still_listens_is_not_asked(model):
    own = HostClient(model, "r")
    expected = own.predict(["buy"], 1)
    own._idle[0].poll = lambda: False  # as if its other end had not been closed yet
    path = next(of.laddr for of in processes(model)[0].net_connections("unix") if of.laddr)
    for process in processes(model):
        process.kill()
    wait_for(lambda: not processes(model))
    Path(path).unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        threading.Timer(0.3, listener.close).start()
        np.testing.assert_array_equal(own.predict(["buy"], 1), expected)
    assert len(processes(model)) == 2


def test_a_kept_log_record_does_not_keep_the_host(model, caplog):
    own = HostClient(model, "r")
    expected = own.predict(["buy"], 1)
    own._idle[0].poll = lambda: False  # as if its other end had not been closed yet
    processes(model)[-1].kill()
    wait_for(lambda: len(processes(model)) == 1)
    np.testing.assert_array_equal(own.predict(["buy"], 1), expected)
    assert "started again" in caplog.text
    del own
    wait_for(lambda: not processes(model))


def test_a_child_that_ends_each_time_it_is_asked_is_an_error(model, monkeypatch, caplog):
    own = HostClient(model, "r")

    def connect(path, revision):
        connection = host.connect(path, revision)
        wait_for(lambda: len(processes(model)) == 2)
        os.kill(processes(model)[-1].pid, signal.SIGKILL)
        return connection

    monkeypatch.setattr(own, "connect", lambda: connect(model, "r"))
    with pytest.raises(HostError, match="ended twice while it was asked about 1 texts"):
        own.predict(["buy"], 1)
    assert "started again" in caplog.text


def test_what_the_library_refuses_reaches_the_client(model, tmp_path):
    path = tmp_path / "no.bin"
    path.write_bytes(b"no model")
    with pytest.raises(HostError, match=r"no.bin cannot be loaded: .*wrong file format"):
        HostClient(path, "r").warm_up()
    with pytest.raises(ValueError, match="k needs to be 1 or higher"):
        HostClient(model, "r").predict(["buy"], 0)


def test_sockets_have_short_paths_that_nobody_else_can_enter(model, monkeypatch, tmp_path):
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))
    assert HostClient(model, "r").predict(["buy"], 1)[0].shape == (1, 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # whatever the user's name is
        monkeypatch.setattr(tempfile, "gettempdir", lambda: short)
        folder = Path(short, f"gpuclassify-{os.getuid()}")
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask is
        with pytest.raises(HostError, match=f"{folder} is open to other users"):
            HostClient(model, "r").warm_up()


@pytest.mark.parametrize(
    ("code", "owner", "call"),
    [
        (errno.EROFS, Path, "mkdir"),
        (errno.ENOSPC, Path, "open"),
        (errno.ENOLCK, host.fcntl, "flock"),
    ],
)
def test_a_folder_of_sockets_that_cannot_be_used_is_named_with_the_reason(
    model, monkeypatch, caplog, code, owner, call
):
    def fails(path, *arguments, **options):
        raise OSError(code, os.strerror(code), None if call == "flock" else str(path))

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: folder)
        with monkeypatch.context() as patch, pytest.raises(HostError) as caught:
            patch.setattr(owner, call, fails)
            HostClient(model, "r").predict(["buy"], 1)
    assert f"{folder}/gpuclassify-{os.getuid()}" in str(caught.value)
    assert os.strerror(code) in str(caught.value) and "memory" not in str(caught.value)
    assert not caplog.text


def test_a_socket_that_the_host_cannot_make_is_named_with_the_reason(model, tmp_path):
    socket_path = tmp_path / "gone/socket"
    words = rf"own.bin cannot be loaded: FileNotFoundError: .*No such file.*{socket_path}"
    with pytest.raises(HostError, match=words):
        host._start(socket_path, tmp_path / "lock", model)


def test_without_the_library_the_message_names_what_to_install(model, monkeypatch):
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"gpuclassify\[fasttext\]"):
        FastTextClassifier(model=model)(pd.DataFrame({"text": ["buy"]}))


def test_a_library_that_only_predicts_does_as_well(model, monkeypatch):
    """As fasttext-predict does: no labels of a model, and of several texts no probabilities."""
    import fasttext

    class Model:
        def __init__(self, path):
            self.whole = fasttext.load_model(path)

        def predict(self, text, k):
            assert isinstance(text, str)
            return self.whole.predict(text, k=k)

    texts = ["buy now", "", "gene protein"]
    ids, probabilities = host.load(str(model))(texts, 2)
    only_predicts = types.SimpleNamespace(load_model=Model)
    monkeypatch.setitem(sys.modules, "fasttext", only_predicts)
    again = host.load(str(model))(texts, 2)
    assert (again[0] == ids).all()
    np.testing.assert_array_equal(again[1], probabilities)


def test_a_fork_has_connections_of_its_own(model, run_python):
    out = run_python(f"""
import os
from pathlib import Path
from gpuclassify.classifiers.fasttext.host import HostClient
own = HostClient(Path({str(model)!r}), "r")
own.predict(["buy"], 1)
used = own._idle[0]
if not os.fork():
    while own._free_cores.acquire(blocking=False):  # as if threads had been asking
        pass
    labels, _ = own.predict(["buy"] * 3, 1)
    os._exit(0 if labels.shape == (3, 1) and own._idle[0] is not used else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]), own.predict(["buy"], 1)[0].shape)
""")
    assert out.strip() == "0 (1, 1)"


def test_a_model_that_cannot_be_loaded_for_lack_of_memory_says_so(model, monkeypatch, tmp_path):
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr(host.sys, "executable", str(killed))
    with pytest.raises(HostError, match=r"own.bin cannot be loaded: SIGKILL .*lack of memory"):
        HostClient(model, "r").warm_up()
