"""A partition's texts as mappers read them: a list on the host, or a column on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from gpuclassify.tokenizing.gpu_wordpiece import GpuTokens
    from gpuclassify.tokenizing.text_tokenizer import TokenBatch


class Texts(Protocol):
    """Texts of rows, null where a row has none."""

    def __len__(self) -> int: ...

    def fold(self, max_chars: int | None) -> tuple[Texts, np.ndarray]:
        """Distinct texts cut to `max_chars`, and where each row's is among them.

        Returns
        -------
        distinct : Texts
            Without null.
        positions : ndarray of int64, shape (rows,)
            -1 for a null row.
        """

    def take(self, places: np.ndarray) -> Texts:
        """The texts at these places, in that order."""

    @property
    def char_counts(self) -> np.ndarray:
        """Characters of each text, int64 (texts,); 0 for null."""

    def to_list(self) -> list[Any]:
        """The texts on the host, None for null."""


class HostTexts(list[Any]):
    """Texts as Python strings, None where a row has none."""

    def fold(self, max_chars: int | None) -> tuple[HostTexts, np.ndarray]:
        """Distinct texts in order of appearance; see `Texts.fold`."""
        from gpuclassify.tokenizing.text_tokenizer import fold

        distinct, positions = fold([text if text is None else text[:max_chars] for text in self])
        return HostTexts(distinct), positions

    def take(self, places: np.ndarray) -> HostTexts:
        """The texts at these places, in that order."""
        return HostTexts(self[place] for place in places)

    @property
    def char_counts(self) -> np.ndarray:
        """Characters of each text, int64 (texts,); 0 for null."""
        return np.fromiter((len(text or "") for text in self), dtype=np.int64, count=len(self))

    def to_list(self) -> list[Any]:
        """The texts themselves."""
        return self


class DeviceTexts:
    """Texts that stay on the GPU as a column until they are tokens there.

    Parameters
    ----------
    series : cudf.Series
        Strings, possibly null.
    """

    def __init__(self, series: Any) -> None:
        self._series = series

    def __len__(self) -> int:
        return len(self._series)

    def __getitem__(self, bounds: slice) -> DeviceTexts:
        return type(self)(self._series.iloc[bounds])

    def fold(self, max_chars: int | None) -> tuple[DeviceTexts, np.ndarray]:
        """Distinct texts, found on the GPU; see `Texts.fold`."""
        texts = self._series if max_chars is None else self._series.str.slice(0, max_chars)
        series = type(texts)
        positions, distinct = texts.factorize()
        return type(self)(series(distinct)), series(positions).to_numpy().astype(np.int64)

    def take(self, places: np.ndarray) -> DeviceTexts:
        """The texts at these places, in that order."""
        return type(self)(self._series.take(places))

    @property
    def char_counts(self) -> np.ndarray:
        """Characters of each text, int64 (texts,); 0 for null."""
        return self._series.str.len().fillna(0).to_numpy().astype(np.int64)

    def to_list(self) -> list[str | None]:
        """The texts on the host, None for null."""
        return self._series.to_arrow().to_pylist()

    def tokenize(
        self,
        on_gpu: Callable[[Any], GpuTokens],
        on_host: Callable[[Sequence[Any]], TokenBatch],
    ) -> tuple[TokenBatch, int]:
        """Tokens of every text, and how many texts `on_gpu` left to `on_host`.

        Parameters
        ----------
        on_gpu : callable
            `GpuWordPiece`.
        on_host : callable
            The tokenizer that it stands in for.

        Returns
        -------
        tokens : TokenBatch
            Ids on the GPU. They are complete for who reads them on the default stream, or waits
            for it.
        host_count : int
        """
        from gpuclassify.tokenizing.gpu_wordpiece import merge
        from gpuclassify.tokenizing.text_tokenizer import TokenBatch

        found = on_gpu(self._series)
        left = found.fallback_rows
        if len(left):
            found = merge(found, on_host(self.take(left).to_list()))
        tokens = TokenBatch(found.ids, found.offsets, whole_lengths=found.whole_lengths)
        return tokens, len(left)
