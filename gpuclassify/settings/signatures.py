"""Signatures, docstrings and reprs that show users the settings of a class.

Settings are the fields of a dataclass of options that the class makes from its arguments.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import textwrap
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Concatenate, ParamSpec

P = ParamSpec("P")
PACKAGE = __name__.partition(".")[0]
HELP_WIDTH = 76  # characters; help() indents lines by four
LONGEST_SHOWN = 80  # characters of a value in a repr
LONGEST_DESCRIBED = 200  # characters; longer settings are described by their digest
SECTION = re.compile(r"^(?:Parameters|Attributes)\n-+\n(.*?)\n*(?=^\w+\n-+\n|\Z)", re.M | re.S)
NEXT_SECTION = re.compile(r"^(?=\w+\n---)", re.M)
ENTRY = re.compile(r"^([\w, ]+) : (.+)\n((?:(?: .*)?(?:\n|\Z))*)", re.M)


def takes(
    options: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the parameters of the class `options`, for type checkers only."""
    return lambda create: create


def show_settings(owner: type, options: type, defaults: Mapping[str, Any]) -> None:
    """Add the fields of the dataclass `options` to the signature and docstring of class `owner`.

    Explanations of fields come from the docstring of `owner`, or else of `options` and its bases.
    `defaults` replace the fields' defaults.
    """
    parameters = inspect.signature(options).parameters
    derived_first = [name for kind in options.__mro__ for name in inspect.get_annotations(kind)]
    names = dict.fromkeys(["model", *defaults, *derived_first])
    signature = inspect.Signature(
        [_shown(parameters[name], defaults) for name in names if name in parameters]
    )
    owner.__signature__ = signature  # type: ignore[attr-defined]
    explained = explanations(owner, *options.__mro__)
    wrap = textwrap.TextWrapper(HELP_WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False)
    lines = [wrap.fill(f"{name}{explained.get(name, '')}") for name in signature.parameters]
    if docstring := vars(owner).get("__doc__"):
        text, *rest = NEXT_SECTION.split(SECTION.sub("", inspect.cleandoc(docstring)), maxsplit=1)
        settings = "\n".join(["Parameters", "----------", *lines])
        owner.__doc__ = "\n\n".join([text.rstrip(), settings, *rest])


def _shown(parameter: inspect.Parameter, defaults: Mapping[str, Any]) -> inspect.Parameter:
    default, kind = defaults.get(parameter.name, parameter.default), parameter.annotation
    if parameter.name in ("model", "prompt") and default == "":  # required settings
        default = inspect.Parameter.empty
    elif len(repr(default)) > LONGEST_SHOWN:
        default = ...  # a default exists, as in stubs
    if isinstance(kind, str):
        kind = re.sub(r"InitVar\[(.*)\]", r"\1", kind)
    return parameter.replace(default=default, annotation=kind)


def explanations(*owners: object) -> dict[str, str]:
    """Return explanations of parameters by name, from "Parameters" and "Attributes" in docstrings.

    An explanation is such as ": Text." or, with choices, " ({"a", "b"}): Text.". The first of
    several `owners` that explain a parameter counts.
    """
    explained: dict[str, str] = {}
    for owner in reversed(owners):
        for section in SECTION.findall(inspect.cleandoc(owner.__doc__ or "")):
            for names, kind, text in ENTRY.findall(section):
                choices = f" ({kind})" if kind.startswith("{") else ""
                explanation = f"{choices}: {' '.join(text.split())}"
                explained |= dict.fromkeys(names.split(", "), explanation)
    return explained


def changed_settings(
    options: Any, defaults: Mapping[str, Any], always: Collection[str]
) -> dict[str, Any]:
    """Return the fields of a dataclass object that are in `always` or differ from their defaults.

    `defaults` replace the fields' own defaults.
    """
    known = {setting.name: setting.default for setting in fields(options)} | dict(defaults)
    values = {
        setting.name: getattr(options, setting.name) for setting in fields(options) if setting.init
    }
    return {name: value for name, value in values.items() if name in always or value != known[name]}


def call_text(
    name: str,
    settings: Mapping[str, Any],
    show: Callable[[Any], str],
    positional: Collection[str] = (),
) -> str:
    """Return the source text of a call with these settings, for a repr, such as ``Name(a=1)``.

    Functions and classes are shown by name, and other values by ``show(value)``.
    """
    shown = {n: getattr(v, "__qualname__", None) or show(v) for n, v in settings.items()}
    arguments = [value if n in positional else f"{n}={value}" for n, value in shown.items()]
    return f"{name}({', '.join(arguments)})"


def short(value: object) -> str:
    """Return the repr of a value; only its length and beginning if it has over 80 characters."""
    shown = repr(value)
    if len(shown) <= LONGEST_SHOWN:
        return shown
    return f"<{len(shown):,} characters: {shown[:LONGEST_SHOWN]}...>"


def as_json(value: object) -> Any:
    """Convert a value to a JSON scalar that describes it: itself, its repr, or a digest of that."""
    shown = repr(value)
    if len(shown) > LONGEST_DESCRIBED:
        return f"sha256:{hashlib.sha256(shown.encode()).hexdigest()}"
    return value if value is None or isinstance(value, (bool, int, float, str)) else shown


class _PublicNames(ABCMeta):
    public_names: ClassVar[tuple[str, ...]]

    def __dir__(cls) -> list[str]:
        users = [base for base in cls.__mro__[:-1] if base.__module__.partition(".")[0] != PACKAGE]
        names = [name for base in users for name in vars(base) if not name.startswith("_")]
        return sorted({*cls.public_names, *names})


class Public(metaclass=_PublicNames):
    """Base class that shows only public names in dir(), help() and tab completion.

    They are `public_names`, members that subclasses outside this package define, and attributes of
    an object, but for names that begin with "_".
    """

    public_names: ClassVar[tuple[str, ...]] = ()

    def __dir__(self) -> list[str]:
        attributes = (name for name in vars(self) if not name.startswith("_"))
        return sorted({*dir(type(self)), *attributes})
