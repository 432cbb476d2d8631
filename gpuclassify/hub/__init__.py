"""Models and datasets of the Hub, and saved models, pinned to a version; read `identity.py` first.

`resolve` pins a Hub name or a directory as an `Identity`, and `resolve_file` a model in a single
file as a `ModelFile`. Most other functions take one of the two.
"""

from gpuclassify.hub.calls import CheckpointError as CheckpointError
from gpuclassify.hub.calls import HubUnreachableError as HubUnreachableError
from gpuclassify.hub.calls import ModelAccessError as ModelAccessError
from gpuclassify.hub.calls import ModelChangedError as ModelChangedError
from gpuclassify.hub.calls import ModelNotFoundError as ModelNotFoundError
from gpuclassify.hub.files import ModelFile as ModelFile
from gpuclassify.hub.files import download as download
from gpuclassify.hub.files import fetch_file as fetch_file
from gpuclassify.hub.files import list_files as list_files
from gpuclassify.hub.files import parse_json as parse_json
from gpuclassify.hub.files import read_file as read_file
from gpuclassify.hub.files import read_json as read_json
from gpuclassify.hub.files import read_json_file as read_json_file
from gpuclassify.hub.files import read_tensor_shapes as read_tensor_shapes
from gpuclassify.hub.files import read_text as read_text
from gpuclassify.hub.files import resolve_file as resolve_file
from gpuclassify.hub.files import weights_paths as weights_paths
from gpuclassify.hub.identity import PICKLE_PATTERNS as PICKLE_PATTERNS
from gpuclassify.hub.identity import Identity as Identity
from gpuclassify.hub.identity import Location as Location
from gpuclassify.hub.identity import directory_digest as directory_digest
from gpuclassify.hub.identity import is_commit as is_commit
from gpuclassify.hub.identity import is_directory_name as is_directory_name
from gpuclassify.hub.identity import is_pinned as is_pinned
from gpuclassify.hub.identity import resolve as resolve
from gpuclassify.workers.secrets import remember_token as remember_token
from gpuclassify.workers.secrets import share_tokens_with_workers as share_tokens_with_workers
from gpuclassify.workers.secrets import token_for as token_for
