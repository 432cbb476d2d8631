"""Several batches at once on a CPU, each on a core of its own."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from gpuclassify.inference.process_setting import ProcessSetting

_ONE_THREAD = ProcessSetting(torch.get_num_threads, torch.set_num_threads, 1)

Item = TypeVar("Item")
Made = TypeVar("Made")


def stream_count(device: torch.device) -> int:
    """How many batches run at once: on a CPU as many as torch has threads here."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def run_in_streams(
    run: Callable[[Item], Made], items: Iterable[Item], device: torch.device
) -> Iterator[Made]:
    """What ``run(item)`` gives for each item, in their order.

    On a CPU, as many run at once as torch has threads, and torch has one thread in each. A batch
    that is spread over all cores ends every operation with a wait for the slowest of them, which is
    long when another program has one of the cores. Until the last item has run, torch has one
    thread everywhere in the process.

    Parameters
    ----------
    run : callable
        Is called in inference mode, and in copies of the caller's context.
    items : iterable
        Taken as they are needed, a few ahead.
    device : torch.device
    """
    threads = stream_count(device)
    if threads == 1:
        yield from map(run, items)
        return

    def run_one(item: Item) -> Made:
        with torch.inference_mode():
            return run(item)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="gpuclassify-batch")
    with _ONE_THREAD.held(), pool:
        running: deque[Future[Made]] = deque()
        for item in items:
            running.append(pool.submit(contextvars.copy_context().run, run_one, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
