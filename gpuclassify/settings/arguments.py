"""Arguments of a mapper's constructor, and the settings that they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from gpuclassify.settings.checks import nearest, plain_value
from gpuclassify.settings.options import setting_names
from gpuclassify.settings.signatures import short

Options = TypeVar("Options")


def parse_options(
    owner: str, options_type: type[Options], defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> Options:
    """Settings from what the caller of `owner` passed, over the class's own defaults.

    Raises
    ------
    TypeError
        Unknown argument (with the nearest known one).
    ValueError
        A value out of range.
    """
    names = setting_names(options_type)
    for name in given:
        if name not in names:
            known = [*names, "token"]
            raise TypeError(
                f"{owner} has no argument {name!r}.{nearest(name, known)} "
                f"Arguments are {', '.join(known)}."
            )
    settings = {**_fitting(defaults, given), **given}
    for own in fields(options_type):  # type: ignore[arg-type]
        if own.init and own.default is MISSING and own.name not in settings:
            raise TypeError(f"{owner} needs {own.name}=")
    if "model" in names and settings.get("model") in (None, ""):
        raise TypeError(f"{owner} needs model=: a Hub name or the directory of a checkpoint")
    return options_type(**{name: _normal(value) for name, value in settings.items()})


def _fitting(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A class's defaults, as far as they suit what the caller passed."""
    fitting = dict(defaults)
    if given.get("long_text", "truncate") != "truncate":
        fitting.pop("max_chars", None)  # windows are there to read more of the text
    if "text_template" in fitting and "text_field" in given:
        template = fitting["text_template"]
        fitting["text_template"] = template.replace("{text}", f"{{{given['text_field']}}}")
    return fitting


def _normal(value: Any) -> Any:
    """The value in the one form that equal settings have, however they are given."""
    value = plain_value(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(value) if isinstance(value, list) else value


def refuse_unnamed(owner: str, value: Any) -> None:
    """Raise TypeError for ``owner(value)``, saying what to write instead."""
    if hasattr(value, "columns"):
        raise TypeError(
            f"{owner} got a dataset in place of its settings: make the classifier first, as in "
            f"ddf.pipe({owner}()) or {owner}()(ddf)"
        )
    raise TypeError(f"{owner} takes its settings by name, such as {owner}(model={short(value)})")
