"""TLS between client, scheduler and workers, and a word of warning where it is missing."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Security

logger = logging.getLogger(__name__)

# Certificate authority, certificate and key in a directory: our names, and a Kubernetes secret's.
FILES = (("ca.pem", "cert.pem", "key.pem"), ("ca.crt", "tls.crt", "tls.key"))
ROLES = ("client", "scheduler", "worker")
PLAIN_SCHEMES = ("tcp://", "ws://", "ucx://", "ucxx://")


def make_security(settings: Any) -> Security | None:
    """Turn the `security` of `get_client` into Dask's.

    Parameters
    ----------
    settings : None, bool, path, mapping or distributed.Security
        True makes a certificate that only this cluster's processes know, in memory. A path names
        a directory with ``ca.pem``, ``cert.pem`` and ``key.pem``, or ``ca.crt``, ``tls.crt`` and
        ``tls.key``. A mapping has the fields of ``distributed.Security``, with files or the text
        of certificates.

    Returns
    -------
    distributed.Security or None
        None: nothing was asked for. What is returned refuses connections without TLS.

    Raises
    ------
    ImportError
        True without the package cryptography.
    FileNotFoundError
        A file is missing.
    TypeError
        Settings of another kind, or a field that ``Security`` does not have.
    ValueError
        A ``Security`` that does not ask for encryption.
    """
    from distributed import Security

    if settings is None or settings is False:
        return None
    if settings is True:
        try:
            return Security.temporary()
        except ImportError as err:
            raise ImportError(
                "security=True makes its own certificate with the package cryptography: pip "
                "install 'gpuclassify[tls]', or pass certificates of your own"
            ) from err
    if isinstance(settings, Security):
        if not settings.require_encryption:
            raise ValueError(
                "security= has require_encryption=False, which leaves connections open; pass "
                "Security(require_encryption=True, ...), or security=True"
            )
        return settings
    if isinstance(settings, str | os.PathLike):
        return _from_mapping(_fields_of_directory(Path(settings).expanduser()))
    if isinstance(settings, Mapping):
        return _from_mapping(settings)
    raise TypeError(
        f"security={settings!r} is none of True, a directory with {', '.join(FILES[0])}, a dict "
        "and distributed.Security"
    )


def _fields_of_directory(folder: Path) -> dict[str, str]:
    for names in FILES:
        authority, certificate, key = (folder / name for name in names)
        if all(path.is_file() for path in (authority, certificate, key)):
            fields = {"tls_ca_file": str(authority)}
            for role in ROLES:
                fields |= {f"tls_{role}_cert": str(certificate), f"tls_{role}_key": str(key)}
            return fields
    raise FileNotFoundError(
        f"security={str(folder)!r} is no directory with {', '.join(FILES[0])} (or "
        f"{', '.join(FILES[1])}) in it"
    )


def _from_mapping(fields: Mapping[str, Any]) -> Security:
    from distributed import Security

    security = Security(**{"require_encryption": True, **fields})
    pairs = [f"tls_{role}_{part}" for role in ROLES for part in ("cert", "key")]
    for name in ["tls_ca_file", *pairs]:
        value = getattr(security, name)
        # Dask takes the text of a certificate in the place of a file's name.
        if value is not None and "\n" not in str(value) and not Path(value).is_file():
            raise FileNotFoundError(f"security: {name} names {str(value)!r}, which is no file")
    return security


def warn_if_open(addresses: Iterable[str], *, are_local: bool) -> None:
    """Log a warning if others than this machine reach a scheduler that takes any client.

    Parameters
    ----------
    addresses : iterable of str
        Where the scheduler listens, as in ``"tcp://0.0.0.0:8786"``.
    are_local : bool
        Whether the scheduler was started here, so that every address but this machine's own is
        worth a word; else only addresses of the public Internet are.
    """
    is_open = is_reachable_by_others if are_local else is_public
    found = [address for address in addresses if is_open(address)]
    if found:
        logger.warning(
            "the Dask scheduler at %s takes connections without TLS: whoever reaches it can run "
            "code on the workers and read what they hold, tokens included. Pass security=True, "
            "or certificates; or keep it on this machine with host='127.0.0.1'.",
            ", ".join(found),
        )


def is_reachable_by_others(address: str) -> bool:
    """Whether an address without TLS is not this machine's loopback."""
    host = _plain_host(address)
    return host is not None and not host.is_loopback


def is_public(address: str) -> bool:
    """Whether an address without TLS is one of the public Internet."""
    host = _plain_host(address)
    return host is not None and host.is_global


def _plain_host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address behind an address without TLS; None where there is none."""
    if not address.startswith(PLAIN_SCHEMES):
        return None
    from distributed.comm import get_address_host, resolve_address

    try:
        return ipaddress.ip_address(get_address_host(resolve_address(address)).partition("%")[0])
    except (OSError, ValueError):  # a name that only the cluster resolves
        return None
