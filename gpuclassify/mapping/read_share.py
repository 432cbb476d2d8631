"""Columns about how much of a text was read: its windows, the share of it, whether it was cut."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import char_count, cut_text
from gpuclassify.settings.options import TextOptions

_SHARE_TYPES = {"windows": pa.int64(), "seen": pa.float32(), "truncated": pa.bool_()}


def read_share_fields(options: TextOptions) -> list[pa.Field]:
    """Return the columns about how much of a text was read that the options ask for."""
    names = options.read_share_names
    return [pa.field(name, _SHARE_TYPES[what]) for what, name in names.items() if name is not None]


def read_share_columns(
    options: TextOptions,
    texts: list[str | None],
    positions: np.ndarray,
    windows: np.ndarray,
    seen_share: np.ndarray,
) -> dict[str, pa.Array]:
    """Return the columns of `read_share_fields`, null where the text is.

    `texts` are the rows' whole texts, before `max_chars` cut them, and `positions` where each
    row's text is among those of `windows` and `seen_share`, int64 (rows,); -1 for null.
    """
    rows = pa.array(positions, mask=positions < 0)
    left = np.ones(len(texts), dtype=np.float32)  # of the characters
    if options.max_chars is not None:
        whole, cut = (
            np.array([char_count(cut_text(text or "", most)) or 1 for text in texts])
            for most in (None, options.max_chars)
        )
        left = (cut / whole).astype(np.float32)
    seen = pc.multiply(pa.array(seen_share).take(rows), pa.array(left))
    shares = {"windows": pa.array(windows).take(rows), "seen": seen, "truncated": pc.less(seen, 1)}
    names = options.read_share_names
    return {name: shares[what] for what, name in names.items() if name is not None}
