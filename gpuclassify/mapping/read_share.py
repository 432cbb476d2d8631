"""Columns that say how completely a text was read: number of windows, share, and cut or not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import char_count, cut_text
from gpuclassify.mapping.stage_counts import COUNT
from gpuclassify.settings.options import TextOptions

_SHARE_TYPES = {"windows": pa.int64(), "seen": pa.float32(), "truncated": pa.bool_()}


def read_share_fields(options: TextOptions) -> list[pa.Field]:
    """Return the Arrow fields of the columns on the share of each text that the model read.

    They are the number of windows (token sequences), int64; the share of the text, float32; and
    whether it was cut, bool. Columns without a name in `options` are omitted.
    """
    names = options.read_share_names
    about = {"windows": COUNT}
    return [
        pa.field(name, _SHARE_TYPES[what], metadata=about.get(what))
        for what, name in names.items()
        if name is not None
    ]


def read_share_columns(
    options: TextOptions,
    texts: list[str | None],
    positions: np.ndarray,
    windows: np.ndarray,
    seen_share: np.ndarray,
) -> dict[str, pa.Array]:
    """Return the columns in `read_share_fields` by name, null for null texts.

    `texts` has each row's text or pair, not cut to `max_chars`. `windows` and `seen_share` have
    each distinct text's number of windows and share of tokens read, after the cut. `positions` has
    each row's index into both, int64 (rows,); -1 for null.
    """
    rows = pa.array(positions, mask=positions < 0)
    left = np.ones(len(texts), dtype=np.float32)  # share of characters after the cut
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
