"""Safetensors headers and the index of sharded weights, as far as files tell."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors format itself sets


def raw_header(path: Path) -> bytes:
    """The length field and the JSON of a safetensors header, as far as the file has them."""
    with path.open("rb") as file:
        length = file.read(8)
        header_bytes = int.from_bytes(length, "little")
        return length + (file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b"")


def shapes_in_file(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of one safetensors file; ValueError if it is not whole."""
    raw = raw_header(path)
    try:
        if raw[:8] == b"version ":
            raise ValueError("it is a Git LFS pointer; run `git lfs pull` in its directory")
        if len(raw) < 8 or len(raw) - 8 != int.from_bytes(raw[:8], "little"):
            raise ValueError("it ends inside its header, or has none")
        header = json.loads(raw[8:])
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
        promised_bytes, file_bytes = len(raw) + max(ends, default=0), path.stat().st_size
        if file_bytes != promised_bytes:
            raise ValueError(f"it has {file_bytes} bytes where its header says {promised_bytes}")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as err:
        raise ValueError(f"{path} is a truncated or corrupt safetensors file: {err}") from err
    return shapes


def weight_map_of(index: dict[str, Any], name: str) -> dict[str, str]:
    """Tensor name to file name of a sharded checkpoint; no file name may leave the model."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{INDEX} of {name} has no weight_map")
    for file in files.values():
        path = PurePosixPath(str(file))
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise ValueError(f"{INDEX} of {name} names {file!r}, not one of its weight files")
    return files
