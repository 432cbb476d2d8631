"""The process that holds a fastText model for all processes of a node.

``python -m gpuclassify.fasttext.host SOCKET LOCK MODEL`` loads the model, goes to the background,
and forks a child for each connection. Children share the model's pages, so that a node has it in
memory once, and none waits for another one's interpreter lock, which the library never gives up.
The host has one thread, which makes forking safe, and ends some seconds after its last child.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

GRACE_SECONDS = 3.0  # without a child, after which the host ends
IDLE_SECONDS = 300.0  # without a request, after which a child ends

# Label ids, int32 (texts, k), -1 where there are fewer; their probabilities, float32 (texts, k).
Predictions = tuple[np.ndarray, np.ndarray]


def main(place: Path, lock: Path, model: str) -> None:
    """Load the model and serve it; whoever waits for this process knows then that it is ready."""
    predict = load(model)
    listener = socket.socket(socket.AF_UNIX)
    place.unlink(missing_ok=True)  # of a host that was killed
    listener.bind(str(place))
    listener.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    serve(listener, predict, lambda: _ends(listener, place, lock))


def load(path: str) -> Callable[[list[str], int], Predictions]:
    """A function that gives the `k` most probable labels of texts without newlines."""
    import fasttext

    model = fasttext.load_model(path)
    ids = {label: number for number, label in enumerate(model.get_labels())}

    def predict(texts: list[str], k: int) -> Predictions:
        labels, probabilities = model.predict(texts, k=k)
        is_given = np.arange(k) < np.fromiter(map(len, labels), np.int64, len(labels))[:, None]
        found = np.full(is_given.shape, -1, dtype=np.int32)
        found[is_given] = [ids[label] for own in labels for label in own]
        values = np.full(is_given.shape, np.nan, dtype=np.float32)
        values[is_given] = np.concatenate(probabilities)
        return found, values

    return predict


def serve(listener: socket.socket, predict: Any, may_end: Callable[[], bool]) -> None:
    """Fork a child for each connection, until there is none and `may_end`."""
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


def answer(connection: Connection, predict: Any) -> None:
    """Answer requests of one client until it is gone, or has been silent for long.

    The first one names the cores that it may use: the host was started by another process, which
    may be bound to other ones.
    """
    with contextlib.suppress(EOFError, OSError):
        cores = connection.recv()
        if cores is not None:
            os.sched_setaffinity(0, cores)
        while connection.poll(IDLE_SECONDS):
            lines, k = connection.recv()
            try:
                reply = predict(lines.split("\n"), k)
            except Exception as err:  # whatever the library raises is the client's to hear
                reply = err
            connection.send(reply)


def _ends(listener: socket.socket, place: Path, lock: Path) -> bool:
    """Whether nobody is about to connect; then nobody can any more."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if select.select([listener], [], [], 0)[0]:
            return False
        place.unlink(missing_ok=True)
        return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
