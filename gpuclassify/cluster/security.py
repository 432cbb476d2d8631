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
        """Return Dask's arguments for opening a TLS connection, as ``distributed.Security`` does.

        `role` is "client", "scheduler" or "worker". The SSL context in the result ignores a
        connection that ends without a closing message.
        """
        return _quiet(super().get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return Dask's arguments for accepting TLS connections, as ``distributed.Security`` does.

        `role` is "client", "scheduler" or "worker". The SSL context in the result ignores a
        connection that ends without a closing message.
        """
        return _quiet(super().get_listen_args(role))


def _quiet(arguments: dict[str, Any]) -> dict[str, Any]:
    if (context := arguments.get("ssl_context")) is not None:
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    return arguments


def make_security(settings: object) -> Security | None:
    """Convert the argument `security` of `get_client` to an object that requires TLS, or None.

    None and False mean no TLS. True makes a certificate in memory for this cluster's processes
    only. A path is a directory with ``ca.pem``, ``cert.pem`` and ``key.pem``, or ``ca.crt``,
    ``tls.crt`` and ``tls.key``. A mapping has the fields of ``distributed.Security``, with files or
    the text of certificates. A ``distributed.Security`` is returned unchanged if it requires TLS.
    Raises ValueError if it does not, TypeError for other settings, and FileNotFoundError if a file
    is missing.
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

    Such a cluster gets TLS by default. `options` are the arguments of the cluster. Returns False if
    they set a host, an interface, a protocol (the protocol UCX has no TLS) or ``scheduler_kwargs``,
    and for ``processes=False``, where workers are threads of this process.
    """
    is_placed = not options.keys().isdisjoint(("host", "interface", "protocol", "scheduler_kwargs"))
    is_ucx = any(options.get(f"enable_{name}") for name in UCX_TRANSPORTS)
    return not is_placed and not is_ucx and options.get("processes") is not False


def certificate_files(directory: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Return the paths of three files in a directory: certificate authority, certificate and key.

    They are ``ca.pem``, ``cert.pem`` and ``key.pem``, or ``ca.crt``, ``tls.crt`` and ``tls.key``.
    Raises FileNotFoundError if neither set is complete.
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
    """Make `folder`, with a new TLS certificate and its key, as `make_security` reads them.

    Only the owner can read them. Raises FileExistsError if the folder exists.
    """
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
    """Log a warning if other machines can reach one of a scheduler's `addresses` without TLS.

    The warning ends with `cure`, a sentence that says what to do, passed without its full stop.
    """
    if open_addresses := ", ".join(filter(is_open, addresses)):
        logger.warning(
            "the Dask scheduler at %s takes connections without TLS: whoever reaches it can run "
            "code on the workers and read what they hold, tokens included. %s.",
            open_addresses,
            cure,
        )


def is_open(address: str) -> bool:
    """Return whether a Dask address can be reached by other machines without TLS.

    That is, the address has a protocol without TLS, and is not this machine's loopback address. A
    host name that cannot be resolved here counts as reachable.
    """
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
