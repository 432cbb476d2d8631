"""Count files, lines and rows that lazy reading leaves out, here or on a cluster's workers."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuclassify.jobs.ledger.quarantine import Problem, counts_by_kind
from gpuclassify.pages import counted_kinds
from gpuclassify.workers.run_context import current_worker

TOPIC = "gpuclassify-left-out"
logger = logging.getLogger(__name__)

# One dict for each active `left_out_logged` block: counts by kind, for each piece of the input.
# Pieces are keys, because a piece that is read several times counts once.
_watching: list[dict[str, Mapping[str, int]]] = []


def report_left_out(piece: object, problems: Iterable[Problem]) -> None:
    """Report files, lines and rows that could not be read, for the log of `left_out_logged`.

    `piece` identifies the range of the input, which counts once even if it is read several times.
    """
    if not (counts := counts_by_kind(problems)):
        return
    if (worker := current_worker()) is not None:
        worker.log_event(TOPIC, (str(piece), counts))
    for known in _watching:
        known[str(piece)] = counts


@contextlib.contextmanager
def left_out_logged() -> Iterator[None]:
    """Log a warning after the outermost block if reading in it left out files, lines or rows."""
    counts: dict[str, Mapping[str, int]] = {}
    client = _client()
    events = [] if client is None else client.get_events(TOPIC)
    began = max((at for at, _ in events), default=0.0)  # time of the scheduler's clock
    _watching.append(counts)
    try:
        yield
        events = [] if client is None else client.get_events(TOPIC)
        counts.update(dict(event for at, event in events if at > began))
    finally:
        _watching.remove(counts)
    total: Counter[str] = Counter()
    for by_kind in counts.values():
        total.update(by_kind)
    if total and not _watching:
        logger.warning("left out, because they cannot be read: %s", counted_kinds(total))


def _client() -> Any:
    """Return the current synchronous Dask client or None, without importing distributed."""
    distributed = sys.modules.get("distributed")
    with contextlib.suppress(ValueError):  # no current client
        client = distributed and distributed.default_client()
        return None if client is None or client.asynchronous else client
    return None
