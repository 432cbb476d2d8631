"""Results that are saved as JSON with a digest, so that nobody works with what was not saved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from gpuclassify.hub.saving import replace_file

_DIGEST = "digest"  # in the file


@dataclass(frozen=True)
class Saved:
    """Base of frozen dataclasses of JSON values that a file keeps."""

    what: ClassVar[str]  # the content of such a file, in words

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, in place of an earlier one."""
        replace_file(Path(path), self.as_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            It holds something else, or other values than were saved.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except ValueError as err:
            raise ValueError(
                f"{path} holds no {cls.what} ({err}): give a file that {cls.__name__}.save() wrote"
            ) from err

    def as_json(self) -> str:
        """Return the content of the file that `save` writes."""
        return json.dumps(asdict(self) | {_DIGEST: self.digest()}, indent=1)

    def digest(self) -> str:
        """Return the SHA-256 of all values and settings."""
        content = json.dumps(asdict(self), sort_keys=True).encode()
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Return the result in the content of a file of `save`; ValueError if it holds none."""
        try:
            values = json.loads(content)
            saved = values.pop(_DIGEST, None)
            made = cls.of_values(values)
        except (TypeError, AttributeError, KeyError, OverflowError, RecursionError) as err:
            raise ValueError(str(err)) from err
        if saved not in (None, made.digest()):
            raise ValueError(
                f"they have another digest than was saved; if you changed them on purpose, remove "
                f'"{_DIGEST}" from the file'
            )
        return made

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> Self:
        """Return the result of these values; ValueError or TypeError if they are of none."""
        return cls(**values)
