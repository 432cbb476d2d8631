"""Waiting for what other processes do."""

import time

import psutil


def wait_until(is_so, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {seconds} seconds"
        time.sleep(0.05)


def is_running(pid):
    """Whether a process is there that has not ended; one that has may wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
