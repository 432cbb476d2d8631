"""Documents of real text with planted duplicates, and a list of what was planted.

The text is that of the installed packages and of Python itself: sources, documentation, licences.
Every file is cut at line borders into documents of web-like lengths; files come in an order that
depends on their paths and the seed alone. Some 350,000 distinct documents are there in a usual
development environment. Beyond that their lines are shuffled, five and five, and cut again.
"""

import functools
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h")
SHORTEST, LONGEST = 300, 4_000  # characters
MEDIAN_CHARACTERS, SIGMA = 1_000, 0.7  # lognormal
SHUFFLED_LINES = 5  # that stay together: less than a document has in common with another
EDIT_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of words that are replaced, dropped, put in
EXACT_SHARE = PREFIX_SHARE = 0.01  # of the documents: exact copies, copies below a banner
BLANK_SHARE = 0.001  # null texts, and as many empty ones
BANNER = (
    "Skip to main content\nWe use cookies to improve your experience on our site. By continuing "
    "you accept our cookie policy.  Accept all  Reject all  Settings\nHome | Products | News | "
    "About us | Contact | Log in\n\n"
)
DOCUMENTS, PLANTED = "documents", "planted.parquet"
BLANKS = "without-text.parquet"  # sorts behind the files of texts
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "source": pa.string(),
        "text": pa.string(),
        "quality_score": pa.float32(),
    }
)

Source = tuple[str, Iterable[str]]  # a package, and lines


def write_corpus(
    folder: Path,
    documents: int,
    *,
    near_share: float = 0.1,
    rows_per_file: int = 10_000,
    seed: int = 0,
) -> Path:
    """Write documents in Parquet files, and beside them which of them are copies of which.

    Parameters
    ----------
    folder : Path
        Gets ``documents/*.parquet`` with id (int64, from 0 in the order of files and rows), source,
        text and quality_score (float32), and ``planted.parquet`` with first and second (int64,
        ids), kind ("exact", "prefix" or "words") and edit_share. No document is in two pairs. The
        last file holds null and empty texts, and no other does.
    documents : int
        With all that is planted.
    near_share : float
        Of the documents: copies with edited words.
    rows_per_file : int
    seed : int

    Returns
    -------
    Path
        The folder with the documents.
    """
    rng = np.random.default_rng(seed)
    blanks = max(1, round(BLANK_SHARE * documents))
    plan = planted_kinds(documents, near_share)
    rows = read_texts(documents - len(plan) - 2 * blanks, rng)
    originals = rng.choice(len(rows), len(plan), replace=False)
    vocabulary = _vocabulary(rows)
    for original, (kind, share) in zip(originals, plan, strict=True):
        text, source = rows[original]
        rows.append((copy_of(text, kind, share, vocabulary, rng), source))
    first_copy = len(rows) - len(plan)
    place = rng.permutation(len(rows))  # of each row in the files
    shuffled = [rows[row] for row in np.argsort(place)]
    parts = folder / DOCUMENTS
    parts.mkdir(parents=True)
    for start in range(0, len(shuffled), rows_per_file):
        chunk = shuffled[start : start + rows_per_file]
        _write_rows(parts / f"texts-{start // rows_per_file:05}.parquet", chunk, start, rng)
    _write_rows(parts / BLANKS, [(None, "blank"), ("", "blank")] * blanks, len(rows), rng)
    planted = {"first": place[originals], "second": place[first_copy:]}
    kinds = pd.DataFrame(plan, columns=["kind", "edit_share"])
    kinds.assign(**planted).to_parquet(folder / PLANTED)
    return parts


def planted_kinds(documents: int, near_share: float) -> list[tuple[str, float]]:
    """Return kind and share of edited words of every copy among so many documents."""
    near = itertools.islice(itertools.cycle(EDIT_SHARES), round(near_share * documents))
    return [
        *[("exact", 0.0)] * round(EXACT_SHARE * documents),
        *[("prefix", 0.0)] * round(PREFIX_SHARE * documents),
        *(("words", share) for share in near),
    ]


def _write_rows(
    path: Path, rows: list[tuple[Any, str]], first_id: int, rng: np.random.Generator
) -> None:
    texts, sources = zip(*rows, strict=True)
    ids = np.arange(first_id, first_id + len(rows))
    scores = rng.random(len(rows), dtype=np.float32)
    pq.write_table(pa.table([ids, list(sources), list(texts), scores], schema=SCHEMA), path)


def copy_of(
    text: str, kind: str, share: float, vocabulary: list[str], rng: np.random.Generator
) -> str:
    """Return the text itself, below a banner, or with a share of its words edited."""
    if kind == "exact":
        return text
    return BANNER + text if kind == "prefix" else edit_words(text, share, vocabulary, rng)


def edit_words(text: str, share: float, vocabulary: list[str], rng: np.random.Generator) -> str:
    """Edit a share of the words, at least one: each is replaced, dropped or followed by a new one.

    White space stays as it is.
    """
    parts = re.split(r"(\s+)", text)  # words at even places, white space between
    words = [place for place in range(0, len(parts), 2) if parts[place]]
    count = max(1, round(share * len(words)))
    for place in rng.choice(words, count, replace=False):
        new = vocabulary[rng.integers(len(vocabulary))]
        parts[place] = (new, "", f"{parts[place]} {new}")[rng.integers(3)]
    return "".join(parts)


def _vocabulary(rows: list[tuple[str, str]]) -> list[str]:
    return sorted({word for text, _ in rows[:1_000] for word in text.split() if word.isalpha()})


def read_texts(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return distinct documents, each with the name of its package."""
    found: dict[str, str] = {}
    while len(found) < count:
        sources = shuffled_sources(found, rng) if found else file_sources(rng)
        for source, lines in sources:
            found |= dict.fromkeys(cut(lines, rng), source)
            if len(found) >= count:
                break
    return list(found.items())[:count]


def file_sources(rng: np.random.Generator) -> Iterator[Source]:
    """Yield the package and the lines of every text file, in random order."""
    paths = text_paths()
    for number in rng.permutation(len(paths)):
        name, path = paths[number]
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield name.partition("/")[0], text.splitlines()


@functools.cache
def text_paths() -> list[tuple[str, Path]]:
    """Return text files of installed packages and of Python, each after its relative path."""
    roots = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
    return sorted(
        (path.relative_to(root).as_posix(), path)
        for root in roots
        for path in root.rglob("*")
        if path.suffix in SUFFIXES and "site-packages" not in path.relative_to(root).parts
    )


def shuffled_sources(texts: Iterable[str], rng: np.random.Generator) -> Iterator[Source]:
    """Yield lines of the texts, a few of them together, in a new order."""
    pieces = [
        lines[start : start + SHUFFLED_LINES]
        for lines in map(str.splitlines, texts)
        for start in range(0, len(lines), SHUFFLED_LINES)
    ]
    for chosen in np.array_split(rng.permutation(len(pieces)), len(pieces) // 1_000 + 1):
        yield "shuffled", itertools.chain.from_iterable(pieces[number] for number in chosen)


def cut(lines: Iterable[str], rng: np.random.Generator) -> Iterator[str]:
    """Yield documents of consecutive lines, of lognormal lengths in characters."""
    document: list[str] = []
    size, wanted = 0, _length(rng)
    for line in lines:
        size += len(line) + bool(document)  # and the end of the line before
        document.append(line)
        if size >= wanted:
            if size <= LONGEST:
                yield "\n".join(document)
            document, size, wanted = [], 0, _length(rng)
    if SHORTEST <= size <= LONGEST:
        yield "\n".join(document)


def _length(rng: np.random.Generator) -> float:
    return float(np.clip(rng.lognormal(np.log(MEDIAN_CHARACTERS), SIGMA), SHORTEST, LONGEST))
