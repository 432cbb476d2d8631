"""Numbers and times as people read them, in few characters."""

from __future__ import annotations


def short_number(value: float) -> str:
    """A number of three digits and a unit, such as ``1.2k`` or ``3.4M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def readable_time(seconds: float) -> str:
    """Hours, minutes and seconds, such as ``1:02:03`` or ``0:07``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
