"""How much of each text the model read, as optional columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.settings.options import TextOptions

_KINDS = {"windows": pa.int64(), "seen": pa.float32(), "truncated": pa.bool_()}


@dataclass(frozen=True)
class ReadShare:
    """What was read of some distinct texts, as far as `max_chars` left them.

    Attributes
    ----------
    windows : ndarray of int64, shape (texts,)
    seen_share : ndarray of float32, shape (texts,)
        Share of the tokens: below 1 if the text was cut; how far, only with `seen_field`, because
        the tokens behind a cut are not counted for anything else.
    """

    windows: np.ndarray
    seen_share: np.ndarray


def read_share_fields(options: TextOptions) -> list[pa.Field]:
    """The columns that are asked for."""
    names = options.read_share_names
    return [pa.field(name, _KINDS[what]) for what, name in names.items() if name is not None]


def read_share_columns(
    options: TextOptions, texts: list[str | None], positions: np.ndarray, read: ReadShare
) -> dict[str, pa.Array]:
    """The columns that are asked for, null where the text is.

    Parameters
    ----------
    options : TextOptions
    texts : list of str or None
        The rows' whole texts, before `max_chars` cut them.
    positions : ndarray of int64, shape (rows,)
        Where each row's text is among those of `read`; -1 for null.
    read : ReadShare
    """
    rows = pa.array(positions, mask=positions < 0)
    left = pa.array(_left_share(texts, options.max_chars))
    seen = pc.multiply(pa.array(read.seen_share).take(rows), left)
    windows = pa.array(read.windows).take(rows)
    found = {"windows": windows, "seen": seen, "truncated": pc.less(seen, 1)}
    names = options.read_share_names
    return {name: found[what] for what, name in names.items() if name is not None}


def _left_share(texts: list[str | None], max_chars: int | None) -> np.ndarray:
    """Share of each text's characters that `max_chars` leaves, float32 (rows,)."""
    if max_chars is None:
        return np.ones(len(texts), dtype=np.float32)
    lengths = np.fromiter((len(text or "") for text in texts), dtype=np.int64, count=len(texts))
    lengths = np.maximum(lengths, 1)
    return (np.minimum(lengths, max_chars) / lengths).astype(np.float32)
