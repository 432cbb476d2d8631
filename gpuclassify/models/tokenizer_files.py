"""Loading of a model's tokenizer, which gives the token ids of its ``tokenizer.json``.

transformers 5 builds a tokenizer from the vocabulary, with the steps of the class that the
configuration names. Models were trained with the steps in their files, so only the declarations of
transformers' tokenizer are kept: special tokens, lengths, sides and chat templates.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpuclassify import hub
from gpuclassify.models.checkpoint import STATIC, Checkpoint, CheckpointError, check_ids
from gpuclassify.models.tokenizer_backend import NO_LIMIT, load_backend, panics_as_errors
from gpuclassify.models.transformers_state import building_lock, quiet_transformers
from gpuclassify.settings.checks import install
from gpuclassify.settings.paths import exists

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FILE = "tokenizer.json"
# Defaults of transformers 4 that differ in transformers 5.
_DEFAULTS = {"add_prefix_space": True, "legacy": True}
_DEFAULTS_OF = {"FNet": {"do_lower_case": False, "keep_accents": True}}
# Tokenizers whose mask absorbs preceding white space in transformers 4, but not in 5.
_MASK_TAKES_SPACE = {
    *("Albert", "RemBert", "XLNet", "FNet"),
    *("Roberta", "Bart", "Longformer", "LED", "Mvp", "Deberta"),
}


def load_tokenizer(checkpoint: Checkpoint, directory: Path) -> Any:
    """Load the tokenizer of a checkpoint from a directory, as a new transformers tokenizer.

    A maximum length in ``checkpoint.sentence`` replaces the tokenizer's; ``checkpoint.max_tokens``
    does not. Raises CheckpointError if no tokenizer loads.
    """
    most = None if checkpoint.sentence is None else checkpoint.sentence.max_tokens
    settings: dict[str, Any] = {} if most is None else {"model_max_length": most}
    if checkpoint.layout == STATIC and checkpoint.sentence is not None:
        return _load_static(checkpoint, directory / checkpoint.sentence.folder / FILE)
    tokenizer = read_tokenizer(checkpoint.identity.name, directory, **settings)
    check_ids(checkpoint, tokenizer)
    return tokenizer


def _load_static(checkpoint: Checkpoint, file: Path) -> Any:
    """Load a static embedding model's ``tokenizer.json``, without special tokens around a text."""
    from transformers import PreTrainedTokenizerFast

    check_ids(checkpoint, load_backend(file, file))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    tokenizer.backend_tokenizer.post_processor = None
    most = checkpoint.sentence and checkpoint.sentence.max_tokens
    tokenizer.model_max_length = most or tokenizer.init_kwargs.get("max_length") or NO_LIMIT
    return tokenizer


def read_tokenizer(
    owner: str, directory: Path, *, is_for_counts: bool = False, **settings: object
) -> Any:
    """Load the tokenizer in a directory, as an object of transformers.

    Token ids follow ``tokenizer.json`` or, without that file, transformers 4. With `is_for_counts`,
    the tokenizer is for counting tokens only; its class, which would import torch, is not used if
    there is a ``tokenizer.json``. `settings` are passed to ``from_pretrained``. Raises
    CheckpointError, which calls the model `owner`, if no tokenizer loads.
    """
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    present = sorted(path.name for path in directory.iterdir())
    models = [name for name in present if name.endswith(".model")]
    has_library = is_sentencepiece_available() and is_protobuf_available()
    if FILE not in present and models and not has_library:
        raise CheckpointError(
            f"{owner} has {models[0]} and no {FILE}, and sentencepiece and protobuf, which read "
            f"it, are not both installed: {install('sentencepiece')}"
        )
    try:
        with building_lock, quiet_transformers(), panics_as_errors():
            if FILE in present:
                tokenizer = _load_file(directory, is_for_counts, settings)
            else:
                tokenizer = _load_vocabulary(directory, models, settings)
            if not tokenizer.model_max_length >= 0:  # raises TypeError if it is not a number
                raise ValueError(f"model_max_length is {tokenizer.model_max_length}")
            return tokenizer
    except Exception as err:  # transformers and its libraries raise various errors
        raise CheckpointError(
            f"no tokenizer of {owner} loads from its files {present}, because of "
            f"{type(err).__name__}: {err}. Where nothing is missing or damaged, write a "
            f"{FILE} with tokenizer.save_pretrained in a release of transformers that loads it"
        ) from err


def _load_file(directory: Path, is_for_counts: bool, settings: dict[str, Any]) -> Any:
    """Load a tokenizer that normalizes, splits and decodes as ``tokenizer.json`` says."""
    from transformers import PreTrainedTokenizerFast

    backend = load_backend(directory / FILE, FILE)
    settings = settings | {"local_files_only": True}
    plain = PreTrainedTokenizerFast.from_pretrained(directory, **settings)
    _add_declared_tokens(backend, plain)
    if is_for_counts:  # the tokenizer's own class would import torch
        return _replace_backend(plain, backend)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, **settings)
    except Exception:  # the class is unknown, or does not fit the file
        tokenizer = plain
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        tokenizer = plain
    config = _read_config(directory)
    # The class decides about segment ids in files of transformers 5. Files of transformers 4 can
    # name a class that gave segment ids there, but does not in transformers 5.
    is_version_5 = "backend" in config or config.get("tokenizer_class") == "TokenizersBackend"
    if is_version_5 and config.get("tokenizer_class") == type(tokenizer).__name__:
        tokenizer.init_kwargs.setdefault("model_input_names", tokenizer.model_input_names)
    return _replace_backend(tokenizer, backend)


def _add_declared_tokens(backend: Tokenizer, plain: PreTrainedTokenizerBase) -> None:
    """Add tokens to `backend` that `plain` has read from files other than ``tokenizer.json``."""
    roles = {str(token) for token in plain.special_tokens_map.values()}
    added = [token for _, token in sorted(plain.added_tokens_decoder.items())]
    is_known = {str(token): backend.token_to_id(str(token)) is not None for token in added}
    # A special token that the file lacks is left out: the model has no embedding for it.
    backend.add_tokens(
        [token for token in added if is_known[str(token)] or str(token) not in roles]
    )
    for number, token in plain.init_kwargs.get("added_tokens_decoder", {}).items():
        found = backend.token_to_id(str(token))
        if not is_known.get(str(token), True) and found not in (None, number):
            raise CheckpointError(
                f"the token {str(token)!r} is declared with id {number}, and gets {found} after "
                f"the tokens of {FILE}: save the tokenizer again with all its tokens"
            )


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    return hub.read_json_file(file) if exists(file) else {}


def _replace_backend(tokenizer: PreTrainedTokenizerBase, backend: Tokenizer) -> Any:
    """Make `tokenizer` use `backend`, without special tokens that it lacks; return `tokenizer`."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    tokenizer._tokenizer = backend
    for role in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        if backend.token_to_id(str(getattr(tokenizer, role))) is None:
            setattr(tokenizer, role, None)
    return tokenizer


def _load_vocabulary(directory: Path, models: list[str], settings: dict[str, Any]) -> Any:
    """Load a tokenizer from vocabulary files, with the token ids that transformers 4 gives.

    `models` are the names of SentencePiece files. Without any, the class's own files are used.
    """
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, **settings
    )
    own_files = set(tokenizer.vocab_files_names.values())  # empty for byte-level tokenizers
    if own_files and not models and not any(exists(directory / name) for name in own_files):
        # transformers would make a tokenizer that knows no word.
        raise FileNotFoundError(f"none of {sorted(own_files | {FILE})} is there")
    config = _read_config(directory)
    class_name = config.get("tokenizer_class") or type(tokenizer).__name__
    kind = class_name.removesuffix("Fast").removesuffix("Tokenizer")
    if models and tokenizer.is_fast:
        _convert(tokenizer, kind, config, directory / models[0])
    if kind in _MASK_TAKES_SPACE and "added_tokens_decoder" not in config:
        mask = AddedToken(tokenizer.mask_token, lstrip=True, normalized=False, special=True)
        tokenizer.backend_tokenizer.add_special_tokens([mask])
    return tokenizer


def _convert(
    tokenizer: PreTrainedTokenizerBase, kind: str, config: dict[str, Any], file: Path
) -> None:
    """Change `tokenizer` to normalize and split as a SentencePiece file says, like transformers 4.

    `kind` is the tokenizer's class without "Tokenizer", such as "Llama".
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import (
        SLOW_TO_FAST_CONVERTERS,
        GemmaConverter,
        LlamaConverter,
    )
    from transformers.tokenization_utils_base import generate_merges

    def extract(scores: list[tuple[str, float]]) -> tuple[None, Any]:
        return None, generate_merges({token: n for n, (token, _) in enumerate(scores)}, scores)

    converter_type = SLOW_TO_FAST_CONVERTERS.get(f"{kind}Tokenizer")
    if converter_type is None:
        if type(tokenizer) is PreTrainedTokenizerFast:
            # Releases of transformers 5 guess the steps, and differ in what they guess.
            raise ValueError(
                f"{file.name} does not say which steps its tokenizer has: name its class in "
                'tokenizer_config.json, such as {"tokenizer_class": "LlamaTokenizer"}'
            )
        return
    # The converters are from transformers 4, and read attributes of the tokenizer.
    tokenizer.vocab_file = str(file)
    for name, value in (_DEFAULTS | _DEFAULTS_OF.get(kind, {}) | config).items():
        if isinstance(value, bool):
            setattr(tokenizer, name, value)
    converter = converter_type(tokenizer)
    converter.SpmExtractor = lambda _: SimpleNamespace(extract=extract)
    backend = converter.converted()
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    backend.add_tokens([token for _, token in sorted(added.items())])
    _replace_backend(tokenizer, backend)
    if isinstance(converter, LlamaConverter | GemmaConverter):
        tokenizer.add_bos_token = config.get("add_bos_token", True)  # rewrites the post-processor
