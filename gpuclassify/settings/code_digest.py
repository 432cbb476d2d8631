"""Digests of users' code, and of the values that it uses.

They identify Dask keys, loaded models and jobs. A class that is redefined in a notebook keeps its
name, but must not get results or models of the earlier definition. An equal function in another
kernel, file or line must get the same digest. cloudpickle's bytes are unsuitable: they contain
paths, line numbers and the order of sets, and importable helpers only by name.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dis
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from gpuclassify.settings.signatures import as_json

PACKAGE = __name__.partition(".")[0]
_LIBRARY = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_PACKAGES = {"site-packages", "dist-packages"}
_PLAIN = {str, bytes, int, float, complex, bool, type(None), type(...)}
# Packages of arrays and frames, whose classes are digested by name.
_ARRAYS = {"numpy", "pandas", "pyarrow", "scipy", "torch", "cudf", "cupy"}
# Packages of arrays and frames on GPUs, and their methods that copy to host memory.
_TO_HOST = {"cudf": "to_pandas", "cupy": "get"}
# Attributes of modules and classes that state the location of their source.
_SOURCE_NAMES = {"__name__", "__file__", "__path__", "__package__", "__spec__", "__loader__"}
_LINES = {"__firstlineno__", "__static_attributes__"}
# Class members that do not affect behaviour, or appear during use: pickle adds the names of slots,
# and a Flag adds each combination that is looked up.
_IGNORED = {
    *("__dict__", "__weakref__", "__doc__", "__signature__", "__module__", "__slotnames__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("_value2member_map_", "_hashable_values_", "_unhashable_values_", "_unhashable_values_map_"),
    *_LINES,
}
_HAS_DOCSTRING = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # since Python 3.14
# Caches, such as of the types that a singledispatch function has seen.
_CACHES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def json_setting(value: Any) -> Any:
    """Convert a setting's value to a JSON value: callables and long values become digests."""
    return value_digest(value) if callable(value) else as_json(value)


def value_digest(value: Any) -> str:
    """Return a digest of any value, 64 hex digits, equal in every process.

    - A function is digested by its bytecode, defaults, closure, and the globals and modules that it
      reads, recursively through functions and classes of notebooks, scripts and the user's
      modules.
    - Functions and classes of the standard library and of installed packages are digested by name,
      except `value` itself and the class of `value`. Classes of this package and of array libraries
      are digested by name in any case.
    - Variables that code assigns in outer scopes (``global``, ``nonlocal``), file names, line
      numbers, comments and docstrings are ignored.
    - Any other object is digested by its class and its pickled state (by its Dask token if its
      class has ``__dask_tokenize__``), or only by its class if it cannot be pickled, such as a
      lock.

    Dask's `tokenize` is unsuitable for digests that are stored: it hashes buffers, such as arrays
    and pickled classes, by xxhash or mmh3 if one of these is installed, and else by SHA-1.
    """
    return _Digest(tuple(_names_in_full(value))).of(value)


class _Digest:
    """SHA-256 of a value, computed recursively from the simpler values that it consists of.

    `in_full` are prefixes of names of installed code that is digested by content, not by name.
    """

    def __init__(self, in_full: tuple[str, ...]) -> None:
        self._in_full = in_full
        # Number and object by address. Repeated objects are digested by number: containers within
        # themselves, and all functions and classes.
        self._known: dict[int, tuple[int, Any]] = {}
        self._count = 0

    def of(self, value: Any) -> str:
        self._hash = hashlib.sha256()
        self._add(value)
        return self._hash.hexdigest()

    def _add(self, value: Any) -> None:
        is_code = isinstance(value, (FunctionType, type))
        if type(value) in _PLAIN:
            self._write(repr(value))
        elif is_code and self._is_name_enough(value):
            self._write(f"{value.__module__}.{value.__qualname__}")
        elif id(value) in self._known:
            self._write(f"again {self._known[id(value)][0]}")
        else:
            self._known[id(value)] = self._count, value
            self._count += 1
            parts = [*self._parts(value)]
            self._write(f"{type(value).__name__} of {len(parts)}")
            for part in parts:
                self._add(part)
            if not is_code:
                del self._known[id(value)]

    def _write(self, line: str) -> None:
        self._hash.update(line.encode("utf-8", "backslashreplace") + b"\n")

    def _item_digest(self, item: Any) -> str:
        """Return a text to hash for a set's item; sorting the texts makes the digest stable."""
        if type(item) in _PLAIN:
            return repr(item)
        other = copy.copy(self)
        other._known = {**self._known}
        return other.of(item)

    def _parts(self, value: Any) -> Iterable[Any]:
        """Return simpler values to hash in place of `value`, such as the members of a class."""
        kind = type(value)
        if isinstance(value, type):
            members = {name: vars(value)[name] for name in sorted({*vars(value)} - _IGNORED)}
            return value.__qualname__, kind, value.__bases__, members, _annotations(value)
        if isinstance(value, ModuleType):
            return (value.__name__,)
        if kind in (tuple, list):
            return list(value)
        if kind in (dict, MappingProxyType):
            return *value, *value.values()
        if kind in (set, frozenset):
            return sorted(map(self._item_digest, value))
        if kind is FunctionType:
            return _function_parts(value)
        if kind is CodeType:
            return _code_parts(value)
        if kind is MethodType:
            return value.__func__, value.__self__
        if kind is property:
            return value.fget, value.fset, value.fdel
        return _object_parts(value)

    def _is_name_enough(self, value: Any) -> bool:
        """Return whether a function or class is digested by its name alone, instead of its code.

        True if it is installed, can be found by its name, and has none of the prefixes `in_full`.
        """
        home, name = str(value.__module__), value.__qualname__
        if not _is_installed(home) or f"{home}.{name}.".startswith(self._in_full):
            return False
        members = [sys.modules.get(home), *name.split(".")]
        return functools.reduce(lambda owner, part: getattr(owner, part, None), members) is value


def _names_in_full(value: Any) -> Iterator[str]:
    """Yield prefixes of names, such as ``module.Class.``, of code to digest in full for `value`.

    The code is the function `value`, or a class (`value` or its own) and its base classes in the
    same package. Classes of this package and of array libraries are left out.
    """
    if isinstance(value, functools.partial):
        yield from _names_in_full(value.func)
    elif isinstance(value, FunctionType):
        yield f"{value.__module__}.{value.__qualname__}."
    else:
        bound = value.__self__ if isinstance(value, MethodType) else value
        owner = bound if isinstance(bound, type) else type(bound)
        for base in owner.__mro__:
            if _top(base.__module__) == _top(owner.__module__) not in {PACKAGE, *_ARRAYS}:
                yield f"{base.__module__}.{base.__qualname__}."


def _is_installed(name: str) -> bool:
    """Return whether a module is in this package, the standard library or site-packages."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules:
        with contextlib.suppress(ImportError, ValueError):
            file = getattr(importlib.util.find_spec(_top(name)), "origin", None)
    if file is None:
        return name in sys.builtin_module_names
    is_library = file.startswith(_LIBRARY) or not _PACKAGES.isdisjoint(Path(file).parts)
    return is_library or file in ("built-in", "frozen") or _top(name) == PACKAGE


def _function_parts(function: FunctionType) -> tuple[Any, ...]:
    code, scope = function.__code__, function.__globals__
    uses: dict[str, dict[str, None]] = {use: {} for use in ("named", "read", "written", "imported")}
    for name, use in _uses(code):
        uses[use][name] = None
    written = uses["written"]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closed = {name: _content(cell) for name, cell in cells if name not in written}
    values = {n: scope[n] for n in uses["read"] if n in scope and n not in written}
    modules = [_imported(name, scope) for name in uses["imported"]]
    members = _members([*modules, *closed.values(), *values.values()], sorted(uses["named"]))
    defaults = (function.__defaults__, function.__kwdefaults__)
    wrapped = getattr(function, "__wrapped__", None)
    return function.__qualname__, code, *defaults, closed, values, members, wrapped


def _members(values: list[Any], names: list[str]) -> dict[str, Any]:
    """Return attributes of the user's modules among `values`, by name such as ``utils.clean``.

    `names` are the attributes to look up. Attributes found are appended to `values`.
    """
    members: dict[str, Any] = {}
    for module in values:  # grows in the loop, to examine modules of modules
        if isinstance(module, ModuleType) and not _is_installed(module.__name__):
            for name in names:
                key = f"{module.__name__}.{name}"
                with contextlib.suppress(Exception):  # most names are no members
                    if key not in members and not hasattr(ModuleType, name):
                        members[key] = getattr(module, name)
                        values.append(members[key])
    return members


def _imported(name: str, scope: dict[str, Any]) -> ModuleType | None:
    """Import a module named in a function's body; None if it is installed or cannot be imported."""
    with contextlib.suppress(Exception, SystemExit):  # the module may exist on workers only
        name = importlib.util.resolve_name(name, scope.get("__package__"))
        if not _is_installed(name):
            return importlib.import_module(name)
    return None


def _uses(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield (name, use) for names in a code object and in the code objects nested in it.

    Each attribute, global and import is "named". In addition, a global may be "read", a module
    "imported", and a name of an outer scope "written".
    """
    steps = _steps(code)
    yield from ((name, "named") for name in code.co_names if name not in _SOURCE_NAMES)
    for at, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            if step.argval not in _SOURCE_NAMES:
                yield step.argval, "read"
        elif step.opname == "IMPORT_NAME":  # two constants precede it: level and names
            yield "." * steps[at - 2].argval + step.argval, "imported"
        elif step.opname == "STORE_GLOBAL" or (
            step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        ):
            yield step.argval, "written"
        elif isinstance(step.argval, CodeType):
            yield from _uses(step.argval)


def _code_parts(code: CodeType) -> Iterator[Any]:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    yield code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from (*counts, code.co_flags & ~_HAS_DOCSTRING, code.co_exceptiontable)
    for step in _steps(code):
        # Use the constant instead of its index, because a docstring shifts the indices.
        yield step.opname
        yield None if step.opcode in dis.hasconst else step.arg
        yield step.argval


def _steps(code: CodeType) -> list[dis.Instruction]:
    """Return bytecode instructions, without ``EXTENDED_ARG`` and assignments to names in `_LINES`.

    Class bodies assign these since Python 3.13, such as the class's line number.
    """
    # An extension is part of the argument of the next instruction.
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    stores = {at for at, s in enumerate(steps) if s.opname == "STORE_NAME" and s.argval in _LINES}
    return [step for at, step in enumerate(steps) if not stores & {at, at + 1}]


def _object_parts(value: Any) -> tuple[Any, ...]:
    """Return values to hash in place of an object: its class, and its content or pickled state."""
    kind, home = type(value), _top(type(value).__module__)
    if isinstance(value, _CACHES):
        return (kind,)
    if hasattr(kind, "__dask_tokenize__"):
        return kind, value.__dask_tokenize__()
    if hasattr(value, "__wrapped__"):  # a classmethod, or a cached function
        return kind, value.__wrapped__
    if hasattr(value, method := _TO_HOST.get(home, "")):
        return kind, getattr(value, method)()
    if home == "torch" and hasattr(value, "untyped_storage"):
        import torch

        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return kind, str(value.dtype), tuple(value.shape), flat.numpy()
    if home == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        return kind, value.dtype.descr, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    if home == "pyarrow" and hasattr(value, "nbytes") and hasattr(value, "validate"):
        return kind, _arrow_digest(value)
    reduce = copyreg.dispatch_table.get(kind)
    try:
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # a lock, or any error of a user's class
        return (kind,)
    if isinstance(reduced, str):  # a name, such as of a function that C or Cython defines
        return getattr(value, "__module__", kind.__module__), reduced
    create, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    states = [lasting(kind, part) for part in (state if isinstance(state, tuple) else (state,))]
    return kind, create, arguments, states, list(items or ()), list(pairs or ())


def _arrow_digest(value: Any) -> str:
    """Return the SHA-256 of Arrow data as an IPC stream; pickles differ by cached null counts."""
    import pyarrow as pa

    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    table = value if isinstance(value, pa.Table) else pa.table({"": value})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def lasting(kind: type, state: Any) -> Any:
    """Return an object's state without cached properties and source locations.

    These may differ between equal objects. `kind` is the object's class, and `state` its attributes
    by name; another value is returned unchanged. None if no attribute is left.
    """
    if not isinstance(state, dict):
        return state
    cached = functools.cached_property
    kept = [name for name in state if not isinstance(getattr(kind, str(name), None), cached)]
    if _top(kind.__module__) == "pandas":
        kept = [name for name in kept if name != "_cache"]
    # An object whose state is cached properties only has no state before the first is cached.
    return {name: state[name] for name in kept if name not in _IGNORED} or None


def _annotations(owner: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(owner, format=Format.STRING)
    return dict(vars(owner).get("__annotations__", {}))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return ...


def _top(name: str) -> str:
    return str(name).partition(".")[0]
