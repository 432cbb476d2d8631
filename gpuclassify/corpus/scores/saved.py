"""Results that are saved as JSON with a digest, to detect values that were changed by hand."""

from __future__ import annotations

import hashlib
import json
import math
import os
import posixpath
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, cast, get_args, get_origin, get_type_hints

from gpuclassify.corpus.statistics.quantiles import group_key, group_value
from gpuclassify.hub.saving import replace_file
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.settings.checks import kinds_of

_DIGEST = "digest"  # key of the digest in a file
_PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    Any: ("a text, number, true, false or null", (str, int, float, bool, NoneType)),
}


@dataclass(frozen=True)
class Saved:
    """Base class of frozen dataclasses that are saved as JSON with a digest of their values.

    Fields hold texts, numbers, bools or None, or lists, mappings and dataclasses of these. A field
    of type ``Mapping[Any, ...]`` may have keys such as None, 1 or tuples, which become JSON texts
    in the file.
    """

    what: ClassVar[str]  # description of the content, for errors

    def save(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write the result to a JSON file, and replace an earlier one.

        Parameters
        ----------
        path : str or Path
            Path, or URL such as ``s3://bucket/result.json``.
        storage_options : dict, optional
            Options for fsspec.
        """
        write_file(path, self.as_json().encode(), storage_options)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> Self:
        """Load a result from a file of `save`.

        Parameters
        ----------
        path : str or Path
            Path, or URL such as ``s3://bucket/result.json`` or ``hf://datasets/owner/name/file``.
        storage_options : dict, optional
            Options for fsspec.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            The file has other content, or values that do not match its digest. A file without a
            digest is accepted.
        """
        store = open_store(path, storage_options)
        with store.reading() as file:
            content = file.read()
        try:
            return cls.from_json(content)
        except ValueError as err:
            raise ValueError(
                f"{store.shown} holds no {cls.what} ({err}): give a file that "
                f"{cls.__name__}.save() wrote"
            ) from err

    def as_json(self) -> str:
        """Return the JSON text that `save` writes."""
        return json.dumps(_encoded(self) | {_DIGEST: self.digest()}, indent=1)

    def digest(self) -> str:
        """Return "sha256:" and the SHA-256 of all values, which changes when a value changes."""
        content = json.dumps(_encoded(self), sort_keys=True).encode()
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Create an object from the content of a file that `save` wrote.

        Raises ValueError if the content is invalid, or does not match the digest in it.
        """
        try:
            values = json.loads(content)
            if not isinstance(values, dict):
                raise ValueError(f"it is {reprlib.repr(values)}, not an object")
            saved = values.pop(_DIGEST, None)
            result: Self = _decoded(values, cls, cls.what)
            result.check_saved()
        except (TypeError, RecursionError) as err:
            raise ValueError(str(err)) from err
        if saved not in (None, result.digest()):
            raise ValueError(
                f"they have another digest than was saved; if you changed them on purpose, remove "
                f'"{_DIGEST}" from the file'
            )
        return result

    def check_saved(self) -> None:
        """Raise ValueError if loaded values contradict each other; subclasses override it."""


def write_file(
    path: str | os.PathLike[str],
    content: bytes,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a whole file to a path or fsspec URL, replacing an earlier one."""
    folder, name = posixpath.split(os.fspath(path))
    if "://" not in folder:
        replace_file(Path(path), content)
        return
    store = open_store(folder, storage_options)
    if not store.is_writable:
        raise ValueError(f"{redacted(str(path))} cannot be written to: name a path or a bucket")
    store.replace(name, content)


def _encoded(value: Any, hint: Any = Any) -> Any:
    """Convert a dataclass, mapping or plain value with the type hint `hint` to JSON data."""
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        return {f.name: _encoded(getattr(value, f.name), hints[f.name]) for f in fields(value)}
    if isinstance(value, Mapping):
        names, items = get_args(*kinds_of(hint))
        key = str if names is str else group_key
        return {key(name): _encoded(item, items) for name, item in value.items()}
    return value


def _decoded(value: Any, hint: Any, where: str) -> Any:
    """Convert JSON data to the type `hint`, as the inverse of `_encoded`.

    Numbers and texts are checked, not converted. `where` describes the data in errors.
    """
    kinds = kinds_of(hint)
    if value is None and NoneType in get_args(hint):
        return None
    if len(kinds) > 1:  # a union of a list and another type
        kinds = tuple(k for k in kinds if (get_origin(k) is list) == isinstance(value, list))
    kind: Any = kinds[0]
    inner = get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if unknown := {*value} - {field.name for field in fields(kind)}:
            raise ValueError(f"{where} never has {min(unknown)!r}")
        values = {k: _decoded(item, hints[k], f"{k} of {where}") for k, item in value.items()}
        return cast(Any, kind)(**values)
    is_object = not inner or len(inner) > 1
    if is_object and inner and isinstance(value, dict):
        key = str if inner[0] is str else group_value
        items = {key(k): _decoded(item, inner[1], f"{k!r} of {where}") for k, item in value.items()}
        if len(items) < len(value):  # keys such as 1 and true are equal
            raise ValueError(f"{where} has groups that are equal")
        return items
    if not is_object and isinstance(value, list):
        return [_decoded(item, inner[0], where) for item in value]
    words, types = _PLAIN.get(kind, ("an object" if is_object else "a list", ()))
    is_small = not isinstance(value, int) or -(1 << 63) <= value < 1 << 63
    if type(value) in types and is_small and not (isinstance(value, float) and math.isnan(value)):
        return value
    raise ValueError(f"{where} holds {reprlib.repr(value)}, not {words}")
