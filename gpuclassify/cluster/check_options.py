"""Refusing options that do not exist, with the nearest that do, and counts that are none."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

# Set by get_client itself, or without a meaning for a client that is not asynchronous.
MANAGED_OPTIONS = {"self", "asynchronous", "loop", "start", "ip", "nthreads", "services"}


def check_options(
    options: Iterable[str], targets: Iterable[Any], also_near: Iterable[str] = ()
) -> None:
    """Refuse names that none of the targets' signatures has.

    Parameters
    ----------
    options : iterable of str
        Names as they were given.
    targets : iterable of callable
        Classes that share the arguments, outermost first.
    also_near : iterable of str
        Names that an error may suggest beside those of the targets.

    Raises
    ------
    TypeError
        With the nearest existing names.
    """
    targets = list(targets)
    accepted = {name for target in targets for name in names_of(target)} - MANAGED_OPTIONS
    for name in options:
        if name in accepted:
            continue
        near = difflib.get_close_matches(name, sorted(accepted | set(also_near)), n=3)
        known_by = targets[0].__name__
        cure = f"did you mean {' or '.join(map(repr, near))}?" if near else f"see {known_by}"
        raise TypeError(f"get_client() and {known_by} have no option {name!r}; {cure}")


def names_of(target: Any) -> list[str]:
    """The named parameters of a callable."""
    parameters = inspect.signature(target).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Return `value`, or raise ValueError if it is no whole number of at least that many."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is no whole number of {least} or more")
    return value
