"""Processes that are killed at a change of the file system."""

import builtins
import io
import itertools
import os
import signal
import traceback

import safetensors.numpy
import safetensors.torch

CHANGES = ("link", "mkdir", "remove", "rename", "replace", "rmdir", "truncate", "unlink")


def kills(action, prepare):
    """Run `action` after `prepare`, killed before its first change, its second, and so on.

    Yields after each kill, with what `prepare` gave, and ends when nothing is left to be killed.
    """
    for number in itertools.count(1):
        made = prepare()
        if not is_killed(action, number):
            assert number > 5, "too few changes were seen"
            return
        yield made


def is_killed(action, number=0):
    """Whether a process of its own that runs `action` is killed at the change of this number."""
    child = os.fork()
    if not child:
        try:
            _kill_before(number)
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def _kill_before(number):
    """End this process before it changes the file system for the `number`-th time."""
    count = itertools.count(1)

    def change():
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(module, name, is_change=lambda *_, **__: True):
        own = getattr(module, name)

        def wrapped(*args, **options):
            if is_change(*args, **options):
                change()
            return own(*args, **options)

        setattr(module, name, wrapped)

    for name in CHANGES:
        wrap(os, name)
    wrap(os, "open", lambda path, flags, *_, **__: flags & (os.O_WRONLY | os.O_RDWR))
    for module in (builtins, io):
        wrap(module, "open", lambda path, mode="r", *_, **__: not set(mode).isdisjoint("wax+"))
    for module in (safetensors.numpy, safetensors.torch):  # which write without Python
        wrap(module, "save_file")
