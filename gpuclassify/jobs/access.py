"""Storage options, which may hold keys: in process memory alone, shared by direct calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

_options: dict[str, dict[str, Any]] = {}


def remember_options(name: str, storage_options: Mapping[str, Any]) -> None:
    """Keep the storage options of one place in this process's memory, and nowhere else.

    Parameters
    ----------
    name : str
        What tasks ask for them by; itself no secret.
    storage_options : mapping
        For fsspec.
    """
    _options[name] = dict(storage_options)


def options_for(name: str) -> dict[str, Any]:
    """The storage options that were remembered; none leaves fsspec to its own configuration."""
    return _options.get(name, {})


def share_options_with_workers(client: Any, names: list[str]) -> None:
    """Hand remembered options to all present and future workers of a client.

    Parameters
    ----------
    client : distributed.Client
    names : list of str
    """
    for name in names:
        if options_for(name):
            client.register_plugin(_options_plugin_class()(name, options_for(name)))


@functools.cache
def _options_plugin_class() -> type:
    """Make the plugin class late: its base class needs distributed, which is slow to import."""
    from distributed.diagnostics.plugin import WorkerPlugin

    class OptionsPlugin(WorkerPlugin):
        """Remembers one place's storage options in a worker process."""

        def __init__(self, place: str, options: dict[str, Any]):
            self.name = f"gpuclassify-options-{place}"
            self._place = place
            self._options = options

        def __repr__(self) -> str:
            return f"<OptionsPlugin {self._place}>"

        def setup(self, worker: Any) -> None:
            remember_options(self._place, self._options)

    return OptionsPlugin
