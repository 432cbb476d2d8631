"""Secrets of this process: Hub tokens and storage options, kept in memory and shared with workers.

Objects that are pickled, logged or written hold only a secret's name.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

_secrets: dict[str, Any] = {}
# The scheduler's identifier and the secrets it has received, by client.
_shared: weakref.WeakKeyDictionary[Any, tuple[str, dict[str, Any]]] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


def remember(name: str, value: object) -> None:
    """Keep a secret in the memory of this process only, under a name that is not secret."""
    _secrets[name] = value


def name_of_options(owner: str, options: Mapping[str, Any]) -> str:
    """Return a name, which is not secret, under which `remember` keeps storage options of fsspec.

    It is `owner` and a digest of options, if any, because several clients may share a cluster.
    """
    return f"{owner} {_digest(repr(options))}" if options else owner


@functools.cache
def _digest(secret: str) -> str:
    # A slow hash, because names are logged and a short password could be found by brute force.
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"gpuclassify", 100_000).hex()[:8]


def recall(name: str, default: object = None) -> Any:
    """Return the secret that `remember` keeps under this name in this process, or the default."""
    return _secrets.get(name, default)


def share_with_workers(names: Iterable[str]) -> None:
    """Send secrets, by name, to all present and future workers of the current Dask client, if any.

    Names without a secret are skipped. Raises RuntimeError if the client is asynchronous.
    """
    known = {name: value for name in names if (value := recall(name))}
    distributed = sys.modules.get("distributed")
    if not known or distributed is None:
        return
    try:
        client = distributed.default_client()
    except ValueError:
        return
    if client.asynchronous:
        raise RuntimeError(
            f"secrets ({', '.join(sorted(known))}) cannot be handed to workers through an "
            "asynchronous Client; set HF_TOKEN on the workers, or use a Client without "
            "asynchronous=True"
        )
    with _sharing:
        scheduler = client.sync(client.scheduler.identity, n_workers=0)["id"]
        shared_with, sent = _shared.get(client, ("", {}))
        if shared_with != scheduler:
            _shared[client] = scheduler, (sent := {})
        for name, value in known.items():
            if sent.get(name) != value:
                client.register_plugin(_plugin_class()(name, value))
                sent[name] = value


def remember_token(name: str, token: str) -> None:
    """Keep the access token of one Hub repository in the memory of this process only.

    `name` is a model's name, or ``datasets/`` and a dataset's name.
    """
    token = token.strip()
    # The HTTP client prints a header that it refuses, so such a token must not reach it.
    if not re.fullmatch("[!-~]+", token):
        raise ValueError(
            f"the token for {name} is empty or has spaces, line breaks or non-ASCII "
            "characters in it; copy it again from https://huggingface.co/settings/tokens"
        )
    remember(f"token of {name}", token)
    remember(f"token of {token_name(name)}", token)


class TokenName(str):
    """Name for `token_for`, which storage options hold in place of a Hub token."""

    __slots__ = ()


def token_name(name: str) -> TokenName:
    """Return a name to send to workers in place of this process's token for the repository `name`.

    `token_for` returns the token for it. Without a token, the result is `name` itself.
    """
    token = recall(f"token of {name}")
    return TokenName(name if token is None else f"{name} {_digest(token)}")


def token_for(name: str) -> str | None:
    """Return the token that is remembered for a Hub repository; None: HF_TOKEN or the user's login.

    `name` is the repository's name, or a result of `token_name`.
    """
    return recall(f"token of {name}", recall(f"token of {name.partition(' ')[0]}"))


def share_tokens_with_workers(names: Iterable[str]) -> None:
    """Send the remembered tokens of these Hub repositories, as `share_with_workers` does."""
    names = [*names]
    share_with_workers(f"token of {name}" for name in {*names, *map(token_name, names)})


@functools.cache
def _plugin_class() -> type:
    """Define and return the class `SecretPlugin`, once: importing its base class is slow."""
    import cloudpickle  # type: ignore[import-untyped]
    from distributed import Worker, WorkerPlugin

    class SecretPlugin(WorkerPlugin):
        """Dask plugin that sends one secret to every worker process, where `remember` keeps it.

        XOR with random bytes keeps it out of Dask's DEBUG log of messages. Only TLS hides it on the
        network.
        """

        def __init__(self, secret_name: str, value: Any):
            content = cloudpickle.dumps(value)
            self.name = f"gpuclassify-secret-{secret_name}"
            self._secret_name = secret_name
            self._pad = secrets.token_bytes(len(content))
            self._padded = _xor(content, self._pad)

        def __repr__(self) -> str:
            return f"<SecretPlugin {self._secret_name}>"

        def setup(self, worker: Worker) -> None:
            remember(self._secret_name, cloudpickle.loads(_xor(self._padded, self._pad)))

    return SecretPlugin


def _xor(content: bytes, pad: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(content, pad, strict=True))
