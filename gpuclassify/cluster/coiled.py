"""Clusters that the service Coiled starts in the user's cloud account."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpuclassify.cluster.sizing import check_options
from gpuclassify.settings.checks import install

if TYPE_CHECKING:
    from distributed import Client

IDLE_TIMEOUT = "20 minutes"
SECRET_WORDS = {
    "APIKEY", "CREDENTIAL", "CREDENTIALS", "KEY", "PASSWD", "PASSWORD", "PWD", "SECRET", "TOKEN",
}  # fmt: skip
# Matches tokens of Hugging Face, GitHub, OpenAI and AWS, and passwords in URLs.
SECRET_VALUES = re.compile(
    r"hf_\w{16}|gh[pousr]_\w{16}|sk-[\w-]{16}|AKIA\w{12}|://[^/@:\s]+:[^/@]+@"
)

LEAST_SECRET = 8  # minimum characters of a secret to search for


def start_coiled(options: Mapping[str, Any], *, threads_per_worker: int = 1) -> Client:
    """Start a cluster with Coiled, and return a client that closes the cluster when it is closed.

    Each machine has one worker, which runs `threads_per_worker` tasks at a time. This process's
    ``HF_TOKEN``, and variables in the option ``private_environ``, are sent directly to the cluster,
    so that Coiled's servers do not get them. Other `options` are arguments of ``coiled.Cluster``.
    """
    cluster_class = _cluster_class()
    arguments, private = coiled_arguments(options, threads_per_worker=threads_per_worker)
    from gpuclassify.cluster.local import owning_client
    from gpuclassify.cluster.preload import set_up

    def send_and_set_up(client: Client) -> None:
        if private:
            cluster.send_private_envs(private, raise_on_error=True)
        set_up(client, threads=None)  # all cores, because each worker has a machine

    cluster = cluster_class(**arguments)
    return owning_client(cluster, send_and_set_up)


def coiled_arguments(
    options: Mapping[str, Any], *, threads_per_worker: int = 1
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of ``coiled.Cluster``, and environment variables to hide from Coiled.

    The latter are ``private_environ`` of `options`, and ``HF_TOKEN`` if it is set here. Raises
    TypeError for unknown options, and ValueError for a secret among the others, because Coiled
    would store it.
    """
    private = dict(options.get("private_environ") or {})
    if token := os.environ.get("HF_TOKEN"):
        private = {"HF_TOKEN": token} | private
    arguments = {name: value for name, value in options.items() if name != "private_environ"}
    check_options(arguments, [_cluster_class()])
    if name := find_secret(arguments, private.values()):
        raise ValueError(
            f"{name} looks like a secret, and Coiled's arguments go through Coiled, which keeps "
            f"them. Pass it as private_environ={{{name.removeprefix('environ.')!r}: ...}}: that "
            "goes from here straight to the cluster's memory, as HF_TOKEN does when it is set here."
        )
    defaults = {"scheduler_gpu": False, "idle_timeout": IDLE_TIMEOUT, "show_widget": False}
    workers = {"nthreads": threads_per_worker} | dict(arguments.get("worker_options") or {})
    return defaults | arguments | {"worker_options": workers}, private


def find_secret(options: Mapping[str, Any], secrets: Iterable[str] = ()) -> str | None:
    """Return the name of the first option that is or contains a secret; None if there is none.

    A secret is an environment variable with a word such as TOKEN in its name, a text that looks
    like a token, or a text that contains one of `secrets` of at least 8 characters. Keys of nested
    options are joined by dots, such as "environ.HF_TOKEN".
    """
    secrets = [secret for secret in secrets if len(secret) >= LEAST_SECRET]
    for name, value in _texts(options):
        words = re.split(r"[^A-Z]+", name[8:].upper()) if name.startswith("environ.") else []
        if (
            not SECRET_WORDS.isdisjoint(words)
            or SECRET_VALUES.search(value)
            or any(secret in value for secret in secrets)
        ):
            return name
    return None


def _texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and text of every string in nested options, such as ``environ.HF_TOKEN``."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _texts(inner, name)
    elif isinstance(value, str):
        yield name, value


def _cluster_class() -> Any:
    try:
        return importlib.import_module("coiled").Cluster
    except ModuleNotFoundError as err:
        raise RuntimeError(
            "cluster_type='coiled' needs the package coiled and an account: "
            f"{install('coiled')}, then coiled login"
        ) from err
