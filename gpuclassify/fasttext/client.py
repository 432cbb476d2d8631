"""Asks the process that holds a fastText model; see `gpuclassify.fasttext.host`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuclassify.fasttext.host import Predictions

logger = logging.getLogger(__name__)

# Bytes: a socket's path has at most 103 (macOS; Linux 107), with 17 of them for its own name.
_LONGEST_FOLDER = 86


class HostError(RuntimeError):
    """The process that holds a model cannot be started, or ended while it was asked."""


class HostClient:
    """Connections to the process that holds a model, one for each thread that is asking.

    There are no more of them than cores. They are closed with this object, and the process ends
    with the last one.

    Parameters
    ----------
    path : Path
        The model's file.
    revision : str
        What tells it from other files that were there.
    """

    def __init__(self, path: Path, revision: str) -> None:
        self.path = path
        self._revision = revision
        self._reset()

    def _reset(self) -> None:
        from dask.system import cpu_count

        self._process = os.getpid()
        self._idle: list[Connection] = []
        self._free_cores = threading.BoundedSemaphore(cpu_count())

    def predict(self, texts: Sequence[str], k: int) -> Predictions:
        """The `k` most probable labels of texts without newlines.

        A process that ended (for lack of memory, or because somebody killed it) is started and
        asked once more.

        Raises
        ------
        HostError
            It ended again.
        """
        try:
            return self._ask(texts, k)
        except (EOFError, OSError) as err:
            logger.warning(
                "the process that held %s is gone, and started again: %r", self.path, err
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
        """A connection that nobody uses: one that is open, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.poll():  # what has been silent for long is closed by the other end
                return connection
        return connect(self.path, self._revision)

    def warm_up(self) -> None:
        """Start the process, if there is none."""
        self._idle.append(self.connect())

    def _ask(self, texts: Sequence[str], k: int) -> Predictions:
        if self._process != os.getpid():  # a fork, whose parent uses the connections
            self._reset()
        with self._free_cores:
            connection = self.connect()
            connection.send(("\n".join(texts), k))  # one string is quicker to send than many
            answer = connection.recv()
            self._idle.append(connection)
        if isinstance(answer, Exception):
            raise answer
        return answer


def connect(path: Path, revision: str) -> Connection:
    """Connect to the process that holds a model, which the first to ask starts.

    Raises
    ------
    HostError
        It cannot be started.
    PermissionError
        The folder of sockets belongs to somebody else.
    """
    known_by = repr((str(path), revision, sys.executable))
    place = _private_folder() / hashlib.sha256(known_by.encode()).hexdigest()[:16]
    lock = place.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # all others wait here while the model is loaded
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(place)
        _start(place, lock, path)
        return _connected(place)


def _connected(place: Path) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(str(place))
    except OSError:
        client.close()
        raise
    connection = Connection(client.detach())
    connection.send(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None)
    return connection


def _start(place: Path, lock: Path, path: Path) -> None:
    check_library()
    command = [sys.executable, "-m", "gpuclassify.fasttext.host", str(place), str(lock), str(path)]
    # The modules of this process, and no threads that a fork would lose.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
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
    logger.info("%s is loaded, in a process of its own", path)


def check_library() -> None:
    """Raise ModuleNotFoundError unless fastText is installed."""
    if importlib.util.find_spec("fasttext") is None:
        raise ModuleNotFoundError(
            "fastText models need fasttext, which is not here: pip install 'gpuclassify[fasttext]'",
            name="fasttext",
        )


def _private_folder() -> Path:
    """A folder of sockets that no other user can enter."""
    name = f"gpuclassify-{os.getuid()}"
    folder = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder = Path("/tmp", name)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is open to other users: remove it, or set TMPDIR to a folder of your own"
        )
    return folder
