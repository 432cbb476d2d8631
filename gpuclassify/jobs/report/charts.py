"""Charts as SVG pictures: no script, no font and no file from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 520
_ROW, _NAME, _VALUE = 22, 192, 92  # of bars: height, and the widths beside them
_PLOT_HEIGHT, _AXIS, _LEFT = 150, 22, 56


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars, one a row.

    Parameters
    ----------
    rows : sequence of (str, float, str)
        Name, length, and what is written beside the bar.
    """
    largest = max((value for _, value, _ in rows), default=0) or 1
    room = WIDTH - _NAME - _VALUE
    parts = []
    for number, (name, value, shown) in enumerate(rows):
        top = number * _ROW
        width = room * value / largest
        parts += [
            _text(_NAME - 8, top + 15, _shortened(name), "end", title=name),
            f'<rect class="bar" x="{_NAME}" y="{top + 3}" width="{max(width, 1):.1f}" '
            f'height="{_ROW - 6}" rx="2"/>',
            _text(_NAME + width + 6, top + 15, shown),
        ]
    return _picture("".join(parts), len(rows) * _ROW + 4)


def histogram(edges: Sequence[float], counts: Sequence[int], names: Sequence[str]) -> str:
    """Vertical bars of counts.

    Parameters
    ----------
    edges : sequence of float
        Where each bar begins, and where the last one ends: ascending, and equally far apart.
    counts : sequence of int
    names : sequence of str
        Of the edges, as many as edges.
    """
    largest = max(counts, default=0) or 1
    step = (WIDTH - _LEFT - 12) / max(1, len(counts))
    parts = [_level(largest, share) for share in (0.5, 1.0)]
    for number, count in enumerate(counts):
        height = _PLOT_HEIGHT * count / largest
        parts.append(
            f'<rect class="bar" x="{_LEFT + number * step + 1:.1f}" '
            f'y="{8 + _PLOT_HEIGHT - height:.1f}" width="{max(step - 2, 1):.1f}" '
            f'height="{height:.1f}"><title>{edges[number]:g} to {edges[number + 1]:g}: '
            f"{count:,}</title></rect>"
        )
    for number, name in enumerate(names):
        anchor = "end" if number == len(counts) else "middle"
        parts.append(_text(_LEFT + number * step, 8 + _PLOT_HEIGHT + 16, name, anchor))
    return _picture("".join([*parts, _baseline()]), 8 + _PLOT_HEIGHT + _AXIS)


def line(points: Sequence[tuple[float, float]], names: tuple[str, str]) -> str:
    """A line over time.

    Parameters
    ----------
    points : sequence of (float, float)
        Time and value; times ascend.
    names : (str, str)
        What is written under the first and the last time.
    """
    largest = max((value for _, value in points), default=0) or 1
    first, last = points[0][0], points[-1][0]
    room = WIDTH - _LEFT - 12
    path = " ".join(
        f"{_LEFT + room * (time - first) / ((last - first) or 1):.1f},"
        f"{8 + _PLOT_HEIGHT * (1 - value / largest):.1f}"
        for time, value in points
    )
    bottom = 8 + _PLOT_HEIGHT
    parts = [
        *(_level(largest, share) for share in (0.5, 1.0)),
        f'<polygon class="area" points="{_LEFT},{bottom} {path} {_LEFT + room},{bottom}"/>',
        f'<polyline class="line" points="{path}"/>',
        _text(_LEFT, bottom + 16, names[0]),
        _text(WIDTH - 12, bottom + 16, names[1], "end"),
        _baseline(),
    ]
    return _picture("".join(parts), bottom + _AXIS)


def stack(shares: Sequence[tuple[str, float, str]]) -> str:
    """One bar of several shares, with a legend.

    Parameters
    ----------
    shares : sequence of (str, float, str)
        Name, size, and what the legend says of it.
    """
    total = sum(value for _, value, _ in shares) or 1
    parts, left = [], 0.0
    for number, (name, value, shown) in enumerate(shares):
        width = WIDTH * value / total
        row, column = divmod(number, 2)
        x, y = column * WIDTH / 2, 46 + row * 20
        parts += [
            f'<rect class="share{number}" x="{left:.1f}" y="2" width="{width:.1f}" height="24">'
            f"<title>{escape(name)}: {escape(shown)}</title></rect>",
            f'<rect class="share{number}" x="{x:.1f}" y="{y - 10}" width="11" height="11" rx="2"/>',
            _text(x + 17, y, f"{name} {shown}"),
        ]
        left += width
    return _picture("".join(parts), 40 + -(-len(shares) // 2) * 20)


def _level(largest: float, share: float) -> str:
    y = 8 + _PLOT_HEIGHT * (1 - share)
    return (
        f'<line class="level" x1="{_LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>'
        + _text(_LEFT - 6, y + 4, short_number(largest * share), "end")
    )


def _baseline() -> str:
    y = 8 + _PLOT_HEIGHT
    return f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", title: str = "") -> str:
    hint = f"<title>{escape(title)}</title>" if title and title != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}{hint}</text>'


def _picture(content: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{content}</svg>'


def _shortened(name: str, most: int = 25) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def short_number(value: float) -> str:
    """A number in few characters, such as 1.2k or 3.4M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def readable_time(seconds: float) -> str:
    """Hours, minutes and seconds, such as ``1:02:03`` or ``0:07``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
