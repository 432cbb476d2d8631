"""Names and shapes of a model's tensors, without its weights."""

from pathlib import Path
from typing import Any

from gpuclassify.hub.calls import ask_model
from gpuclassify.hub.errors import ModelNotFoundError
from gpuclassify.hub.files import INDEX, cached_file, list_files, read_json, weight_map_of
from gpuclassify.hub.identity import PICKLE_PATTERNS, Identity, Location, matches
from gpuclassify.hub.saving import WEIGHTS as WEIGHTS
from gpuclassify.workers.secrets import token_for

_HOW_TO_CONVERT = """\
import torch, safetensors.torch as st
st.save_file({name: tensor.clone().contiguous() for name, tensor in torch.load(
    "pytorch_model.bin", map_location="cpu", weights_only=True).items()},
    "model.safetensors", metadata={"format": "pt"})"""


def read_tensor_shapes(
    identity: Identity, filename: str = WEIGHTS, *, cache_dir: Location | None = None
) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of a model's tensors from the safetensors headers, never weights.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    filename : str
        Where the tensors are, if not in ``model.safetensors``.
    cache_dir : str or path, optional
        As in `resolve`.

    Returns
    -------
    dict of str to tuple of int
        Every tensor of the file, or of all the files of the sharded index in its place.

    Raises
    ------
    ModelNotFoundError
        The model has no safetensors weights (pickles are refused), or lacks a shard.
    ValueError
        A header or the index is truncated or corrupt; the message names the file.
    ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    files = list_files(identity, cache_dir=cache_dir)
    if filename in files:
        return _shapes_of_file(identity, filename, cache_dir)
    if INDEX not in files:
        raise ModelNotFoundError(_no_safetensors(identity.name, files))
    weight_map = weight_map_of(read_json(identity, INDEX, cache_dir=cache_dir) or {}, identity.name)
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if shard not in files]:
        raise ModelNotFoundError(
            f"{INDEX} of {identity.name} names weight files that are not there: {absent}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        shapes.update(_shapes_of_file(identity, shard, cache_dir))
    if lost := sorted(set(weight_map) - set(shapes)):
        raise ValueError(
            f"{INDEX} of {identity.name} names {len(lost)} tensors that its files lack: {lost[:5]}"
        )
    return shapes


def _no_safetensors(name: str, files: list[str]) -> str:
    pickles = [file for file in files if matches(file, PICKLE_PATTERNS)]
    if not pickles:
        return f"{name} has no {WEIGHTS} and no {INDEX}; its files are {files}"
    return (
        f"{name} has its weights only as pickles ({', '.join(pickles)}), which can run any code "
        f"when they are read and are refused. Convert a copy that you trust:\n{_HOW_TO_CONVERT}\n"
        "and pass the directory of the new file, with config.json and the tokenizer beside it"
    )


def _shapes_of_file(
    identity: Identity, filename: str, cache_dir: Location | None
) -> dict[str, tuple[int, ...]]:
    if identity.is_directory:
        return _local_shapes(Path(identity.name, filename))
    cached = cached_file(identity, filename, cache_dir)
    return _local_shapes(cached) if cached else _remote_shapes(identity, filename)


def _local_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as err:
        with path.open("rb") as file:
            is_pointer = file.read(8) == b"version "
        cure = "; it is a Git LFS pointer: run `git lfs pull` in its directory"
        raise ValueError(
            f"{path} is a truncated or corrupt safetensors file: {err}{cure if is_pointer else ''}"
        ) from err


def _remote_shapes(identity: Identity, filename: str) -> dict[str, tuple[int, ...]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError

    name, revision = identity.name, identity.revision

    def read_header() -> Any:
        try:
            return HfApi().parse_safetensors_file_metadata(
                name, filename, revision=revision, token=token_for(name)
            )
        except SafetensorsParsingError:
            return None
        except HfHubHTTPError as err:
            if err.response.status_code != 416:  # the file ends before the range that was asked for
                raise
            return None

    header = ask_model(name, revision, read_header)
    if header is None:
        raise ValueError(
            f"{filename} of {name} at {revision} has a truncated or corrupt safetensors header; "
            "its author has to upload it again"
        )
    return {tensor: tuple(entry.shape) for tensor, entry in header.tensors.items()}
