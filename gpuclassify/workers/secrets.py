"""Tokens of gated and private models: in process memory alone, shared by direct calls."""

import functools
import re
import secrets
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

_tokens: dict[str, str] = {}
_shared: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


def remember_token(name: str, token: str) -> None:
    """Keep a token for one model in this process's memory, and nowhere else.

    Parameters
    ----------
    name : str
        Hub name of the model.
    token : str
        Access token; white space around it is dropped.

    Raises
    ------
    ValueError
        The token is empty or has characters that no token has. The message does not show it.
    """
    token = token.strip()
    # The HTTP client prints a header that it refuses, so such a token must not reach it.
    if not re.fullmatch("[!-~]+", token):
        raise ValueError(
            f"the token given for {name} is empty or has spaces, line breaks or non-ASCII "
            "characters in it; copy it again from https://huggingface.co/settings/tokens"
        )
    _tokens[name] = token


def token_for(name: str) -> str | None:
    """Return the remembered token of a model.

    Parameters
    ----------
    name : str
        Hub name of the model.

    Returns
    -------
    str or None
        None lets huggingface_hub use HF_TOKEN or the user's login.
    """
    return _tokens.get(name)


def share_tokens_with_workers(names: Iterable[str]) -> None:
    """Hand remembered tokens to all present and future workers of the default client.

    Does nothing without a distributed client or without a token for these names, and nothing
    twice for the same client and tokens.

    Parameters
    ----------
    names : iterable of str
        Hub names of the models about to be used.

    Raises
    ------
    RuntimeError
        The default client is asynchronous, so that this call could not wait for its workers.
    """
    held = {name: token for name in names if (token := token_for(name)) is not None}
    distributed = sys.modules.get("distributed")
    if not held or distributed is None:
        return
    try:
        client = distributed.default_client()
    except ValueError:
        return
    if client.asynchronous:
        raise RuntimeError(
            f"tokens for {sorted(held)} cannot be handed to workers through an asynchronous "
            "Client; set HF_TOKEN on the workers, or use a Client without asynchronous=True"
        )
    with _sharing:
        known = _shared.setdefault(client, {})
        for name, token in held.items():
            if known.get(name) != token:
                client.register_plugin(_token_plugin_class()(name, token))
                known[name] = token


@functools.cache
def _token_plugin_class() -> type:
    """Make the plugin class late: its base class needs distributed, which is slow to import."""
    from distributed.diagnostics.plugin import WorkerPlugin

    class TokenPlugin(WorkerPlugin):
        """Remembers one model's token in a worker process.

        The token travels under a pad of random bytes that travels with it. That hides it from
        nobody who reads the connection, which is what TLS is for: it keeps the token out of
        Dask's log, which at the level DEBUG shows whole messages.
        """

        def __init__(self, model: str, token: str):
            self.name = f"gpuclassify-token-{model}"
            self._model = model
            self._pad = secrets.token_bytes(len(token))
            self._padded = _xor(token.encode("ascii"), self._pad)

        def __repr__(self) -> str:
            return f"<TokenPlugin {self._model}>"

        def setup(self, worker: Any) -> None:
            remember_token(self._model, _xor(self._padded, self._pad).decode("ascii"))

    return TokenPlugin


def _xor(content: bytes, pad: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(content, pad, strict=True))
