"""Starting a cluster on this machine, owned by its client."""

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
# A worker that was killed is started again by its nanny, which a local cluster closes for good
# after this time; Dask's 15 seconds are over before a busy machine has imported torch.
RESTARTS = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
# With gilknocker installed (Coiled installs it), Dask polls the GIL every millisecond from a Rust
# thread, which aborts a process that exits at such a moment.
NO_GIL_MONITOR = {"distributed.admin.system-monitor.gil.enabled": False}
GUARD = 'if __name__ == "__main__":'
_safe_blocks = 0  # nesting depth of `safe_path` blocks
END_SECONDS = 5  # how long what hangs may hold up the end of its cluster


class OwningClient(Client):
    """Client that closes its cluster when it is closed itself."""

    cluster: Any

    @property
    def dashboard_link(self) -> str:
        """Address of the dashboard, which need not listen where the scheduler does."""
        spec = getattr(self.cluster, "scheduler_spec", None)
        if spec and str(spec["options"].get("dashboard_address")).startswith(f"{LOOPBACK}:"):
            port = self.cluster.scheduler_info["services"]["dashboard"]
            return str(format_dashboard_link(LOOPBACK, port))
        return str(super().dashboard_link)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Close the client as ``distributed.Client.close`` does, then its cluster.

        An interrupt meanwhile kills the workers.
        """
        cluster = self.cluster
        if cluster is None or self.asynchronous or sys.is_finalizing():
            return super().close(*args, **kwargs)
        if self.status == "closed" and cluster.status == Status.closed:
            return None
        try:
            return unbroken(partial(self._close_all, cluster, *args, **kwargs), cluster)
        except KeyboardInterrupt:
            self.cluster = None  # its remains end with this process
            raise

    def _close_all(self, cluster: Cluster, *args: Any, **kwargs: Any) -> Any:
        """Close client and cluster without logging interrupted heartbeats and tasks.

        A heartbeat or a task may be running when a worker closes, and a process may take seconds to
        end. Dask logs these as errors and warnings, which mean nothing while a cluster closes, so
        the loggers of workers and nannies are silenced.
        """
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
    """Nanny that waits for the end of a process that it has killed, and shields it from Ctrl-C.

    Dask's default is one second, which is too little on a busy machine; closing the cluster
    then raises, and leaves the rest of it open.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with safe_path():
            shield_children()
        super().__init__(*args, **kwargs)

    async def instantiate(self) -> Status:
        """Start the worker's process as ``distributed.Nanny.instantiate`` does, by a safe path."""
        with safe_path():
            return await super().instantiate()

    async def kill(self, timeout: float = 5, reason: str = "nanny-kill") -> None:
        """End the worker's process as ``distributed.Nanny.kill`` does, then wait for its end."""
        process = self.process
        try:
            await super().kill(timeout=timeout, reason=reason)
        except TimeoutError:
            if process is not None:
                await process.stopped.wait()


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keep processes that start in the block from importing Python's modules from where they are.

    The working directory may be a downloaded data set with a struct.py, and comes first in a
    process that is started by ``python -c``, as multiprocessing does. What it imports later are
    the modules of this process: it gets its path.
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
    """Start or close a cluster in a thread, where no KeyboardInterrupt breaks that off.

    Dask waits for ever for the end of a cluster whose closing was broken off. An interrupt of the
    waiting here kills the workers, which ends the work; it is raised then, or after some seconds.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as err:
            done.set_exception(err)

    try:
        threading.Thread(target=run, name="gpuclassify-cluster", daemon=True).start()
    except RuntimeError:  # Python is ending, and starts no threads any more
        run()
    try:
        return done.result()
    except KeyboardInterrupt:
        if isinstance(cluster, SpecCluster):
            cluster.shutdown_on_close = False  # Dask's hook at exit leaves it alone
        for _ in range(10 * END_SECONDS):
            with contextlib.suppress(RuntimeError):  # another one was begun at this moment
                end_workers(cluster)
            if wait([done], 0.1).done:
                break
        raise


def end_workers(cluster: Cluster) -> None:
    """Kill the processes of a cluster's workers, which no others are to follow."""
    for nanny in list(getattr(cluster, "_created", ())):  # those that are being started, too
        if isinstance(nanny, Nanny):
            if nanny.status not in (Status.closing, Status.closed):
                nanny.close_gracefully()
            with contextlib.suppress(ProcessLookupError):
                if (pid := nanny.pid) is not None:
                    os.kill(pid, signal.SIGKILL)


def shield_children() -> None:
    """Block SIGINT in this thread, and so in threads and processes that are started from it.

    A terminal sends Ctrl-C to all processes of a command, but it is for the client, which ends its
    workers itself. The main thread, in which Python runs handlers of signals, is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or not hasattr(signal, "pthread_sigmask"):
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def silence_worker(dask_worker: Worker) -> None:
    """Keep the end of a worker out of its log; one without a nanny shares the user's loggers."""
    if dask_worker.nanny:
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


def start(
    cluster_class: type[SpecCluster], options: dict[str, Any], plugins: Iterable[WorkerPlugin]
) -> OwningClient:
    """Start a ``LocalCluster``, or one of a subclass, with plugins on all workers; connect to it.

    The dashboard listens where the scheduler does, or with TLS, which it has not, on this machine
    alone; on port 8787, or any free one where that is taken. RuntimeError: the cluster does not
    start, or this is a script that a worker imports again.
    """
    refuse_reimported_script()
    if options.get("processes") is not False:
        refuse_workerless_program()
    raise_by_value()(RESTARTS)
    options = {"dashboard_address": _beside_scheduler(options)} | options
    cluster: SpecCluster = object.__new__(cluster_class)  # known before it has started
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
        if scheduler.worker_ttl:  # without one, no worker is removed
            scheduler.worker_ttl = max(scheduler.worker_ttl, WORKER_TTL_SECONDS)
        for plugin in plugins:
            client.register_plugin(plugin)

    return owning_client(cluster, set_up)


def owning_client(cluster: Cluster, set_up: Callable[[Client], None]) -> OwningClient:
    """Return a client that closes its cluster when it closes, fails, or the process ends."""
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

    @atexit.register  # before Dask's hooks, which close the cluster under a client with results
    def close_if_alive() -> None:
        if (client := reference()) is not None:
            client.close()

    return client


def refuse_reimported_script() -> None:
    """Stop a worker process that imports the user's script from starting workers."""
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
    """Raise RuntimeError where no process can be started that could be a worker, with the reason.

    Dask's nannies would wait for ever for such a process, or say that it failed and not why.
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


def _beside_scheduler(options: dict[str, Any]) -> str:
    """Return the address of the dashboard of a cluster with these arguments."""
    security = options.get("security")
    if security is not None and security.require_encryption:
        return dashboard_address()
    if interface := options.get("interface"):
        return dashboard_address(get_ip_interface(interface))
    host, _, port = str(options.get("host") or LOOPBACK).rpartition("://")[2].partition(":")
    return dashboard_address(LOOPBACK if ":" in port else host)  # Dask reads no IPv6 there


def dashboard_address(host: str = LOOPBACK) -> str:
    """Return Dask's usual dashboard port on a host of this machine, or any free one there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, DASHBOARD_PORT))
        except OSError:
            return f"{host}:0"
    return f"{host}:{DASHBOARD_PORT}"
