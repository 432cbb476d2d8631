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
# Descriptions of allowed values for messages, by type hint.
_TEXTS: dict[tuple[Any, ...], str] = {(str,): "a text", (str, os.PathLike[str]): "a name or a path"}


class HubName(str):
    """Model name that means a Hub repository, even if a local directory has the same name.

    A plain str with the same characters means the directory, if there is one.
    """

    known: ClassVar[set[str]] = set()

    def __new__(cls, name: str) -> HubName:
        """Create the name, and add it to `known`, the set of all such names in this process."""
        cls.known.add(str(name))
        return super().__new__(cls, name)


def install(extra: str) -> str:
    """Return the pip command that installs the extra `extra` of gpuclassify, for error messages."""
    return f"pip install 'gpuclassify[{extra}]' (in a checkout '.[{extra}]')"


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Emit `message` as a UserWarning at the user's line; not again for the last 1,024 messages."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def plain_value(value: Any) -> Any:
    """Convert numpy scalars, arrays and columns of frames to plain Python scalars and lists.

    Items of collections are converted, too; mappings become dicts, and dataframes stay. Equal
    settings then have equal keys in Dask, and equal text in reports.
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
    """Decorate a function to convert keyword arguments by `plain_value`, and to refuse sets."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **settings: P.kwargs) -> T:
        for name, value in (*zip(signature.parameters, args, strict=False), *settings.items()):
            check_ordered(name, value)
        return function(*args, **{name: plain_value(value) for name, value in settings.items()})

    return call


def label_tuple(name: str, labels: object, *, keep_order: bool = False) -> tuple[str, ...] | None:
    """Return a label or several as a tuple, sorted and without repeats; None stays None.

    With `keep_order`, order and repeats stay, and a set is refused. Raises TypeError or ValueError
    for other values, an empty collection included.
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
    """Return a number as a float, and a dict from labels to numbers as sorted (label, float) pairs.

    Such pairs are accepted, too, and None stays None. Raises TypeError or ValueError for other
    values, an empty dict included.
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
    """Return " Did you mean 'X'?" for the most similar of `names`; "" if none is similar."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_names(
    owner: str, what: str, names: Iterable[Any], known: Collection[str], cure: str = ""
) -> None:
    """Raise TypeError if any of `names` is not in `known`, and suggest the nearest known name.

    The message is "OWNER no WHAT 'name'. Did you mean 'X'? CURE". Examples of `owner` and `what`
    are "a job has" and "setting".
    """
    for name in names:
        if name not in known:
            cure = cure or f"{what.capitalize()}s are {', '.join(known)}."
            raise TypeError(f"{owner} no {what} {name!r}.{nearest(str(name), known)} {cure}")


def check_choice(name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Raise ValueError if `value` is not one of `choices`; `name` is the setting's name."""
    if value not in choices:
        hint = nearest(value, [c for c in choices if c]) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.{hint}")


def check_ordered(name: str, value: object) -> None:
    """Raise TypeError if `value` is a set, because its order differs between processes."""
    if isinstance(value, Set) and not isinstance(value, Reversible):  # dict keys are ordered
        raise TypeError(f"{name}={value!r} is a {type(value).__name__} without order: pass a list")


def check_text(name: str, value: object, what: str, least: int = 1) -> None:
    """Raise TypeError if `value` is not a string of at least `least` characters.

    `what` is the expected value for the message, such as "a column name".
    """
    if not isinstance(value, str) or len(value) < least:
        raise TypeError(f"{name}={value!r} is not {what}")


def check_count(name: str, value: object, least: int = 1, *, may_be_none: bool = False) -> None:
    """Raise TypeError if `value` is no int (or a bool), ValueError if it is less than `least`."""
    if value is None and may_be_none:
        return
    cure = ", or leave it out" if may_be_none else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass a whole number{cure}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}{cure}")


def check_seed(seed: int, below: int = 1 << 32) -> None:
    """Raise TypeError or ValueError unless `seed` is an int from 0 to `below` - 1.

    The default limit is the one of NumPy's `RandomState` and of scikit-learn.
    """
    check_count("seed", seed, least=0)
    if seed >= below:
        raise ValueError(f"seed={seed} must be below {below}")


def check_number(name: str, value: object, what: str = "a number") -> None:
    """Raise TypeError if `value` is neither an int nor a float; a bool is not accepted."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")


def check_share(name: str, value: Any) -> None:
    """Raise TypeError if `value` is not a number, or ValueError if it is not from 0 to 1."""
    check_number(name, value, "a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is not from 0 to 1")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError if `value` is not a bool; `name` is the setting's name for the message."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass True or False")


def check_settings(options: object) -> None:
    """Raise TypeError or ValueError if a field of the dataclass object `options` has a wrong value.

    Only fields that the constructor accepts are checked, by `check_values`.
    """
    kind = type(options)
    check_values(kind, {name: getattr(options, name) for name in setting_names(kind)})


def check_values(owner: object, values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless arguments match the type hints of a class or function.

    `values` are the arguments by name, and `owner` is the dataclass or function. A ``Literal``
    lists the choices, an int is at least 1, and a str is not empty. None is accepted if the hint
    has it. Sets are refused for a ``Sequence`` or ``Mapping``. Metadata of a dataclass field refine
    the check:

    - ``least``: minimum number or length, instead of 1
    - ``is_share``: the number must be in 0 to 1
    - ``is_tuple``: the value is a text, or a tuple of texts
    - ``what``: words of the error message for what is allowed, such as "a column name"; without
      ``least``, a text may then be empty

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
    """Return the members of a union type hint except None, or a tuple of the hint itself."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


_type_hints = functools.lru_cache(maxsize=64)(get_type_hints)


def setting_names(options: Any) -> list[str]:
    """Return the names of the fields that the constructor of a dataclass accepts."""
    return [setting.name for setting in fields(options) if setting.init]


def is_kind(value: Any, hint: Any) -> bool:
    """Return whether a value and its items match a type hint such as ``dict[str, list[int]]``.

    A tuple matches ``list``, and any mapping ``dict``. A bool does not match ``int``, and an int
    does not match ``float``.
    """
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
