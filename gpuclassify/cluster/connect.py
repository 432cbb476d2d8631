"""A client of a scheduler that is running, by its address or its file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuclassify.cluster.security import make_security, warn_if_open

if TYPE_CHECKING:
    from distributed import Client

# How long a scheduler may take to write its file, once the file is there.
WRITING_SECONDS = 2.0


class NoSchedulerError(OSError):
    """Nothing that speaks Dask's protocol answers at an address.

    Attributes
    ----------
    address : str
    """

    def __init__(
        self, address: str, instead: str = "start a cluster here with get_client('auto')"
    ) -> None:
        super().__init__(
            f"no Dask scheduler answers at {address}; check that it runs and that this machine "
            f"reaches its port, or {instead}"
        )
        self.address = address


def connect(
    address: str | None,
    scheduler_file: str | Path | None,
    security: Any,
    options: dict[str, Any],
) -> Client:
    """A client of the scheduler at an address or of a file; see `gpuclassify.get_client`.

    Raises
    ------
    NoSchedulerError
        Nothing that speaks Dask's protocol answers.
    OSError, TypeError, ValueError
        The file or certificates are none, or options exclude each other.
    """
    from dask import config
    from dask.utils import parse_timedelta
    from distributed import Client

    if address is not None and scheduler_file is not None:
        raise ValueError(
            f"address={address!r} and scheduler_file={str(scheduler_file)!r} both name a "
            "scheduler; give one of them"
        )
    if security is True:
        raise ValueError(
            "security=True makes a new certificate, which a running scheduler does not know; "
            "give the directory or dict of the certificates that it was started with"
        )
    timeout_seconds = parse_timedelta(
        options.get("timeout") or config.get("distributed.comm.timeouts.connect"), "s"
    )
    if scheduler_file is not None:
        address = _read_scheduler_file(Path(scheduler_file), timeout_seconds)
    assert address is not None
    _check_scheme(address)
    security = make_security(security)
    _shake_hands(address, security, timeout_seconds)
    try:
        client = Client(address, security=security, **options)
    except OSError as err:
        raise NoSchedulerError(address) from err
    warn_if_open(
        [client.scheduler.address],
        "Start it with certificates (dask scheduler --protocol tls:// --tls-ca-file ...), and pass "
        "them as security=",
    )
    return client


def _check_scheme(address: str) -> None:
    from distributed.comm.registry import get_backend

    scheme, colon, rest = address.partition("://")
    try:
        get_backend(scheme if colon else "tcp")
    except ValueError as err:
        raise ValueError(
            f"address={address!r}: no scheduler speaks {scheme}; use tcp://{rest}, or "
            f"tls://{rest} where it was started with certificates"
        ) from err


def _shake_hands(address: str, security: Any, timeout_seconds: float) -> None:
    """Raise unless Dask's protocol is spoken there; a Client waits for an answer for ever."""
    from distributed import Security
    from distributed.comm import connect
    from distributed.utils import LoopRunner, wait_for

    arguments = (security or Security()).get_connection_args("client")

    async def shake_hands() -> None:
        connecting = connect(address, timeout=timeout_seconds, **arguments)
        comm = await wait_for(connecting, timeout_seconds)
        await comm.close()

    try:
        LoopRunner().run_sync(shake_hands)
    except TypeError:  # TLS without certificates
        raise
    except Exception as err:  # other protocols' answers are read as anything, such as exabytes
        raise NoSchedulerError(address) from err


def _read_scheduler_file(path: Path, timeout_seconds: float) -> str:
    """Return the scheduler's address once the file is there and whole."""
    found = 0.0  # when it was there first
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return str(json.loads(path.read_text())["address"])
        except IsADirectoryError as err:
            raise ValueError(
                f"{path} is a directory, and no scheduler file; give the file that "
                "dask scheduler --scheduler-file wrote"
            ) from err
        except (FileNotFoundError, ValueError, KeyError, TypeError) as err:
            if not isinstance(err, FileNotFoundError):
                found = found or time.monotonic()
                deadline = min(deadline, found + WRITING_SECONDS)
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            if isinstance(err, FileNotFoundError):
                raise FileNotFoundError(
                    f"no scheduler file {path} after {timeout_seconds:g} seconds; start one with "
                    f"dask scheduler --scheduler-file {path}"
                ) from err
            raise ValueError(
                f"{path} is not a scheduler file: it has no 'address'; give the file that "
                "dask scheduler --scheduler-file wrote"
            ) from err
