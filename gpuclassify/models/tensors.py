"""Tensors as a file has them against those that a network needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from gpuclassify import hub
from gpuclassify.hub.saving import CONFIG, WEIGHTS, WEIGHTS_DIGEST, WEIGHTS_NAME, file_sha256
from gpuclassify.models.checkpoint import (
    EMBEDDING,
    SEQUENCE_CLASSIFICATION,
    Checkpoint,
    CheckpointError,
    some_of,
)

# Layouts whose weights transformers itself loads: it renames tensors of older checkpoints.
LOADED_BY_TRANSFORMERS = (SEQUENCE_CLASSIFICATION, EMBEDDING)
# Buffers that old versions saved; they hold nothing that the network does not know.
LEGACY_BUFFERS = frozenset({"model.embeddings.position_ids", "backbone.embeddings.position_ids"})

Shapes = Mapping[str, tuple[int, ...]]


def needed_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Those of `names` that outputs depend on: an embedding reads no pooler, nor an old buffer."""
    if checkpoint.layout != EMBEDDING:
        return set(names)
    return {name for name in names if not name.startswith(("pooler.", "embeddings.position_ids"))}


def check_headers(
    checkpoint: Checkpoint,
    expected: Shapes | None,
    cache_dir: str | None = None,
    ties: Iterable[Collection[str]] = (),
) -> None:
    """Compare the safetensors headers of a checkpoint with the tensors that it must have.

    Parameters
    ----------
    checkpoint : Checkpoint
    expected : mapping of str to tuple of int, optional
        None if they are not known here: the headers are read, and nothing is compared.
    cache_dir : str, optional
    ties : iterable of collections of str
        Names that share one tensor, which a file holds under any of them.

    Raises
    ------
    CheckpointError
        Names the tensors that are missing, unknown or of another shape.
    ModelNotFoundError, ValueError
        There are no headers, or they are corrupt; see `gpuclassify.hub.read_tensor_shapes`.
    """
    found = hub.read_tensor_shapes(checkpoint.identity, cache_dir=cache_dir)
    if expected is None:
        return
    held = {name for names in ties if found.keys() & names for name in names}
    missing = needed_tensors(checkpoint, set(expected) - set(found) - held)
    unknown = needed_tensors(checkpoint, set(found) - set(expected)) - LEGACY_BUFFERS
    if checkpoint.layout in LOADED_BY_TRANSFORMERS and unknown:
        # transformers renames tensors of older checkpoints while loading, so with unknown names
        # about, only the loading itself can tell what is missing.
        missing, unknown = set(), set()
    name = checkpoint.identity.name
    refuse_wrong_tensors(name, missing, misshaped(found, expected), unknown)


def check_digest(checkpoint: Checkpoint, directory: Path) -> None:
    """Compare the weights in `directory` with the digest of those that were saved, if it is known.

    Raises
    ------
    CheckpointError
        They are others.
    ModelChangedError
        The model was saved anew since it was described.
    """
    saved = checkpoint.config.get(WEIGHTS_DIGEST)
    if saved is None or checkpoint.config.get(WEIGHTS_NAME) != WEIGHTS:
        return
    if (found := file_sha256(directory / WEIGHTS)) != saved:
        if checkpoint.identity.is_directory:
            hub.download(checkpoint.identity)  # unchanged since it was described
        raise CheckpointError(
            f"{directory / WEIGHTS} is not the file that was saved with its {CONFIG}: its SHA-256 "
            f"begins with {found[:12]}, not {saved[:12]}. It was damaged, or copied without the "
            f"other: copy both anew, or train or convert again. If you changed the weights on "
            f"purpose, remove {WEIGHTS_DIGEST} from {CONFIG}"
        )


def compare_shapes(owner: str, found: Shapes, expected: Shapes) -> None:
    """Raise CheckpointError unless the names and shapes of the model `owner` are those expected."""
    refuse_wrong_tensors(
        owner,
        expected.keys() - found.keys(),
        misshaped(found, expected),
        found.keys() - expected.keys(),
    )


def misshaped(found: Shapes, expected: Shapes) -> list[str]:
    """Those that both have and in another shape, in words."""
    return [
        f"{name} {tuple(found[name])} instead of {tuple(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if tuple(found[name]) != tuple(expected[name])
    ]


def refuse_wrong_tensors(
    owner: str, missing: Collection[str], misshaped: Collection[str], unknown: Collection[str]
) -> None:
    """Raise CheckpointError if any tensor is missing, of another shape, or unknown."""
    problems = [
        f"{len(names)} tensors {what}: {some_of(sorted(names))}"
        for names, what in (
            (missing, "are missing"),
            (misshaped, "have another shape"),
            (unknown, "are no part of the architecture"),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {owner} do not fit its configuration; {'; '.join(problems)}. "
            "Save the model again, or name the right base_model."
        )
