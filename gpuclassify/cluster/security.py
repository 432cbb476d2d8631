"""TLS between client, scheduler and workers, and a warning without it.

``python -m gpuclassify.cluster.security FOLDER`` makes a folder with a new certificate, for
processes that share a file system.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed import Security

from gpuclassify.settings.paths import is_file

logger = logging.getLogger(__name__)

# Files of authority, certificate and key: our names, and those in a Kubernetes secret.
FILES = (("ca.pem", "cert.pem", "key.pem"), ("ca.crt", "tls.crt", "tls.key"))
ROLES = ("client", "scheduler", "worker")
# Options that make dask-cuda's clusters use UCX.
UCX_TRANSPORTS = ("tcp_over_ucx", "infiniband", "nvlink", "rdmacm")
PLAIN_SCHEMES = ("tcp://", "ws://", "ucx://", "ucxx://")


class QuietSecurity(Security):
    """TLS settings for Dask, under which a connection may end without TLS's closing message.

    Dask closes connections in this way. From Python 3.13 on, such an end may leave an error in
    OpenSSL's queue, which closes the next connection that the thread reads, so that workers are
    lost while a cluster grows. Truncated messages are still detected, because Dask's messages have
    lengths.
    """

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return Dask's arguments to open connections that may end without a closing message."""
        return _quiet(super().get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return Dask's arguments to accept connections that may end without a closing message."""
        return _quiet(super().get_listen_args(role))


def _quiet(arguments: dict[str, Any]) -> dict[str, Any]:
    if (context := arguments.get("ssl_context")) is not None:
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    return arguments


def make_security(settings: object) -> Security | None:
    """Convert the argument `security` of `get_client` to an object that requires TLS, or None.

    None and False mean no TLS. True makes a certificate in memory. A path is a directory for
    `certificate_files`. A mapping has the fields of ``distributed.Security``, with files or the
    text of certificates. A ``distributed.Security`` is returned unchanged; raises ValueError if it
    does not require TLS.
    """
    if settings is None or settings is False:
        return None
    if settings is True:
        return QuietSecurity.temporary()
    if isinstance(settings, Security):
        if not settings.require_encryption:
            raise ValueError(
                "security= has require_encryption=False, which leaves connections open; pass "
                "Security(require_encryption=True, ...), or security=True"
            )
        return settings
    if isinstance(settings, str | os.PathLike):
        authority, certificate, key = map(str, certificate_files(settings))
        settings = {"tls_ca_file": authority}
        settings |= {f"tls_{role}_cert": certificate for role in ROLES}
        settings |= {f"tls_{role}_key": key for role in ROLES}
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"security={settings!r} is none of True, a directory with {', '.join(FILES[0])}, a "
            "dict and distributed.Security"
        )
    security = QuietSecurity(**{"require_encryption": True, **settings})
    pairs = [f"tls_{role}_{part}" for role in ROLES for part in ("cert", "key")]
    for name in ["tls_ca_file", *pairs]:
        value = getattr(security, name)
        # Dask also accepts the text of a certificate instead of a file.
        if value is not None and "\n" not in str(value) and not is_file(value):
            raise FileNotFoundError(f"security: {name} names {str(value)!r}, which is no file")
    return security


def listens_here_alone(options: Mapping[str, Any]) -> bool:
    """Return whether all processes of a local cluster listen only on the loopback address.

    Returns False if `options` set a host, interface, protocol (also UCX, which has no TLS) or
    ``scheduler_kwargs``, and for ``processes=False``, where workers are threads of this process.
    """
    is_placed = not options.keys().isdisjoint(("host", "interface", "protocol", "scheduler_kwargs"))
    is_ucx = any(options.get(f"enable_{name}") for name in UCX_TRANSPORTS)
    return not is_placed and not is_ucx and options.get("processes") is not False


def certificate_files(directory: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Return the paths of a directory's certificate authority, certificate and key.

    They are ``ca.pem``, ``cert.pem`` and ``key.pem``, or ``ca.crt``, ``tls.crt`` and ``tls.key``.
    """
    folder = Path(directory).expanduser()
    for names in FILES:
        authority, certificate, key = (folder / name for name in names)
        if all(is_file(path) for path in (authority, certificate, key)):
            return authority, certificate, key
    raise FileNotFoundError(
        f"{str(folder)!r} is no directory with {', '.join(FILES[0])} (or {', '.join(FILES[1])}), "
        "the certificates of an authority and of the cluster, and their key"
    )


def make_certificate(folder: Path) -> None:
    """Make `folder`, with a new TLS certificate and its key, which only the owner can read."""
    made = make_security(True)
    assert made is not None
    folder.mkdir(mode=0o700)
    for name, text in zip(
        FILES[0], (made.tls_ca_file, made.tls_worker_cert, made.tls_worker_key), strict=True
    ):
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


def warn_if_open(addresses: Iterable[str], cure: str) -> None:
    """Log a warning, which ends with `cure`, if other machines can reach an address without TLS."""
    if open_addresses := ", ".join(filter(is_open, addresses)):
        logger.warning(
            "the Dask scheduler at %s takes connections without TLS: whoever reaches it can run "
            "code on the workers and read what they hold, tokens included. %s.",
            open_addresses,
            cure,
        )


def is_open(address: str) -> bool:
    """Return whether other machines may reach a Dask address without TLS."""
    if not address.startswith(PLAIN_SCHEMES):
        return False
    from distributed.comm import get_address_host, resolve_address

    try:
        host = get_address_host(resolve_address(address)).partition("%")[0]
        return not ipaddress.ip_address(host).is_loopback
    except (OSError, ValueError):  # only the cluster resolves the name
        return True


if __name__ == "__main__":
    make_certificate(Path(sys.argv[1]))
