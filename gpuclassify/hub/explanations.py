"""The Hub client's errors told as this package's, with the cure and without secrets."""

import contextlib
from collections.abc import Iterator

from gpuclassify.hub.errors import (
    HubUnreachableError,
    MissingOrPrivateError,
    ModelAccessError,
    ModelNotFoundError,
)
from gpuclassify.hub.paths import absolute
from gpuclassify.workers.secrets import token_for


@contextlib.contextmanager
def explained(name: str, revision: str) -> Iterator[None]:
    """Turn the Hub client's errors into this package's, with no token left in their chain."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, OSError) as err:
        told = _explanation(err, name, revision)
        forget_secrets(err)
        if told is None:
            raise
        raise told from err


def _explanation(err: BaseException, name: str, revision: str) -> Exception | None:
    from huggingface_hub import errors

    if isinstance(err, errors.LocalEntryNotFoundError) and err.__cause__ is not None:
        err = err.__cause__
    page = f"https://huggingface.co/{name}"
    if isinstance(err, errors.GatedRepoError):
        return ModelAccessError(_gated(name, page))
    if isinstance(err, errors.RepositoryNotFoundError):
        text = (
            f"the Hub has no model {name!r} and there is no directory {absolute(name)}. Check the "
            "spelling. A private model needs a token that may read it: token= or HF_TOKEN"
        )
        is_anonymous = err.response.status_code == 401
        return MissingOrPrivateError(text) if is_anonymous else ModelNotFoundError(text)
    if isinstance(err, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision {revision!r}; see {page}/commits/main")
    if isinstance(err, errors.RemoteEntryNotFoundError):
        return ModelNotFoundError(f"{name} at {revision} lacks a file: {_first_line(err)}")
    if isinstance(err, errors.HfHubHTTPError):
        status = err.response.status_code
        if status in (401, 403):
            return ModelAccessError(
                f"the Hub refused access to {name} ({_first_line(err)}): the token is not valid or "
                f"not allowed to read it. Pass another with token= or HF_TOKEN; see {page}"
            )
        return HubUnreachableError(unreachable(name, revision, f"the Hub answered {status}"))
    if isinstance(err, errors.OfflineModeIsEnabled):
        return HubUnreachableError(unreachable(name, revision, "HF_HUB_OFFLINE=1 is set"))
    if isinstance(
        err, (errors.HTTPError, errors.LocalEntryNotFoundError, errors.FileMetadataError)
    ):
        reason = f"{type(err).__name__}: {_first_line(err)}"
        return HubUnreachableError(unreachable(name, revision, reason))
    return None


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or "no details").splitlines()[0]


def _gated(name: str, page: str) -> str:
    from huggingface_hub import get_token

    if token_for(name) is None and get_token() is None:
        return (
            f"{name} is gated: ask for access at {page}, then pass a token with token= or HF_TOKEN"
        )
    return (
        f"{name} is gated and the token in use has no access to it: ask for access at {page} with "
        "the account of that token, or pass another with token= or HF_TOKEN"
    )


def unreachable(name: str, revision: str, reason: str) -> str:
    """Tell that neither Hub nor cache has a model, and the cure."""
    return (
        f"{name} at {revision} is not (completely) in the cache and the Hub cannot be reached: "
        f"{reason}. Run `hf download {name} --revision {revision}` once with a network, with the "
        "same cache, or pass a directory that holds the model"
    )


def forget_secrets(err: BaseException) -> None:
    """Strip credentials from a chain of HTTP errors: request headers, and frames' variables."""
    pending: list[BaseException | None] = [err]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        pending += [link.__cause__, link.__context__]
        link.__traceback__ = None
        response = getattr(link, "response", None)
        carriers = [link, response, *getattr(response, "history", ())]
        for carrier in carriers:
            with contextlib.suppress(AttributeError, RuntimeError):  # one without a request
                carrier.request.headers.pop("authorization", None)
