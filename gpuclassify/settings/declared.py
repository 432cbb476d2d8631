"""Settings that are declared once: `Declared` classes, whose fields say all about each setting.

From a field follow its check, the class's repr, Dask token and description, the identity of a job,
and the option of a command (`gpuclassify.commands.options.option_of`), whose help is the field's
entry in the class's docstring.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from gpuclassify.settings.checks import check_settings, plain_value
from gpuclassify.settings.code_digest import json_setting, value_digest
from gpuclassify.settings.signatures import call_text, short

Kind = TypeVar("Kind")


def setting(
    *,
    default: Any = MISSING,
    factory: Callable[[], Any] | Any = MISSING,
    kw_only: bool = True,
    convert: Callable[[Any], Any] | None = None,
    what: str | None = None,
    least: float | None = None,
    is_share: bool = False,
    is_tuple: bool = False,
    is_secret: bool = False,
    changes_results: bool = True,
    group: str | None = None,
    **option: Any,
) -> Any:
    """Declare a setting: a field of a `Declared` class.

    Parameters
    ----------
    default, factory
        As of `dataclasses.field`. Default: the setting is required.
    kw_only : bool
        The setting has to be passed by its name.
    convert : callable, optional
        Function that returns the value to keep of the value that is passed. Default: values of
        numpy become those of Python, and paths become texts.
    what : str, optional
        Description of allowed values, for the error of a value whose type does not match the hint.
    least : float, optional
        Minimum of a number, or minimum length of a text. Default: 1.
    is_share : bool
        The setting is a number from 0 to 1.
    is_tuple : bool
        A single text and any sequence become a tuple.
    is_secret : bool
        The setting is left out of the repr, the token, descriptions and files.
    changes_results : bool
        Results depend on the setting: it is part of Dask's key and of a job's identity.
    group : str, optional
        Heading of the setting's option in the help of commands.
    **option
        Attributes of ``click.Option`` that differ from those derived from the field: ``flags``,
        ``metavar``, ``help``, ``type``.
    """
    metadata: dict[str, Any] = {"changes_results": changes_results, "option": option}
    metadata |= {"what": what} if what is not None else {}
    metadata |= {"least": least} if least is not None else {}
    metadata |= {"convert": convert} if convert is not None else {}
    metadata |= {"group": group} if group is not None else {}
    for name, is_set in (("is_share", is_share), ("is_tuple", is_tuple), ("is_secret", is_secret)):
        metadata |= {name: True} if is_set else {}
    defaults = {} if default is MISSING else {"default": default}
    defaults |= {} if factory is MISSING else {"default_factory": factory}
    return field(**defaults, kw_only=kw_only, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting, field))
def declared(owner: type[Kind]) -> type[Kind]:
    """Make a frozen dataclass of a subclass of `Declared`."""
    return dataclass(frozen=True, kw_only=True, repr=False)(owner)


@declared
class Declared:
    """Base of classes whose settings are the fields of a frozen dataclass.

    Subclasses are decorated by `declared`. Values of
    numpy become those of Python, paths become texts, so that equal settings are equal in every
    process. Each value is checked by its field's type hint and metadata (`setting`).
    """

    def __post_init__(self) -> None:
        for declared in fields(self):
            if declared.init:
                value = _normal(getattr(self, declared.name), declared.metadata)
                object.__setattr__(self, declared.name, value)
        check_settings(self)
        self.check_together()

    def check_together(self) -> None:
        """Raise TypeError or ValueError unless the settings fit each other; normalise them."""

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, without secrets."""
        return {
            declared.name: getattr(self, declared.name)
            for declared in fields(self)
            if declared.init and "is_secret" not in declared.metadata
        }

    def identity(self) -> dict[str, Any]:
        """Return the settings by name on which results depend."""
        names = {f.name for f in fields(self) if not f.metadata.get("changes_results", True)}
        return {name: value for name, value in self.settings().items() if name not in names}

    def describe(self) -> dict[str, Any]:
        """Return the settings on which results depend, as JSON values; functions by a digest."""
        return {name: json_setting(value) for name, value in self.identity().items()}

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (type(self).__module__, type(self).__qualname__, value_digest(self.identity()))

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the call that makes the object, with each value as `show` gives it."""
        defaults = {declared.name: declared.default for declared in fields(self)}
        changed = {n: v for n, v in self.settings().items() if v != defaults[n]}
        return call_text(type(self).__name__, changed, show)

    def __repr__(self) -> str:
        return self.code(short)


def unchanged(value: Any) -> Any:
    """Return the value: the ``convert`` of a setting whose value is an object."""
    return value


def _normal(value: Any, metadata: Any) -> Any:
    if "convert" in metadata:
        return metadata["convert"](value)
    value = plain_value(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if "is_tuple" in metadata and value is not None:
        return (value,) if isinstance(value, str) else tuple(value)
    return value
