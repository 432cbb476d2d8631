"""Calls to the Hugging Face Hub: tried again while it is busy, its errors told without secrets."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from gpuclassify.hub import HubUnreachableError, remember_token, token_for

Answer = TypeVar("Answer")

TRIES = 6
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
# Answers that another try may not get: the Hub is busy, or another commit came between.
PASSING = (408, 409, 412, 423, 425, 429, 500, 502, 503, 504)


class DatasetAccessError(PermissionError):
    """A dataset repository is missing or private, or the token may not do this with it.

    Attributes
    ----------
    status : int, optional
        Of the answer.
    """

    status: int | None = None


class DatasetMissingError(FileNotFoundError):
    """A dataset repository has no such revision or file."""


class HubRefusedError(RuntimeError):
    """The Hub refuses a request, and would refuse it again."""


class HubBusyError(HubUnreachableError):
    """The Hub does not answer, or asks to come back later.

    Attributes
    ----------
    status : int, optional
        Of its answer; None without one.
    wait_seconds : float, optional
        What it asks for.
    """

    status: int | None = None
    wait_seconds: float | None = None


def token_name(repo_type: str, repo: str) -> str:
    """Under which name `gpuclassify.hub` keeps a repository's token; models have their own."""
    return repo if repo_type == "model" else f"{repo_type}s/{repo}"


def keep_token(repo_type: str, repo: str, token: str | None) -> None:
    """Keep a token in this process's memory; None keeps what is there.

    Raises
    ------
    ValueError
        It has characters that no token has. The message does not show it.
    """
    if token is not None:
        remember_token(token_name(repo_type, repo), token)


def token_of(repo_type: str, repo: str) -> str | None:
    """The token that was kept; None lets the client library use HF_TOKEN or the user's login."""
    return token_for(token_name(repo_type, repo))


def retried(repo: str, call: Callable[[], Answer]) -> Answer:
    """The answer to a call that does no harm when it is made twice.

    Parameters
    ----------
    repo : str
        For messages.
    call : callable
        Of the client library, which makes some requests once only.

    Raises
    ------
    DatasetAccessError, DatasetMissingError, HubRefusedError
        At once.
    HubBusyError
        After `TRIES` tries.
    """
    for attempt in range(1, TRIES + 1):
        try:
            return asked(repo, call)
        except HubBusyError as err:
            if attempt == TRIES:
                raise
            wait(err, attempt)
    raise AssertionError("the last try returns or raises")


def wait(error: HubBusyError, attempt: int) -> None:
    """Wait as long as the Hub asks for, or longer each time; not all workers at once."""
    seconds = error.wait_seconds
    if seconds is None:
        seconds = min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS)
    time.sleep(seconds + random.uniform(0, FIRST_WAIT_SECONDS))


def asked(repo: str, call: Callable[[], Answer]) -> Answer:
    """The answer to a call of the client library, whose errors hold requests and their headers.

    What is raised instead has them neither as its cause nor as its context.

    Raises
    ------
    DatasetAccessError, DatasetMissingError, HubRefusedError, HubBusyError
    """
    from huggingface_hub.errors import HTTPError

    try:
        return call()
    except HTTPError as err:
        told = _explanation(err, repo)
    raise told


def _explanation(err: Exception, repo: str) -> Exception:
    from huggingface_hub import errors

    response = getattr(err, "response", None)
    if response is None:
        return HubBusyError(f"the Hub does not answer for {repo}: {type(err).__name__}")
    status = response.status_code
    reason = _without_queries(getattr(err, "server_message", None) or response.reason_phrase)
    if status in PASSING:
        busy = HubBusyError(f"the Hub answered {status} for {repo}: {reason}")
        busy.status, busy.wait_seconds = status, _asked_wait(response)
        return busy
    if isinstance(err, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return DatasetMissingError(f"{repo} has no such revision or file: {reason}")
    if status in (401, 403) or isinstance(err, errors.RepositoryNotFoundError):
        denied = DatasetAccessError(
            f"the Hub answered {status} for {repo} ({reason}): it does not exist or is private, or "
            "the token may not do this. Check the spelling; pass a token with token=, or set "
            "HF_TOKEN here and on the workers"
        )
        denied.status = status
        return denied
    return HubRefusedError(f"the Hub answered {status} for {repo}: {reason}")


def _asked_wait(response: object) -> float | None:
    """Seconds until the Hub wants to be asked again, if it says so."""
    from huggingface_hub.utils import parse_ratelimit_headers

    headers = response.headers  # type: ignore[attr-defined]
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    asked = headers.get("Retry-After", "")
    return float(asked) if asked.isdigit() else None


def _without_queries(text: str) -> str:
    """The text with URLs' queries left out, which may be signatures."""
    return re.sub(r"\?\S*", "", text)
