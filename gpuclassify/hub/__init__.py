"""Model names as pinned identities, their files, and the tokens that open gated ones.

A model is named by its Hugging Face Hub name or by a directory; one that is a single file by that
too. `resolve` and `resolve_file` turn it into an `Identity` once, and everything later
(configuration, tensor shapes, weights) is read at exactly that identity. Pickled weights are never
fetched. Tokens live in process memory alone; see `gpuclassify.workers.secrets`.
"""

from gpuclassify.hub.errors import (
    HubUnreachableError,
    MissingOrPrivateError,
    ModelAccessError,
    ModelChangedError,
    ModelNotFoundError,
)
from gpuclassify.hub.files import download, list_files, read_json, read_text
from gpuclassify.hub.identity import (
    LOADABLE_PATTERNS,
    PICKLE_PATTERNS,
    Identity,
    Location,
    directory_digest,
    is_directory_name,
    resolve,
)
from gpuclassify.hub.model_files import ModelFile, fetch_file, read_file, resolve_file
from gpuclassify.hub.tensors import read_tensor_shapes
from gpuclassify.workers.secrets import remember_token, share_tokens_with_workers, token_for

__all__ = [
    "LOADABLE_PATTERNS",
    "PICKLE_PATTERNS",
    "HubUnreachableError",
    "Identity",
    "Location",
    "MissingOrPrivateError",
    "ModelAccessError",
    "ModelChangedError",
    "ModelFile",
    "ModelNotFoundError",
    "directory_digest",
    "download",
    "fetch_file",
    "is_directory_name",
    "list_files",
    "read_file",
    "read_json",
    "read_tensor_shapes",
    "read_text",
    "remember_token",
    "resolve",
    "resolve_file",
    "share_tokens_with_workers",
    "token_for",
]
