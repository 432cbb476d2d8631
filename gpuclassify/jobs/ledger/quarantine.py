"""Files, lines and rows that could not be read or classified, with reason and position."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar, get_args

OnError = Literal["raise", "quarantine"]
ON_ERROR = get_args(OnError)
LONGEST_CONTENT = 10_000  # characters
FILE, LINE, ROW = "file", "line", "row"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """File, line or row that a job could not read or classify, with its position and the reason."""

    kind: str  # FILE or a range of its row groups, LINE of JSON lines, or ROW
    source: str  # file, and the byte range or row groups of the part
    reason: str
    offset: int | None = None  # first byte of a line in the (decompressed) file
    row: int | None = None  # index of a row among the rows that were read
    # File and position of a row, for annotations.
    file: str | None = None
    place: int | None = None
    content: str | None = None  # the line, or the row as JSON, up to `LONGEST_CONTENT` characters

    def __str__(self) -> str:
        where = {"byte": self.offset, "row": self.row}
        known = [f", {unit} {number}" for unit, number in where.items() if number is not None]
        return f"{self.source}{''.join(known)}: {self.reason}"


def quarantine_lines(problems: Iterable[Problem]) -> bytes:
    """Serialize problems as JSON lines for a quarantine file, without fields that are None."""
    lines = []
    for problem in problems:
        known = {name: value for name, value in asdict(problem).items() if value is not None}
        lines.append(json.dumps(known, ensure_ascii=False).encode("utf-8", "backslashreplace"))
    return b"".join(line + b"\n" for line in lines)


def shortened(content: bytes | str) -> str:
    """Return the first `LONGEST_CONTENT` characters of a text, or of bytes decoded as UTF-8."""
    if isinstance(content, bytes):
        content = content[: 4 * LONGEST_CONTENT].decode("utf-8", "backslashreplace")
    return content[:LONGEST_CONTENT]


def isolate_bad_rows(
    run: Callable[[int, int], Result],
    start: int,
    stop: int,
    errors: tuple[type[Exception], ...],
) -> Iterator[tuple[int, Result | Exception]]:
    """Call ``run(start, stop)`` on a row range, and on its halves if it raises one of `errors`.

    `stop` is excluded. Halves are halved again, down to single rows. Yields (first row, result) of
    each range that succeeds, and (row, error) of each single row that fails, in order.
    """
    try:
        yield start, run(start, stop)
    except errors as err:
        if stop - start <= 1:
            yield start, err
            return
        middle = (start + stop) // 2
        yield from isolate_bad_rows(run, start, middle, errors)
        yield from isolate_bad_rows(run, middle, stop, errors)


def counts_by_kind(problems: Iterable[Problem]) -> dict[str, int]:
    """Return the number of problems of each kind that occurs: "file", "line" or "row"."""
    return dict(Counter(problem.kind for problem in problems))
