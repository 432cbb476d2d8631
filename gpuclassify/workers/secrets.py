"""Secrets of this process: Hub tokens and storage options, held in memory and shared with workers.

Nothing else holds a secret: what is pickled, logged or written knows only the name to ask for.
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
# By client: the scheduler's identifier, and the secrets that it has been given.
_shared: weakref.WeakKeyDictionary[Any, tuple[str, dict[str, Any]]] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


def remember(name: str, value: object) -> None:
    """Keep a secret in this process's memory, and nowhere else, under a name that is no secret.

    It is a token, or storage options for fsspec, which may hold keys of an object store.
    """
    _secrets[name] = value


def name_of_options(what: str, options: Mapping[str, Any]) -> str:
    """Return a name for storage options, itself no secret, which differs between users' options.

    Several clients may share the workers of a cluster, which know all of their secrets by name.
    """
    return f"{what} {_digest(repr(options))}" if options else what


@functools.cache
def _digest(secret: str) -> str:
    # Slow, because names are in logs, and a short password could be found by trying many.
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"gpuclassify", 100_000).hex()[:8]


def recall(name: str, default: object = None) -> Any:
    """Return a secret that this process remembers, else the default."""
    return _secrets.get(name, default)


def share_with_workers(names: Iterable[str]) -> None:
    """Hand remembered secrets to all present and future workers of the current client.

    Does nothing without a distributed client or for names without a secret, and nothing twice for
    the same client, scheduler and secret. A scheduler that was started again at the same address
    is another one, and has forgotten the secrets. RuntimeError: the client is asynchronous, so that
    this call could not wait for its workers.
    """
    held = {name: value for name in names if (value := recall(name))}
    distributed = sys.modules.get("distributed")
    if not held or distributed is None:
        return
    try:
        client = distributed.default_client()
    except ValueError:
        return
    if client.asynchronous:
        raise RuntimeError(
            f"secrets ({', '.join(sorted(held))}) cannot be handed to workers through an "
            "asynchronous Client; set HF_TOKEN on the workers, or use a Client without "
            "asynchronous=True"
        )
    with _sharing:
        scheduler = client.sync(client.scheduler.identity, n_workers=0)["id"]
        shared_with, known = _shared.get(client, ("", {}))
        if shared_with != scheduler:
            _shared[client] = scheduler, (known := {})
        for name, value in held.items():
            if known.get(name) != value:
                client.register_plugin(_plugin_class()(name, value))
                known[name] = value


def remember_token(name: str, token: str) -> None:
    """Keep a Hub token for one repository in this process's memory, and nowhere else.

    The name is that of a model, or of a dataset after ``datasets/``. White space around the token
    is dropped. ValueError, which does not show it: it has none or characters that no token has.
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
    """Name of one user's token for a repository, which takes its place in storage options."""

    __slots__ = ()


def token_name(name: str) -> TokenName:
    """Return the name, for `token_for`, of the token that this process has for a repository."""
    token = recall(f"token of {name}")
    return TokenName(name if token is None else f"{name} {_digest(token)}")


def token_for(name: str) -> str | None:
    """Return the remembered token of a repository; None leaves HF_TOKEN or the user's login.

    The name is that of the repository, or one of `token_name`.
    """
    return recall(f"token of {name}", recall(f"token of {name.partition(' ')[0]}"))


def share_tokens_with_workers(names: Iterable[str]) -> None:
    """Share the tokens of repositories with workers; see `share_with_workers`."""
    names = [*names]
    share_with_workers(f"token of {name}" for name in {*names, *map(token_name, names)})


@functools.cache
def _plugin_class() -> type:
    """Make the plugin class late: its base class needs distributed, which is slow to import."""
    import cloudpickle  # type: ignore[import-untyped]
    from distributed import Worker, WorkerPlugin

    class SecretPlugin(WorkerPlugin):
        """Plugin that keeps one secret in a worker process.

        The secret is sent under a pad of random bytes that is sent with it. That keeps the secret
        out of Dask's log, which shows whole messages at level DEBUG, but does not hide it from a
        reader of the connection: TLS does.
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
