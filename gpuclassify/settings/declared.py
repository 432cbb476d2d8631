"""Settings that are declared once, as fields of `Declared` classes.

A field determines the setting's check, its part in the class's repr, Dask token and description,
the identity of a job, and the option of a command (`gpuclassify.commands.options.option_of`). The
option's help is the field's entry in the class's docstring.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from gpuclassify.settings.checks import check_ordered, check_settings, plain_value, setting_names
from gpuclassify.settings.code_digest import json_setting, value_digest
from gpuclassify.settings.signatures import call_text, short

Kind = TypeVar("Kind")


def setting(
    *,
    default: Any = MISSING,
    factory: Callable[[], Any] | Any = MISSING,
    kw_only: bool = True,
    what: str | None = None,
    least: float | None = None,
    is_share: bool = False,
    is_object: bool = False,
    is_tuple: bool = False,
    convert: Callable[[Any], Any] | None = None,
    is_hashed: bool = True,
    is_secret: bool = False,
    changes_results: bool = True,
    group: str | None = None,
    **option: Any,
) -> Any:
    """Declare a setting: a field of a `Declared` class, with its check and its command-line option.

    Parameters
    ----------
    default, factory
        ``default`` and ``default_factory`` of `dataclasses.field`. Without them, the setting is
        required.
    kw_only : bool
        The setting must be passed by name.
    what : str, optional
        Description of allowed values, for the TypeError about a value of a wrong type or a text
        shorter than `least`. Not used for numbers, booleans and choices. None: a standard
        description for texts, and no check of values of other types, such as dicts.
    least : float, optional
        Minimum of an integer, or minimum length of a text. None: 1, or 0 for a text with `what`.
    is_share : bool
        The setting is a number from 0 to 1.
    is_tuple : bool
        A single text and any sequence of texts become a tuple.
    convert : callable, optional
        Function that returns the value to store, or raises TypeError or ValueError. Before the
        call, values of numpy become plain values, and paths become texts.
    is_object : bool
        The value is stored unchanged, such as a frame, or an object with its own settings.
    is_hashed : bool
        The object's hash depends on the setting; False for a dict, which has no hash.
    is_secret : bool
        The setting is left out of the repr, Dask's token, descriptions and files.
    changes_results : bool
        Results depend on the setting, so that it is part of Dask's key and a job's identity.
    group : str, optional
        Heading of the setting's option in the help of commands.
    **option
        Attributes of ``click.Option`` that override derived ones: ``flags``, ``metavar``,
        ``help``, ``type`` (a tuple for choices).
    """
    metadata: dict[str, Any] = {"changes_results": changes_results, "option": option}
    given = {"what": what, "least": least, "convert": convert, "group": group}
    metadata |= {name: value for name, value in given.items() if value is not None}
    kinds = {"is_share": is_share, "is_object": is_object, "is_tuple": is_tuple}
    kinds["is_secret"] = is_secret
    metadata |= {name: True for name, is_set in kinds.items() if is_set}
    defaults = {} if default is MISSING else {"default": default}
    defaults |= {} if factory is MISSING else {"default_factory": factory}
    defaults |= {} if is_hashed else {"hash": False}
    return field(**defaults, kw_only=kw_only, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting, field))
def declared(owner: type[Kind]) -> type[Kind]:
    """Decorate a subclass of `Declared` as a frozen dataclass, keyword-only by default."""
    return dataclass(frozen=True, kw_only=True, repr=False)(owner)


@declared
class Declared:
    """Base class of frozen dataclasses whose fields are a user's settings, checked at creation.

    Subclasses are decorated by `declared`. Values of numpy become plain values, and paths become
    texts, so that equal settings are equal in every process. An ``InitVar`` is an argument that is
    not stored, such as a token.
    """

    def __post_init__(self, *not_kept: Any) -> None:
        for name, value in self.normal({n: getattr(self, n) for n in setting_names(self)}).items():
            self._set(name, value)
        check_settings(self)
        self.check_together()

    @classmethod
    def normal(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings by name, converted to plain values, then by ``setting(convert=...)``."""
        known = {f.name: f for f in fields(cls)}
        return {name: _normal(known[name], value) for name, value in values.items()}

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other; no check here."""

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def settings(self) -> dict[str, Any]:
        """Return the values of all settings (constructor arguments) by name, except secret ones."""
        return {
            own.name: getattr(self, own.name)
            for own in fields(self)
            if own.init and "is_secret" not in own.metadata
        }

    def identity(self) -> dict[str, Any]:
        """Return the values of settings that change results, by name, except secret ones."""
        names = {f.name for f in fields(self) if not f.metadata.get("changes_results", True)}
        return {name: value for name, value in self.settings().items() if name not in names}

    def describe(self) -> dict[str, Any]:
        """Return the settings that change results, by name, as JSON values for a job's metadata."""
        return {
            name: value.describe() if isinstance(value, Declared) else json_setting(value)
            for name, value in self.identity().items()
        }

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        values = {n: value_digest(v) if callable(v) else v for n, v in self.identity().items()}
        return type(self).__qualname__, value_digest((type(self), values))

    def changed(self) -> dict[str, Any]:
        """Return settings that differ from their default or have none, by name, without secrets."""
        known = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        made = {f.name: f.default_factory for f in fields(self)}
        known |= {name: make() for name, make in made.items() if make is not MISSING}
        defaults = self.normal(known)
        return {n: v for n, v in self.settings().items() if n not in defaults or v != defaults[n]}

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the Python call with the settings of `changed`; `show` formats their values."""
        changed = self.changed()
        positional = [f.name for f in fields(self) if not f.kw_only]
        changed = {n: changed[n] for n in dict.fromkeys([*positional, *changed]) if n in changed}
        return call_text(type(self).__name__, changed, show, positional)

    def __repr__(self) -> str:
        return self.code(short)


def _normal(own: Field[Any], value: Any) -> Any:
    metadata = own.metadata
    value = value if "is_object" in metadata else plain_value(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if "is_tuple" in metadata:
        check_ordered(own.name, value)
        if isinstance(value, Iterable):
            value = (value,) if isinstance(value, str) else tuple(value)
    return metadata["convert"](value) if "convert" in metadata else value
