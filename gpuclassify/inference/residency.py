"""Models that stay loaded in a worker process between Dask tasks.

Workers import this module. A cache in ``__main__``, which is pickled by value, would be lost
between tasks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpuclassify.workers.device_errors import is_out_of_memory, release_memory

logger = logging.getLogger(__name__)

Model = TypeVar("Model")


@dataclass
class _Resident(Generic[Model]):
    model: Model
    leases: int = 0  # number of ``with`` blocks that use the model now


class Residency(Generic[Model]):
    """Thread-safe cache of loaded models by key, which never drops a model in use.

    A model is loaded once, even if several threads ask for it. If a new model does not fit, models
    without a `lease` are evicted, least recently used first.
    """

    def __init__(self) -> None:
        self._residents: OrderedDict[Hashable, _Resident[Model]] = OrderedDict()
        self._lock = threading.Lock()
        self._loading: dict[Hashable, threading.Lock] = {}

    @contextlib.contextmanager
    def lease(
        self,
        key: Hashable,
        load: Callable[[], Model],
        needed_bytes: Callable[[], int] = lambda: 0,
        free_bytes: Callable[[], int] = lambda: 1,
    ) -> Iterator[Model]:
        """Yield the model of `key`, and keep it from being evicted during the ``with`` block.

        A model that is not in the cache is loaded by ``load()``. Before, idle models (without a
        lease) are evicted until ``free_bytes()`` reaches ``needed_bytes()``, or none is left. If
        ``load()`` runs out of memory, all idle models are evicted, and it is called again if there
        were any.
        """
        resident = self._acquire(key)
        if resident is None:
            with self._lock:
                loading = self._loading.setdefault(key, threading.Lock())
            with loading:
                resident = self._acquire(key)
                if resident is None:
                    needed = needed_bytes()
                    while needed > free_bytes() and self.evict(most=1):
                        pass
                    resident = _Resident(self._load(load), leases=1)
                    with self._lock:
                        self._residents[key] = resident
        try:
            yield resident.model
        finally:
            with self._lock:
                resident.leases -= 1

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._residents

    def keys(self) -> list[Hashable]:
        """Return the keys of all cached models, least recently used first."""
        with self._lock:
            return list(self._residents)

    def evict(
        self, may_drop: Callable[[Hashable], bool] = lambda _key: True, most: int | None = None
    ) -> int:
        """Drop idle models, least recently used first, and return the number of dropped models.

        An idle model has no lease. Only models where ``may_drop(key)`` is true are dropped, at most
        `most` (None: no limit).
        """
        with self._lock:
            idle = [k for k, r in self._residents.items() if not r.leases and may_drop(k)]
            for key in idle[:most]:
                logger.info("evicting %s", key)
                del self._residents[key]
        release_memory()  # once at the end: a garbage collection can take seconds
        return len(idle[:most])

    def _acquire(self, key: Hashable) -> _Resident[Model] | None:
        with self._lock:
            resident = self._residents.get(key)
            if resident is not None:
                resident.leases += 1
                self._residents.move_to_end(key)
            return resident

    def _load(self, load: Callable[[], Model]) -> Model:
        try:
            return load()
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) and self.evict()):
                raise
        return load()


MODELS: Residency = Residency()
