"""Ctrl-C is for the client, which ends the workers it has started: they never hear of it.

A terminal sends SIGINT to all processes of a command.
"""

import signal
import threading
from multiprocessing import resource_tracker


def shield_children() -> None:
    """Block SIGINT in this thread, and so in threads and processes that are started from it.

    The main thread, in which Python runs handlers of signals, is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or not hasattr(signal, "pthread_sigmask"):
        return
    resource_tracker.ensure_running()  # to start it later would lift the block again
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
