"""Where a checkpoint is written to."""

import json
from pathlib import Path
from typing import Any


def empty_directory(directory: str | Path) -> Path:
    """Create the directory if need be; FileExistsError unless it is empty."""
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file: give a directory that is new or empty")
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(
            f"{path} is not empty (it holds {min(path.iterdir()).name!r}): "
            "give a directory that is new or empty"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file, its keys in the order given."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
