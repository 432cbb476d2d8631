"""Starting a cluster on this machine, owned by its client."""

import atexit
import socket
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from distributed import Client, WorkerPlugin
from distributed.deploy import Cluster

DASHBOARD_PORT = 8787
GUARD = 'if __name__ == "__main__":'


class OwningClient(Client):
    """A client that closes its cluster when it is closed itself."""

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client as ``distributed.Client.close`` does, then its cluster."""
        cluster = self.cluster
        try:
            return super().close(*args, **kwargs)
        finally:
            if cluster is not None:
                cluster.close()


def start(
    cluster_class: type[Cluster], options: dict[str, Any], plugins: Iterable[WorkerPlugin]
) -> OwningClient:
    """Start a cluster and connect to it.

    Parameters
    ----------
    cluster_class : type
        ``distributed.LocalCluster`` or a subclass.
    options : dict
        Its arguments. The dashboard takes port 8787, or any free one where that is taken.
    plugins : iterable of WorkerPlugin
        Set up on every worker, and on every worker that joins later.

    Raises
    ------
    RuntimeError
        The cluster does not start, or this is a script that a worker imports again.
    """
    refuse_reimported_script()
    options = {"dashboard_address": dashboard_address()} | options
    try:
        cluster = cluster_class(**options)
    except (TypeError, ValueError):
        raise
    except Exception as err:
        reason = str(err).rstrip(".")
        raise RuntimeError(
            f"{cluster_class.__name__} did not start: {reason}. In a script, get_client() belongs "
            f"below {GUARD!r}: workers are new processes that import the script."
        ) from err
    try:
        client = OwningClient(cluster)
    except BaseException:
        cluster.close()
        raise
    try:
        for plugin in plugins:
            client.register_plugin(plugin)
    except BaseException:
        client.close()
        raise
    # Before Dask's own exit hooks: they close the cluster under a client that holds results.
    atexit.register(_close_if_alive, weakref.ref(client))
    return client


def _close_if_alive(reference: weakref.ref[OwningClient]) -> None:
    client = reference()
    if client is not None:
        client.close()


def refuse_reimported_script() -> None:
    """Stop a worker process that imports the user's script from starting workers of its own."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "__mp_main__":
            raise RuntimeError(
                "get_client() runs again in a worker, because workers import the script that "
                f"started them. Put the script's work below {GUARD!r}:\n\n"
                f"    {GUARD}\n        with get_client() as client:\n            ..."
            )
        frame = frame.f_back  # type: ignore[assignment]


def dashboard_address() -> str:
    """Return Dask's usual dashboard port, or any free one where that is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", DASHBOARD_PORT))
        except OSError:
            return ":0"
    return f":{DASHBOARD_PORT}"
