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
    """Keep a secret in the memory of this process only, under a name that is not secret.

    `value` is a token, or storage options for fsspec, which may hold keys of an object store.
    `recall` returns it.
    """
    _secrets[name] = value


def name_of_options(owner: str, options: Mapping[str, Any]) -> str:
    """Return a name under which `remember` keeps storage options of fsspec, which may be secret.

    The name is not secret. It is `owner`, followed by a digest of the options if there are any,
    because several clients may share a cluster, whose workers keep the secrets of all of them by
    name.
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
    """Send the secrets that `remember` keeps under these names to all workers of the Dask client.

    Workers that join later get them, too. The client is the current one of distributed. Does
    nothing without a client, for names without a secret, and for secrets that the client's
    scheduler already has. Secrets are sent again if the scheduler was restarted, because it has
    lost them. Raises RuntimeError if the client is asynchronous: this call must wait for its
    workers.
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

    `name` is a model's name, or ``datasets/`` and a dataset's name. White space around the token is
    dropped. Raises ValueError, which does not show the token, if it is empty or malformed.
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
    """Name under which `token_for` finds a Hub repository's token.

    It is used in storage options instead of the token itself, so that these are not secret.
    """

    __slots__ = ()


def token_name(name: str) -> TokenName:
    """Return a name to send to workers in place of this process's token for a Hub repository.

    `name` is the repository's name, which is also the result if there is no token. `token_for`
    returns the token for the result, here and on workers that have the token.
    """
    token = recall(f"token of {name}")
    return TokenName(name if token is None else f"{name} {_digest(token)}")


def token_for(name: str) -> str | None:
    """Return the token that is remembered for a Hub repository, or None if there is none.

    None means that HF_TOKEN or the user's login is used. `name` is the repository's name, or the
    result of `token_name`; if this process lacks the latter's token, it takes the one that it
    remembers for the repository.
    """
    return recall(f"token of {name}", recall(f"token of {name.partition(' ')[0]}"))


def share_tokens_with_workers(names: Iterable[str]) -> None:
    """Send the remembered tokens of these Hub repositories to all workers of the Dask client.

    They are sent as by `share_with_workers`.
    """
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
