"""Which planted test items are found, and how fast?

``python -m benchmarks.decontamination`` measures; README.md says what. Items and documents are real
text, that of the installed packages and of Python itself. No document has an item that is not
planted there.
"""

import argparse
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks import SUBJECT
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.planted import read_texts
from gpuclassify import Decontaminate
from gpuclassify.corpus.decontamination.index import ItemIndex
from gpuclassify.corpus.decontamination.items import ITEM
from gpuclassify.corpus.decontamination.matching import match_items

QUESTION = "decontamination"
LICENCE = (
    "Permission is hereby granted free of charge to any person obtaining a copy of this exam to "
    "read the following question with care and to choose the best of the answers below it"
)
TEMPLATE = (
    "A train leaves the town of {} at {} and travels {} miles to {} at a speed of {} miles an hour "
    "while another one leaves {} at {}. When and where do the two trains meet?"
)
FOUND = (  # families whose documents hold an item, the first five of them whole
    *("verbatim", "wrapped lines", "other case and punctuation", "embedded in filler"),
    *("only the question", "only the answer", "half of the question", "digits of other scripts"),
)
CLEAN = (
    *("a quotation of 8 words", "shared boilerplate", "another item of the template"),
    "the document that an item was made of",
)
DIGITS = ("٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９", "०१२३४५६७८९")


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=300, help="of each family (300)")
    parser.add_argument("--items", type=int, default=100_000, help="for the speed (100,000)")
    parser.add_argument("--most-items", type=int, default=1_000_000, help="to build (1,000,000)")
    options = parse(parser, arguments, items=300, most_items=500)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        families = find_planted(options.documents, rng, folder)
    speed = measure_speed(options, rng)
    return finish(QUESTION, begin(options) | {"families": families} | speed, options, table)


def find_planted(count: int, rng: np.random.Generator, folder: str) -> dict[str, dict[str, Any]]:
    """Plant items in so many documents of each family; return how many are found."""
    items, documents = plant(count, rng)
    mapper = Decontaminate(
        against=items, against_field=["question", "answer"], index_dir=folder, items_field="items"
    )
    found = mapper(documents)
    families: dict[str, dict[str, Any]] = {}
    for family in (*FOUND, *CLEAN):
        rows = found[found["family"] == family]
        named = [
            bool(set(items) & {f"frame#{item}/question", f"frame#{item}/answer"})
            for items, item in zip(rows["items"], rows["item"], strict=True)
        ]
        families[family] = {
            "documents": len(rows),
            "contaminated": int(rows["contaminated"].sum()),
            "with_their_item": int(np.sum(named)),
            "is_planted": family in FOUND,
        }
    return families


def plant(count: int, rng: np.random.Generator) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return items with question and answer, and documents with the family and item of each."""
    texts = _apart(text for text, _ in read_texts(150 * count + 5_000, rng))
    fillers, sources = texts[:50], iter(texts[50:])
    questions, answers, rows = [], [], []

    def add(question: str, answer: str) -> int:
        questions.append(question)
        answers.append(answer)
        return len(questions) - 1

    def filler() -> str:
        return " ".join(fillers[rng.integers(len(fillers))][:100])

    for number in range(count):
        for family in FOUND:
            words, length = next(sources), int(rng.integers(32, 70))
            question = " ".join(words[:length]) + f" with {number} and {rng.integers(9_999)}?"
            item = add(question, " ".join(words[length : length + 30]))
            document = SHAPES[family](question, answers[item], filler(), rng)
            rows.append((document, family, item))
        words = next(sources)
        item = add(f"{LICENCE} {' '.join(words[:30])}", " ".join(words[30:50]))
        rows.append((f"{filler()} {LICENCE} {filler()}", CLEAN[1], item))
        at = int(rng.integers(10, 20))
        quoted = " ".join(_read(words)[at : at + 8])
        rows.append((f"{filler()} {quoted} {filler()}", CLEAN[0], item))
        item = add(TEMPLATE.format(*_slots(rng)), "at noon and in the middle of nowhere at all")
        rows.append((f"{filler()} {TEMPLATE.format(*_slots(rng))} {filler()}", CLEAN[2], item))
        words = next(sources)
        plain = _read(words)
        asked = " ".join(" ".join(plain[at : at + 7]) + " namely" for at in range(0, 56, 9))
        item = add(f"By this text, what is true of {asked}?", " ".join(plain[60:65]))
        rows.append((" ".join(words), CLEAN[3], item))
    documents = pd.DataFrame(rows, columns=["text", "family", "item"])
    return pd.DataFrame({"question": questions, "answer": answers}), documents


def _apart(texts: Iterable[str]) -> list[list[str]]:
    """Return the words of texts of prose that share no 8 words with each other."""
    taken: set[tuple[str, ...]] = set()
    chosen = []
    for words in map(str.split, texts):
        read = _read(words)
        windows = {tuple(read[at : at + 8]) for at in range(len(read) - 7)}
        is_prose = len(words) > 100 and 0.9 < len(read) / len(words) < 1.2
        if is_prose and taken.isdisjoint(windows):
            chosen.append(words)
        taken |= windows
    return chosen


def _read(words: list[str]) -> list[str]:
    return re.findall(r"[^\W_]+", " ".join(words).lower())


def _slots(rng: np.random.Generator) -> list[str]:
    names = ["".join(rng.choice([*"abcdefghij"], 6)).title() for _ in range(3)]
    numbers = [str(rng.integers(100, 9_999)) for _ in range(4)]
    return [names[0], numbers[0], numbers[1], names[1], numbers[2], names[2], numbers[3]]


def _wrapped(text: str, rng: np.random.Generator) -> str:
    lines = textwrap.wrap(text, int(rng.integers(15, 60)), break_long_words=False)
    return "\r\n".join(f"> {line}  " for line in lines)


def _restyled(text: str, rng: np.random.Generator) -> str:
    text = str(rng.choice([text.upper(), text.title(), text.lower()]))
    marks = rng.choice([*"!?.,;:*"], len(text))
    return "".join(
        f"{mark} " if char == " " else char for char, mark in zip(text, marks, strict=True)
    )


def _half(text: str, rng: np.random.Generator) -> str:
    words = text.split()
    middle = len(words) // 2
    return " ".join(words[:middle] if rng.random() < 0.5 else words[middle:])


def _digits(text: str, rng: np.random.Generator) -> str:
    return text.translate(str.maketrans("0123456789", str(rng.choice(DIGITS))))


# Documents by question, answer, and other text.
SHAPES: dict[str, Callable[[str, str, str, np.random.Generator], str]] = {
    "verbatim": lambda q, a, text, rng: f"{text}\n{q}\n{a}\n",
    "wrapped lines": lambda q, a, text, rng: f"{text}\n{_wrapped(f'{q} {a}', rng)}\n{text}",
    "other case and punctuation": lambda q, a, text, rng: f"{text} {_restyled(f'{q} {a}', rng)}",
    "embedded in filler": lambda q, a, text, rng: f"{5 * text} so {q} {a} so {5 * text}",
    "only the question": lambda q, a, text, rng: f"{text}\n{q}\n{text}",
    "only the answer": lambda q, a, text, rng: f"{text}\n{a}\n{text}",
    "half of the question": lambda q, a, text, rng: f"{text}\n{_half(q, rng)}\n{text}",
    "digits of other scripts": lambda q, a, text, rng: f"{text}\n{_digits(q, rng)}\n{text}",
}


def measure_speed(options: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """Time the build of indexes, and the search of documents of 5 kB on one core."""
    texts = " ".join(text for text, _ in read_texts(20 * options.documents, rng))
    every = np.array(re.findall(r"\w+", texts))
    known, others = np.array_split(every, 2)  # most of a crawl holds no item
    built = {}
    for count in (options.most_items, options.items):
        started = time.perf_counter()
        index = ItemIndex.build(_items(known, count, rng))
        seconds = time.perf_counter() - started
        built[f"{count:,} items"] = {
            "seconds": seconds,
            "ngrams": len(index.ngrams.keys),
            "bytes_an_ngram": index.nbytes / len(index.ngrams.keys),
        }
    starts = rng.integers(0, len(others) - 900, 10 * options.documents)
    documents = pa.array(
        [" ".join(others[at : at + 900])[:5_000] for at in starts], pa.large_string()
    )

    def search() -> np.ndarray:
        matches = match_items(index, index.hits(documents))
        shares = np.bincount(matches.documents, matches.shares, minlength=len(documents))
        return shares[:, None]

    run = run_interleaved([Variant(SUBJECT, search, search)], options.repeats, 0)
    seconds = run.median_seconds(SUBJECT) / len(documents)
    return {
        "builds": built,
        "documents": len(documents),
        "mean_document_bytes": documents.nbytes / len(documents),
        "variants": {
            SUBJECT: run.times(SUBJECT)
            | {"us_a_document": seconds * 1e6, "documents_per_second": 1 / seconds}
        },
    }


def _items(known: np.ndarray, count: int, rng: np.random.Generator) -> pa.Table:
    """Return items of 15 to 65 words, as those of benchmarks are; half are runs of real text."""
    lengths, texts = rng.integers(15, 65, count), []
    for length, at in zip(lengths, rng.integers(0, len(known) - 65, count), strict=True):
        words = known[at : at + length] if at % 2 else rng.choice(known, length)
        texts.append(" ".join(words))
    return pa.table([["items"] * count, [*map(str, range(count))], texts], schema=ITEM)


def table(result: dict[str, Any]) -> str:
    """Format the families and the speed for people."""
    lines = [
        f"{name:40} {each['contaminated']:6,} of {each['documents']:,}"
        for name, each in result["families"].items()
    ]
    for name, each in result["builds"].items():
        lines.append(
            f"index of {name}: {each['seconds']:.1f} s, {each['ngrams']:,} n-grams, "
            f"{each['bytes_an_ngram']:.0f} bytes each"
        )
    found = result["variants"][SUBJECT]
    lines.append(
        f"{found['us_a_document']:.0f} us a document, {found['documents_per_second']:,.0f} a second"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
