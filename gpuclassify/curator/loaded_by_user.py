"""Mappers of a torch module that the user's own code loads, weights and all."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuclassify.mapping.code_digest import code_digest, value_digest
from gpuclassify.mapping.encoder_runner import EncoderRunner
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import OwnModule, Runner
from gpuclassify.mapping.text_mapper import TextMapper

if TYPE_CHECKING:
    from torch import nn


class UserCode:
    """An object of a user's class, which is known by the code and by the settings that it holds."""

    def _definition(self) -> tuple[Any, ...]:
        owner = type(self)
        settings = sorted((name, value_digest(value)) for name, value in vars(self).items())
        return (owner.__module__, owner.__qualname__, code_digest(owner), *settings)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return self._definition()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({vars(self)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._definition() == other._definition()

    def __hash__(self) -> int:
        return hash(self._definition())


class _Model(PinnedModel):
    """A model of which only the name and the tokenizer are certain."""

    def __init__(self, options: Any, **_kinds: bool) -> None:
        super().__init__(options, has_own_module=True, has_own_columns=True)


class LoadedByUser(TextMapper):
    """Runs the module that `load` gives.

    Parameters
    ----------
    source : UserCode
        Holds the user's code.
    **options
        See the class's `Options`.
    """

    model_type = _Model

    def __init__(self, source: Any, **options: Any) -> None:
        super().__init__(**options)
        self.source = source

    @property
    def __name__(self) -> str:
        """That of the user's class, on Dask's dashboard and in messages."""
        return type(self.source).__qualname__

    @abstractmethod
    def load(self) -> nn.Module:
        """The module with its weights, on any device."""

    @property
    def new_tokenizer(self) -> Callable[[], Any] | None:
        """What gives a fresh tokenizer, if not the model's files."""
        return None

    @functools.cached_property
    def runner(self) -> Runner:
        """Texts to outputs, by the user's module and tokenizer."""
        own = OwnModule(
            lambda _config: self.load(),
            self._definition,
            has_weights=True,
            new_tokenizer=self.new_tokenizer,
        )
        return EncoderRunner(self.options, self.model, own)
