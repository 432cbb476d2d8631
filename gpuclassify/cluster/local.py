"""Dask clusters on this machine, each closed with its client."""

import atexit
import contextlib
import inspect
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from dask import config
from distributed import Client, Nanny, Status, Worker, WorkerPlugin
from distributed.deploy import Cluster, SpecCluster
from distributed.utils import format_dashboard_link, get_ip_interface

from gpuclassify.cluster.preload import BY_US, SAFE_PATH, WORKER_TTL_SECONDS, raise_by_value
from gpuclassify.cluster.security import warn_if_open
from gpuclassify.settings.paths import exists

Result = TypeVar("Result")

LOOPBACK, DASHBOARD_PORT = "127.0.0.1", 8787
# Timeout for a nanny to restart a killed worker, after which a local cluster closes the nanny.
# Dask's 15 seconds are too short for a busy machine to import torch.
RESTARTS = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
# If gilknocker is installed (by Coiled), Dask polls the GIL every millisecond in a Rust thread,
# which may abort a process at its exit.
NO_GIL_MONITOR = {"distributed.admin.system-monitor.gil.enabled": False}
GUARD = 'if __name__ == "__main__":'
_safe_blocks = 0  # nesting depth of `safe_path` blocks
END_SECONDS = 5  # maximum seconds to wait for hanging work when a cluster ends


class OwningClient(Client):
    """Dask client that owns its cluster: it closes the cluster when it is closed."""

    cluster: Any

    @property
    def dashboard_link(self) -> str:
        """Address of the dashboard, which may listen on another host than the scheduler."""
        spec = getattr(self.cluster, "scheduler_spec", None)
        if spec and str(spec["options"].get("dashboard_address")).startswith(f"{LOOPBACK}:"):
            port = self.cluster.scheduler_info["services"]["dashboard"]
            return str(format_dashboard_link(LOOPBACK, port))
        return str(super().dashboard_link)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client and its cluster; an interrupt meanwhile kills the workers."""
        cluster = self.cluster
        if cluster is None or self.asynchronous or sys.is_finalizing():
            return super().close(*args, **kwargs)
        if self.status == "closed" and cluster.status == Status.closed:
            return None
        try:
            return unbroken(partial(self._close_all, cluster, *args, **kwargs), cluster)
        except KeyboardInterrupt:
            self.cluster = None  # the rest ends with this process
            raise

    def _close_all(self, cluster: Cluster, *args: Any, **kwargs: Any) -> Any:
        """Close client and cluster without Dask's errors and warnings about interrupted work."""
        if cluster.status == Status.running:
            with contextlib.suppress(OSError):  # includes timeouts
                self.sync(self.run, silence_worker, on_error="ignore", callback_timeout=END_SECONDS)
        nanny_logger = logging.getLogger("distributed.nanny")
        level = nanny_logger.level
        nanny_logger.setLevel(logging.ERROR)
        try:
            return super().close(*args, **kwargs)
        finally:
            cluster.close()
            nanny_logger.setLevel(level)


class PatientNanny(Nanny):
    """Dask nanny (the parent process of a worker) that waits longer for a killed worker to end.

    Dask waits for one second, which is too short on a busy machine: closing the cluster would raise
    an error. This nanny also blocks Ctrl-C in the worker, which the client ends itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with safe_path():
            shield_children()
        super().__init__(*args, **kwargs)

    async def instantiate(self) -> Status:
        """Start the worker's process like ``distributed.Nanny.instantiate``, under `safe_path`."""
        with safe_path():
            return await super().instantiate()

    async def kill(self, timeout: float = 5, reason: str = "nanny-kill") -> None:
        """End the worker's process, and wait until it has ended, even beyond `timeout` seconds."""
        process = self.process
        try:
            await super().kill(timeout=timeout, reason=reason)
        except TimeoutError:
            if process is not None:
                await process.stopped.wait()


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Prevent processes that start in the block from importing modules from the working directory.

    They would have it first in ``sys.path`` until multiprocessing sets the path of this process, so
    that a downloaded file struct.py would be imported instead of Python's module.
    """
    global _safe_blocks
    if _safe_blocks == 0 and SAFE_PATH not in os.environ:
        os.environ[SAFE_PATH] = BY_US
    _safe_blocks += 1
    try:
        yield
    finally:
        _safe_blocks -= 1
        if _safe_blocks == 0 and os.environ.get(SAFE_PATH) == BY_US:
            del os.environ[SAFE_PATH]


def unbroken(work: Callable[[], Result], cluster: Cluster) -> Result:
    """Call ``work()``, which starts or closes a cluster, in a thread that Ctrl-C cannot interrupt.

    Dask would wait forever for a cluster whose close was interrupted. Instead, Ctrl-C kills the
    workers of `cluster`, which ends `work`, and is raised again at most 5 seconds later.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as err:
            done.set_exception(err)

    try:
        threading.Thread(target=run, name="gpuclassify-cluster", daemon=True).start()
    except RuntimeError:  # Python is exiting, and starts no threads
        run()
    try:
        return done.result()
    except KeyboardInterrupt:
        if isinstance(cluster, SpecCluster):
            cluster.shutdown_on_close = False  # skipped by Dask's exit hook
        for _ in range(10 * END_SECONDS):
            with contextlib.suppress(RuntimeError):  # the list has changed meanwhile
                end_workers(cluster)
            if wait([done], 0.1).done:
                break
        raise


def end_workers(cluster: Cluster) -> None:
    """Kill the worker processes of a local cluster, which their nannies then do not restart."""
    for nanny in list(getattr(cluster, "_created", ())):  # includes starting workers
        if isinstance(nanny, Nanny):
            if nanny.status not in (Status.closing, Status.closed):
                nanny.close_gracefully()
            with contextlib.suppress(ProcessLookupError):
                if (pid := nanny.pid) is not None:
                    os.kill(pid, signal.SIGKILL)


def shield_children() -> None:
    """Block SIGINT (Ctrl-C) in the calling thread, and in threads and processes it starts later.

    Nothing is blocked in the main thread, where Python runs signal handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or not hasattr(signal, "pthread_sigmask"):
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def silence_worker(dask_worker: Worker) -> None:
    """Turn off the log of a worker that is about to close, unless it has no nanny."""
    if dask_worker.nanny:
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


def start(
    cluster_class: type[SpecCluster], options: dict[str, Any], plugins: Iterable[WorkerPlugin]
) -> OwningClient:
    """Start a local cluster, and return a client that closes the cluster when it is closed.

    `cluster_class` is ``LocalCluster`` or a subclass, `options` are its arguments, and `plugins`
    are registered on all workers. A warning is logged if other machines can connect without TLS.
    Raises RuntimeError if the cluster or worker processes cannot start.
    """
    refuse_reimported_script()
    if options.get("processes") is not False:
        refuse_workerless_program()
    raise_by_value()(RESTARTS)
    options = {"dashboard_address": _dashboard_of(options)} | options
    cluster: SpecCluster = object.__new__(cluster_class)  # exists before it has started
    try:
        with config.set(NO_GIL_MONITOR):
            unbroken(partial(cluster_class.__init__, cluster, **options), cluster)
    except (TypeError, ValueError):
        raise
    except Exception as err:
        reason = str(err).rstrip(".")
        raise RuntimeError(
            f"{cluster_class.__name__} did not start: {reason}. In a script, get_client() belongs "
            f"below {GUARD!r}: workers are new processes that import the script."
        ) from err
    warn_if_open(
        (comm.listen_address for comm in cluster.scheduler.listeners),
        "Pass security=True, or certificates; or keep it on this machine with host='127.0.0.1'",
    )

    def set_up(client: Client) -> None:
        scheduler = cluster.scheduler
        if scheduler.worker_ttl:  # if None, no worker is removed
            scheduler.worker_ttl = max(scheduler.worker_ttl, WORKER_TTL_SECONDS)
        for plugin in plugins:
            client.register_plugin(plugin)

    return owning_client(cluster, set_up)


def owning_client(cluster: Cluster, set_up: Callable[[Client], None]) -> OwningClient:
    """Return a client of `cluster` that closes it when the client is closed or this process ends.

    ``set_up(client)`` configures the cluster; if it fails, the cluster is closed, too.
    """
    try:
        client = OwningClient(cluster)
    except BaseException:
        unbroken(cluster.close, cluster)
        raise
    try:
        set_up(client)
    except BaseException:
        client.close()
        raise
    reference = weakref.ref(client)

    @atexit.register  # runs before Dask's hooks, which close the cluster first
    def close_if_alive() -> None:
        if (client := reference()) is not None:
            client.close()

    return client


def refuse_reimported_script() -> None:
    """Raise RuntimeError if this process is a worker that is importing the user's script."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "__mp_main__":
            raise RuntimeError(
                "get_client() runs again in a worker, because workers import the script that "
                f"started them. Put the script's work below {GUARD!r}:\n\n"
                f"    {GUARD}\n        with get_client() as client:\n            ..."
            )
        frame = frame.f_back


def refuse_workerless_program() -> None:
    """Raise RuntimeError if this program's script is no file, or semaphores cannot be made.

    Dask's nannies, which start the workers, would wait forever or fail without a reason.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    is_module = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    if script is not None and not is_module and not exists(script):
        raise RuntimeError(
            f"workers are new processes that import this program, and {script} is no file: it was "
            "read from standard input, or was removed. Save it in a file, with the call below "
            f"{GUARD!r}, or pass processes=False for workers that are threads"
        )
    try:
        with safe_path():  # sharing memory starts a Python process
            multiprocessing.get_context("spawn").Lock()
    except OSError as err:
        raise RuntimeError(
            f"no worker can be started: semaphores, which processes share, cannot be made here "
            f"({err}). Mount /dev/shm where it is missing, full or read-only, as containers have "
            "it by --shm-size, or pass processes=False for workers that are threads"
        ) from err


def _dashboard_of(options: dict[str, Any]) -> str:
    """Return the dashboard's address: on the scheduler's host, or on loopback, such as with TLS."""
    security = options.get("security")
    if security is not None and security.require_encryption:
        return dashboard_address()
    if interface := options.get("interface"):
        return dashboard_address(get_ip_interface(interface))
    host, _, port = str(options.get("host") or LOOPBACK).rpartition("://")[2].partition(":")
    return dashboard_address(LOOPBACK if ":" in port else host)  # Dask does not support IPv6 there


def dashboard_address(host: str = LOOPBACK) -> str:
    """Return `host` and port 8787, or 0 (any free port) if it is taken: "127.0.0.1:8787"."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, DASHBOARD_PORT))
        except OSError:
            return f"{host}:0"
    return f"{host}:{DASHBOARD_PORT}"
