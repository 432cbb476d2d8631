"""What can go wrong between the name of a model or dataset and its files."""


class ModelNotFoundError(FileNotFoundError):
    """No such model, revision, directory or file."""


class ModelAccessError(PermissionError):
    """The model is gated or private, and no token was given or the token has no access."""


class MissingOrPrivateError(ModelNotFoundError, ModelAccessError):
    """The Hub does not tell whether the model is missing or hidden from this caller."""


class ModelChangedError(RuntimeError):
    """A directory's files are no longer the ones that its identity was made from."""


class DatasetMissingError(FileNotFoundError):
    """A dataset repository has no such revision or file."""


class DatasetAccessError(PermissionError):
    """A dataset repository is missing or private, or the token may not do this with it.

    Attributes
    ----------
    status : int, optional
        Of the answer.
    """

    status: int | None = None


class HubRefusedError(RuntimeError):
    """The Hub refuses a request, and would refuse it again."""


class HubUnreachableError(ConnectionError):
    """The Hub cannot be reached (or HF_HUB_OFFLINE=1), and the cache does not have the answer."""


class HubBusyError(HubUnreachableError):
    """The Hub does not answer, or asks to come back later; another try may succeed.

    Attributes
    ----------
    status : int, optional
        Of its answer; None without one.
    wait_seconds : float, optional
        What it asks for.
    """

    status: int | None = None
    wait_seconds: float | None = None
