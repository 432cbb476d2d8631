"""What can go wrong between a model's name and its files."""


class ModelNotFoundError(FileNotFoundError):
    """No such model, revision, directory or file."""


class ModelAccessError(PermissionError):
    """The model is gated or private, and no token was given or the token has no access."""


class MissingOrPrivateError(ModelNotFoundError, ModelAccessError):
    """The Hub does not tell whether the model is missing or hidden from this caller."""


class HubUnreachableError(ConnectionError):
    """The Hub cannot be reached (or HF_HUB_OFFLINE=1), and the cache does not have the answer."""


class ModelChangedError(RuntimeError):
    """A directory's files are no longer the ones that its identity was made from."""
