"""Files of settings: the values of `gpuclassify.jobs.settings.JobSettings` in YAML."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpuclassify.jobs.settings import JobSettings, check_kinds
from gpuclassify.jobs.stores import URL, redacted


def load_settings(path: str) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises
    ------
    ValueError
        It cannot be read, is no YAML, or no mapping of the names of settings to values.
    TypeError
        A value is of another kind.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _yaml_loader())  # a safe one
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(
            f"the settings {path} cannot be read: {reason}. --dump-config {path} writes such a "
            "file from the other options"
        ) from err
    except RecursionError as err:
        raise ValueError(f"{path} holds lists or mappings nested too deep for settings") from err
    except yaml.YAMLError as err:
        raise ValueError(f"{path} is no YAML file: {err}") from err
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, such as input: books/*.jsonl")
    try:
        check_kinds(values)
    except (TypeError, ValueError) as err:
        raise type(err)(f"{path}: {err}") from err
    return values


def dump_settings(settings: JobSettings, path: str) -> None:
    """Write settings to a YAML file that only its owner may read, without passwords of URLs.

    Warns
    -----
    UserWarning
        URLs had a password, or a query, which may be a signature.

    Raises
    ------
    ValueError
        The file cannot be written.
    """
    import yaml

    hidden: list[str] = []
    shown = _without_secrets(settings.as_dict(), hidden)
    content = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    if hidden:
        told = (
            f"left out passwords and queries of {', '.join(hidden)}: give these URLs whole on the "
            "command line, beside --config"
        )
        warnings.warn(f"{path}: {told}", stacklevel=2)
        content = f"# {told}\n{content}"
    try:
        with open(path, "w", encoding="utf-8", opener=_only_for_its_owner) as file:
            file.write(content)
    except OSError as err:
        raise ValueError(
            f"the settings cannot be written to {path}: {err.strerror}. Name a file in a directory "
            "that is there"
        ) from err


def _without_secrets(value: Any, hidden: list[str]) -> Any:
    """The value with URLs as they may be shown; `hidden` gets those that say less then."""
    if isinstance(value, dict):
        return {name: _without_secrets(each, hidden) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each, hidden) for each in value]
    # What goes before the URL names a cache, as in simplecache::https://...
    is_url = isinstance(value, str) and URL.match(value.rpartition("::")[2])
    if not is_url or redacted(value) == value:
        return value
    hidden.append(redacted(value))
    return redacted(value)


def _only_for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@functools.cache
def _yaml_loader() -> Any:
    """A safe loader that refuses a name set twice.

    A time limit such as 8:00:00 is a text to it, and no number of base 60.
    """
    import yaml

    text = ("tag:yaml.org,2002:str", re.compile(r"[0-9]+(:[0-9]+)+$"))
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {first: [text, *others] for first, others in known}

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _refuse_repeats(key for key, _ in node.value)
            return node

    return Loader


def _refuse_repeats(keys: Iterable[Any]) -> None:
    """Raise if two keys of a YAML mapping are the same; YAML itself would take the last one."""
    lines: dict[str, int] = {}
    for key in keys:
        line, name = key.start_mark.line + 1, str(key.value)
        if name in lines:
            raise ValueError(
                f"{name} is set on line {lines[name]} and again on line {line}: leave one of them"
            )
        lines[name] = line
