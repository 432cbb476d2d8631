"""A partition's texts as mappers read them: a list on the host, or a column on the GPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


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
        cut = self if max_chars is None else [text and text[:max_chars] for text in self]
        distinct = dict.fromkeys(cut)
        distinct.pop(None, None)
        places = {text: place for place, text in enumerate(distinct)} | {None: -1}
        positions = np.fromiter(map(places.__getitem__, cut), dtype=np.int64, count=len(self))
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
        self.series = series

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, bounds: slice) -> DeviceTexts:
        return type(self)(self.series.iloc[bounds])

    def fold(self, max_chars: int | None) -> tuple[DeviceTexts, np.ndarray]:
        """Distinct texts, found on the GPU; see `Texts.fold`."""
        texts = self.series if max_chars is None else self.series.str.slice(0, max_chars)
        series = type(texts)
        positions, distinct = texts.factorize()
        return type(self)(series(distinct)), series(positions).to_numpy().astype(np.int64)

    def take(self, places: np.ndarray) -> DeviceTexts:
        """The texts at these places, in that order."""
        return type(self)(self.series.take(places))

    @property
    def char_counts(self) -> np.ndarray:
        """Characters of each text, int64 (texts,); 0 for null."""
        return self.series.str.len().fillna(0).to_numpy().astype(np.int64)

    def to_list(self) -> list[Any]:
        """The texts on the host, None for null."""
        return self.series.to_arrow().to_pylist()
