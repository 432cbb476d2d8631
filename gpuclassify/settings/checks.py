"""Checks of users' arguments, with messages that name the value passed and the values allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Reversible, Sequence, Set
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

P = ParamSpec("P")
T = TypeVar("T")
Backend = Literal["pandas", "cudf"]
BACKENDS = get_args(Backend)  # supported dataframe libraries
SHARE = {"is_share": True}  # metadata of a number from 0 to 1
# Packages that may call a mapper for the user, such as in `ddf.pipe`.
_BETWEEN = frozenset({"gpuclassify", "dask", "dask_cudf", "pandas", "cudf"})
_COLLECTIONS = (list, tuple, set, frozenset)
# Descriptions of settings with these types.
_TEXTS: dict[tuple[Any, ...], str] = {(str,): "a text", (str, os.PathLike[str]): "a name or a path"}


class HubName(str):
    """Model name that means a Hub repository, even if a local directory has the same name."""

    known: ClassVar[set[str]] = set()

    def __new__(cls, name: str) -> HubName:
        """Make the name, and add it to `known`."""
        cls.known.add(str(name))
        return super().__new__(cls, name)


def install(extra: str) -> str:
    """Return the command that installs an optional extra of gpuclassify, for error messages."""
    return f"pip install 'gpuclassify[{extra}]' (in a checkout '.[{extra}]')"


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Warn with `message` at the user's line of code, but only once per process."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def plain_value(value: Any) -> Any:
    """Convert a setting that is a value of numpy, or a column of a frame, to plain Python values.

    Equal settings then have equal keys in Dask, and equal text in reports. Frames are unchanged.
    """
    if hasattr(value, "columns"):
        return value
    if hasattr(value, "to_pandas"):  # columns of cudf have no `tolist`
        value = value.to_pandas()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {plain_value(name): plain_value(item) for name, item in value.items()}
    return type(value)(map(plain_value, value)) if type(value) in _COLLECTIONS else value


def with_plain_values(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to convert numpy values of keyword arguments, and to refuse sets."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **settings: P.kwargs) -> T:
        for name, value in (*zip(signature.parameters, args, strict=False), *settings.items()):
            check_ordered(name, value)
        return function(*args, **{name: plain_value(value) for name, value in settings.items()})

    return call


def label_tuple(name: str, labels: object, *, keep_order: bool = False) -> tuple[str, ...] | None:
    """Convert the setting `name`, a label or several, to a tuple of labels, or None.

    Labels are sorted, without repeats, unless `keep_order`. Raises TypeError or ValueError for
    other values.
    """
    if labels is None:
        return None
    if isinstance(labels, str):
        return (labels,)
    if not isinstance(labels, Iterable) or isinstance(labels, Mapping):
        raise TypeError(f"{name}={labels!r}: pass a label or a list of labels")
    if keep_order:
        check_ordered(name, labels)
    labels = tuple(labels)
    wrong = [label for label in labels if not isinstance(label, str)]
    if wrong:
        raise TypeError(
            f"{name} holds {wrong[0]!r} of type {type(wrong[0]).__name__}: labels are str"
        )
    if not labels:
        raise ValueError(f"{name}=[] names no label: pass at least one, or leave it out for all")
    return labels if keep_order else tuple(sorted(set(labels)))


def numbers_by_label(name: str, value: Any) -> float | tuple[tuple[str, float], ...] | None:
    """Convert the setting `name`, a number or a number for each label, to a hashable value.

    A number becomes a float, and a mapping from labels to numbers becomes sorted pairs. Raises
    TypeError or ValueError for other values.
    """
    if isinstance(value, tuple) and all(isinstance(pair, tuple) for pair in value):
        value = dict(value)
    if isinstance(value, Mapping):
        if not value:
            raise ValueError(f"{name}={{}} names no label: pass at least one, or leave it out")
        for label, number in value.items():
            check_text(f"{name}'s key", label, "a label")
            check_number(name, number)
        return tuple(sorted((label, float(number)) for label, number in value.items()))
    if value is None:
        return None
    check_number(name, value, "a number, or a dict of label to number")
    return float(value)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean 'X'?", where X is the nearest of `names`; "" if none is near."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_names(
    owner: str, what: str, names: Iterable[Any], known: Collection[str], cure: str = ""
) -> None:
    """Raise TypeError if any of `names` is not in `known`, and suggest the nearest known name.

    `owner` and `what` begin the message, such as "a job has" and "setting"; `cure` ends it, by
    default with all known names.
    """
    for name in names:
        if name not in known:
            cure = cure or f"{what.capitalize()}s are {', '.join(known)}."
            raise TypeError(f"{owner} no {what} {name!r}.{nearest(str(name), known)} {cure}")


def check_choice(name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless the `value` of the setting `name` is one of `choices`."""
    if value not in choices:
        hint = nearest(value, [c for c in choices if c]) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.{hint}")


def check_ordered(name: str, value: object) -> None:
    """Raise TypeError if a setting is a set, because its order differs between processes."""
    if isinstance(value, Set) and not isinstance(value, Reversible):  # dict keys are ordered
        raise TypeError(f"{name}={value!r} is a {type(value).__name__} without order: pass a list")


def check_text(name: str, value: object, what: str, least: int = 1) -> None:
    """Raise TypeError unless a setting's value is a string of at least `least` characters.

    `what` says in the message what it should be, such as "a column name".
    """
    if not isinstance(value, str) or len(value) < least:
        raise TypeError(f"{name}={value!r} is not {what}")


def check_count(name: str, value: object, least: int = 1, *, may_be_none: bool = False) -> None:
    """Raise TypeError or ValueError unless a setting's value is an integer of at least `least`.

    None is accepted if `may_be_none`.
    """
    if value is None and may_be_none:
        return
    cure = ", or leave it out" if may_be_none else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass a whole number{cure}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}{cure}")


def check_number(name: str, value: object, what: str = "a number") -> None:
    """Raise TypeError unless a setting's value is an int or a float, but no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")


def check_share(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless a setting's value is a number from 0 to 1."""
    check_number(name, value, "a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is not from 0 to 1")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless a setting's value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass True or False")


def check_settings(options: object) -> None:
    """Raise TypeError or ValueError unless the fields of a dataclass object have valid values.

    Type hints and metadata of the fields decide; see `check_values`.
    """
    kind = type(options)
    check_values(kind, {name: getattr(options, name) for name in setting_names(kind)})


def check_values(owner: object, values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless arguments match the type hints of a class or function.

    `values` are the arguments by name, and `owner` is the dataclass or function. A ``Literal``
    lists the choices, an int is a count, and a str is not empty. Metadata of a dataclass field
    refine the check:

    - ``least``: minimum number or length, instead of 1
    - ``is_share``: the number must be in 0 to 1
    - ``is_tuple``: the value is a text, or a tuple of texts
    - ``what``: words of the error message for what is allowed, such as "a column name"

    A field of another type, such as a dict, is checked only if it has ``what``.
    """
    hints = _type_hints(owner)
    metadata = (
        {setting.name: setting.metadata for setting in fields(owner)} if is_dataclass(owner) else {}
    )
    for name, value in values.items():
        _check_value(name, value, hints[name], metadata.get(name, {}))


def _check_value(name: str, value: object, hint: object, metadata: Mapping[str, Any]) -> None:
    kinds, may_be_none = kinds_of(hint), NoneType in get_args(hint)
    if value is None and may_be_none:
        return
    if {Sequence, Mapping} & set(map(get_origin, kinds)):
        check_ordered(name, value)
    if "is_tuple" in metadata:
        for item in value if isinstance(value, tuple) else (value,):
            check_text(name, item, metadata.get("what", "a text, or a list of texts"))
    elif get_origin(kinds[0]) is Literal:
        choices = get_args(kinds[0])
        check_choice(name, value, (None, *choices) if may_be_none else choices)
    elif kinds == (bool,):
        check_flag(name, value)
    elif kinds == (int,):
        check_count(name, value, metadata.get("least", 1), may_be_none=may_be_none)
    elif kinds == (float,):
        (check_share if "is_share" in metadata else check_number)(name, value)
    elif "what" in metadata and not (kinds == (str,) and "least" in metadata):
        if not is_kind(value, hint):
            what = metadata["what"]
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")
    elif kinds in _TEXTS:
        what = "a column name" if name.endswith("_field") else _TEXTS[kinds]
        what += ": leave it out for none" if may_be_none else ""
        check_text(name, value, metadata.get("what", what), metadata.get("least", 1))


def kinds_of(hint: object) -> tuple[Any, ...]:
    """Return the types in a type hint: those of a union except None, or the only one."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


_type_hints = functools.lru_cache(maxsize=64)(get_type_hints)


def setting_names(options: Any) -> list[str]:
    """Return the names of the fields of a dataclass, or its object, that its constructor takes."""
    return [setting.name for setting in fields(options) if setting.init]


def is_kind(value: Any, hint: Any) -> bool:
    """Tell whether plain data matches a type hint such as ``dict[str, list[int]]``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_kind(value, kind) for kind in inner)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(is_kind(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            is_kind(name, inner[0]) and is_kind(item, inner[1]) for name, item in value.items()
        )
    if hint is Any:
        return True
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)
