"""A digest of the code of a class that is not part of this package.

Dask keys and loaded models are remembered by it: a class that is defined anew in a notebook keeps
its name, and must not get the results or the module of the earlier definition.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))


def code_digest(owner: type) -> str:
    """Digest of what `owner` and its bases outside this package define; equal in every process.

    Follows functions and classes that the code names as far as they have no module of their own to
    be imported from: those in a script, a notebook or a function.
    """
    digest = hashlib.sha256()
    seen: set[int] = set()
    for klass in owner.__mro__:
        if klass.__module__.partition(".")[0] not in (_PACKAGE, "abc", "builtins"):
            for part in _class_parts(klass, seen):
                digest.update(part.encode())
    return digest.hexdigest()


def _class_parts(klass: type, seen: set[int]) -> Iterator[str]:
    if id(klass) in seen:
        return
    seen.add(id(klass))
    yield f"class {klass.__qualname__} {[base.__qualname__ for base in klass.__bases__]}"
    for name, value in sorted(vars(klass).items()):
        if name not in ("__dict__", "__weakref__", "__doc__", "__signature__", "__module__"):
            yield name
            yield from _parts(value, seen)


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """What tells a value: all of a plain one, the code of a function, the name of anything else."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, (set, frozenset)):
        yield str(sorted(map(repr, value)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from _parts(item, seen)
    elif isinstance(value, CodeType):
        yield from _code_parts(value, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _parts(value.__func__, seen)
    elif isinstance(value, property):
        yield from _parts((value.fget, value.fset), seen)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif isinstance(value, FunctionType):
        yield from _function_parts(value, seen)
    elif isinstance(value, type) and _is_by_value(value):
        yield from _class_parts(value, seen)
    else:
        yield str(getattr(value, "__qualname__", type(value).__qualname__))


def _function_parts(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield function.__qualname__
    if id(function) in seen or not _is_by_value(function):
        return
    seen.add(id(function))
    yield from _code_parts(function.__code__, seen)
    yield from _parts((function.__defaults__, function.__kwdefaults__), seen)
    yield from _parts([cell.cell_contents for cell in function.__closure__ or ()], seen)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield from _parts(function.__globals__[name], seen)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _parts(wrapped, seen)


def _code_parts(code: CodeType, seen: set[int]) -> Iterator[str]:
    yield code.co_code.hex()
    yield str(code.co_names + code.co_varnames)
    yield from _parts(code.co_consts, seen)


def _is_by_value(value: Any) -> bool:
    """Whether pickling ships the definition itself, as for what no module can be asked for."""
    return value.__module__ == "__main__" or "<locals>" in value.__qualname__
