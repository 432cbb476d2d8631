"""Starting a cluster on this machine, owned by its client."""

import atexit
import contextlib
import inspect
import logging
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from typing import Any

from distributed import Client, Nanny, Status, Worker, WorkerPlugin
from distributed.deploy import Cluster, SpecCluster

from gpuclassify.cluster.plugins import WORKER_TTL_SECONDS, raise_by_value
from gpuclassify.cluster.security import warn_if_open

DASHBOARD_PORT = 8787
# A worker that was killed is started again by its nanny, which a local cluster closes for good
# after this time; Dask's 15 seconds are over before a busy machine has imported torch.
RESTARTS = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
GUARD = 'if __name__ == "__main__":'
END_TIMEOUT = "5 seconds"  # how long a worker that hangs may hold up the end of its cluster


class OwningClient(Client):
    """A client that closes its cluster when it is closed itself."""

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client as ``distributed.Client.close`` does, then its cluster.

        A heartbeat or a task may be under way whenever a worker closes, and a process may take
        seconds to end. Dask logs these as errors and warnings, which tell nothing in a cluster
        that is being closed: the loggers of workers and nannies are silent from here on.
        """
        cluster = self.cluster
        if cluster is None:
            return super().close(*args, **kwargs)
        if cluster.status == Status.running:
            with contextlib.suppress(OSError):  # a timeout is one
                self.sync(self.run, silence_worker, on_error="ignore", callback_timeout=END_TIMEOUT)
        nanny_logger = logging.getLogger("distributed.nanny")
        level = nanny_logger.level
        nanny_logger.setLevel(logging.ERROR)
        try:
            return super().close(*args, **kwargs)
        finally:
            cluster.close()
            nanny_logger.setLevel(level)


class PatientNanny(Nanny):
    """A nanny that waits for the end of a process that it has killed, and shields it from Ctrl-C.

    Dask's own gives it one second, which is too little on a busy machine; closing the cluster
    then raises, and leaves the rest of it open.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        shield_children()
        super().__init__(*args, **kwargs)

    async def kill(self, timeout: float = 5, reason: str = "nanny-kill") -> None:
        """End the worker's process as ``distributed.Nanny.kill`` does, then wait for its end."""
        process = self.process
        try:
            await super().kill(timeout=timeout, reason=reason)
        except TimeoutError:
            if process is not None:
                await process.stopped.wait()


def shield_children() -> None:
    """Block SIGINT in this thread, and so in threads and processes that are started from it.

    A terminal sends Ctrl-C to all processes of a command, but it is for the client, which ends its
    workers itself. The main thread, in which Python runs handlers of signals, is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or not hasattr(signal, "pthread_sigmask"):
        return
    resource_tracker.ensure_running()  # to start it later would lift the block again
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def silence_worker(dask_worker: Worker) -> None:
    """Keep the end of a worker out of its log; one without a nanny shares the user's loggers."""
    if dask_worker.nanny:
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


def start(
    cluster_class: type[SpecCluster], options: dict[str, Any], plugins: Iterable[WorkerPlugin]
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
    raise_by_value()(RESTARTS)
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
    warn_if_open((comm.listen_address for comm in cluster.scheduler.listeners), are_local=True)

    def set_up(client: Client) -> None:
        scheduler = cluster.scheduler
        if scheduler.worker_ttl:  # without one, no worker is given up
            scheduler.worker_ttl = max(scheduler.worker_ttl, WORKER_TTL_SECONDS)
        for plugin in plugins:
            client.register_plugin(plugin)

    return own(cluster, set_up)


def own(cluster: Cluster, set_up: Callable[[Client], None]) -> OwningClient:
    """Connect to a cluster that shall end with its client, or with this process.

    Parameters
    ----------
    cluster : distributed.deploy.Cluster
        Closed if this fails.
    set_up : callable
        Called with the client.
    """
    try:
        client = OwningClient(cluster)
    except BaseException:
        cluster.close()
        raise
    try:
        set_up(client)
    except BaseException:
        client.close()
        raise
    reference = weakref.ref(client)

    @atexit.register  # before Dask's own hooks: they close the cluster under a client with results
    def close_if_alive() -> None:
        if (client := reference()) is not None:
            client.close()

    return client


def refuse_reimported_script() -> None:
    """Stop a worker process that imports the user's script from starting workers of its own."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "__mp_main__":
            raise RuntimeError(
                "get_client() runs again in a worker, because workers import the script that "
                f"started them. Put the script's work below {GUARD!r}:\n\n"
                f"    {GUARD}\n        with get_client() as client:\n            ..."
            )
        frame = frame.f_back


def dashboard_address() -> str:
    """Return Dask's usual dashboard port, or any free one where that is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", DASHBOARD_PORT))
        except OSError:
            return ":0"
    return f":{DASHBOARD_PORT}"
