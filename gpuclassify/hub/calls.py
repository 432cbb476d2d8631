"""Calls to the Hugging Face Hub: retried while it is busy, with errors that show no secrets.

The client library's errors hold requests with their headers, so they are not kept as causes.
"""

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpuclassify.workers.secrets import token_for

Answer = TypeVar("Answer")

TRIES = 6
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
MOST_ASKED_SECONDS = 600.0  # longest wait that a server may request
# HTTP statuses worth a retry: the Hub is busy, or another commit came in between.
BUSY_STATUSES = (408, 409, 412, 423, 425, 429, 500, 502, 503, 504)


class CheckpointError(ValueError):
    """Error raised when a model's files are incomplete, damaged, or do not fit their use."""


class ModelNotFoundError(FileNotFoundError):
    """Error raised when a model, revision, directory or file does not exist."""


class ModelAccessError(PermissionError):
    """Error raised when a model is gated or private and there is no token with access."""


class MissingOrPrivateError(ModelNotFoundError, ModelAccessError):
    """Error raised when a model is either missing or private; the Hub does not say which."""


class ModelChangedError(RuntimeError):
    """Error raised when local files of a model have changed since they were pinned to a digest."""


class DatasetMissingError(FileNotFoundError):
    """Error raised when a dataset repository of the Hub lacks a revision or file."""


class DatasetAccessError(PermissionError):
    """Error raised when a dataset repository is missing or private, or the token lacks rights."""

    status: int | None = None  # HTTP status


class HubRefusedError(RuntimeError):
    """Error raised when the Hub refuses a request, and a retry would not help."""


class HubUnreachableError(ConnectionError):
    """Error raised when the Hub is out of reach (or HF_HUB_OFFLINE=1) and a file is not cached."""


class HubBusyError(HubUnreachableError):
    """Error raised when the Hub gives no answer, or one of `BUSY_STATUSES`: a retry may help."""

    status: int | None = None  # HTTP status; None without an answer
    wait_seconds: float | None = None  # requested wait


def retried(
    call: Callable[[], Answer], may_pass: Callable[[Exception], bool], *, tries: int = TRIES
) -> Answer:
    """Return ``call()``, made up to `tries` times while it raises errors that `may_pass` accepts.

    The wait between two calls is about the error's attribute ``wait_seconds`` if set, else 1, 2, 4
    and so on up to 60 seconds. An error with more than 600 ``wait_seconds`` is raised at once.
    """
    for attempt in range(1, tries):
        try:
            return call()
        except Exception as err:
            if not may_pass(err):
                raise
            seconds = getattr(err, "wait_seconds", None)
            if seconds is not None and seconds > MOST_ASKED_SECONDS:
                raise
        if seconds is None:
            seconds = min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS)
        # Outside of the handler, so that the error and its request are freed before the wait.
        time.sleep(seconds + random.uniform(0, FIRST_WAIT_SECONDS))
    return call()


def is_busy(error: Exception) -> bool:
    """Tell whether an error is a `HubBusyError`, so that a retry may succeed."""
    return isinstance(error, HubBusyError)


def ask(repo: str, call: Callable[[], Answer], *, tries: int = TRIES) -> Answer:
    """Return ``call()``, a huggingface_hub call about the dataset repository `repo`, with retries.

    The call must be safe to repeat. HTTP errors are raised as errors of this module, such as
    DatasetMissingError.
    """
    return retried(lambda: _answer(call, lambda err: _explain(err, repo)), is_busy, tries=tries)


def ask_model(name: str, revision: str, call: Callable[[], Answer], tries: int = TRIES) -> Answer:
    """Return ``call()``, a huggingface_hub call about the model `name` at `revision`, with retries.

    Raises ModelNotFoundError, ModelAccessError or, also if the Hub stays busy, HubUnreachableError.
    """
    try:
        return retried(
            lambda: _answer(call, lambda err: _explain_model(err, name, revision)),
            is_busy,
            tries=tries,
        )
    except HubBusyError as err:
        text = str(err)
    raise HubUnreachableError(text)  # callers fall back on the cache for this one error


def _answer(call: Callable[[], Answer], explain: Callable[[BaseException], Exception]) -> Answer:
    from huggingface_hub import errors

    not_cached = (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)
    causes = (errors.HTTPError, errors.OfflineModeIsEnabled, errors.FileMetadataError)
    try:
        return call()
    except (*causes, *not_cached) as err:
        client_has_retried = isinstance(err, errors.LocalEntryNotFoundError)
        failure = explain((isinstance(err, not_cached) and err.__cause__) or err)
    if client_has_retried and isinstance(failure, HubBusyError) and failure.status is None:
        raise HubUnreachableError(str(failure))
    raise failure


def unreachable(name: str, revision: str, reason: str) -> str:
    """Return the error message for a model that is not cached while the Hub is out of reach."""
    return (
        f"{name} at {revision} is not (completely) in the cache, there is no directory "
        f"{Path(name).absolute()}, and the Hub cannot be reached: {reason}. Run `hf download "
        f"{name} --revision {revision}` once with a network, with the same cache, or pass the path "
        "of a directory that holds the model. If it is gated, ask for access at "
        f"https://huggingface.co/{name} first, and `hf auth login`"
    )


def _explain(err: BaseException, repo: str) -> Exception:
    from huggingface_hub import errors

    status, reason = _read_status(err)
    if status is None:
        return _no_answer(err, f"the Hub does not answer for {repo}: {reason}")
    text = f"the Hub answered {status} for {repo}: {reason}"
    if status in BUSY_STATUSES:
        return _no_answer(err, text)
    if isinstance(err, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return DatasetMissingError(f"{repo} has no such revision or file: {reason}")
    if status in (401, 403) or isinstance(err, errors.RepositoryNotFoundError):
        denied = DatasetAccessError(
            f"{text}; it does not exist or is private, or the token may not do this. Check the "
            "spelling; pass a token with token=, or set HF_TOKEN here and on the workers"
        )
        denied.status = status
        return denied
    return HubRefusedError(text)


def _explain_model(err: BaseException, name: str, revision: str) -> Exception:
    from huggingface_hub import errors, get_token

    status, reason = _read_status(err)
    page = f"https://huggingface.co/{name}"
    if isinstance(err, errors.GatedRepoError):
        ways = (
            f" and the token in use has no access to it: ask for access at {page} with the account "
            "of that token, or pass another with token= or HF_TOKEN"
        )
        if token_for(name) is None and get_token() is None:
            ways = f": ask for access at {page}, then pass a token with token= or HF_TOKEN"
        return ModelAccessError(f"{name} is gated{ways}")
    if isinstance(err, errors.RepositoryNotFoundError):
        text = (
            f"the Hub has no model {name!r} and there is no directory {Path(name).absolute()}. "
            "Check the spelling. A private model needs a token that may read it: token= or HF_TOKEN"
        )
        return MissingOrPrivateError(text) if status == 401 else ModelNotFoundError(text)
    if isinstance(err, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision {revision!r}; see {page}/commits/main")
    if isinstance(err, errors.RemoteEntryNotFoundError):
        return ModelNotFoundError(f"{name} at {revision} lacks a file: {reason}")
    if status in (401, 403):
        return ModelAccessError(
            f"the Hub refused access to {name} ({status}, {reason}): the token is not valid or "
            f"not allowed to read it. Pass another with token= or HF_TOKEN; see {page}"
        )
    reason = reason if status is None else f"the Hub answered {status}: {reason}"
    return _no_answer(err, unreachable(name, revision, reason))


def _read_status(err: BaseException) -> tuple[int | None, str]:
    """Return a failed call's HTTP status (None if the Hub did not answer) and its reason."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    response = getattr(err, "response", None)
    if response is not None:
        reason = getattr(err, "server_message", None) or response.reason_phrase
        return response.status_code, _without_queries(reason)
    if isinstance(err, OfflineModeIsEnabled):
        return None, "HF_HUB_OFFLINE=1 is set"
    lines = (str(err).strip() or "no details").splitlines()
    return None, f"{type(err).__name__}: {_without_queries(lines[0])}"


def _no_answer(err: BaseException, text: str) -> HubUnreachableError:
    """Return a `HubBusyError` if a retry may help, else a plain `HubUnreachableError`."""
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import parse_ratelimit_headers

    response = getattr(err, "response", None)
    is_final = response is not None and response.status_code not in BUSY_STATUSES
    if is_final or not isinstance(err, HTTPError):
        return HubUnreachableError(text)
    busy = HubBusyError(text)
    if response is not None:
        limit = parse_ratelimit_headers(response.headers)
        retry_after = response.headers.get("Retry-After", "")
        seconds = float(retry_after) if retry_after.isdecimal() else None
        if limit is not None and limit.remaining == 0:
            seconds = float(limit.reset_in_seconds)
        if seconds is not None and seconds > MOST_ASKED_SECONDS:
            busy = HubBusyError(
                f"{text}, and asks for a wait of {seconds:,.0f} seconds, which is not waited for: "
                "try again then, or ask by another network or account"
            )
        busy.status, busy.wait_seconds = response.status_code, seconds
    return busy


def _without_queries(text: str) -> str:
    return re.sub(r"\?\S*", "", text)  # query strings of URLs may be signatures
