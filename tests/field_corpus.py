"""A small crawl as they come: ``python tests/field_corpus.py FOLDER`` writes it.

Texts are those of packages that are installed: what they say of themselves, in English, and
translations of Sphinx. Of twenty ``.jsonl.gz``, one has another schema and two have lines that are
broken; rows have nested metadata, and texts that are null, empty, blank or there twice.
"""

import gzip
import json
import random
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import numpy as np

FILES, ROWS = 20, 12
LANGUAGES = ("de", "fr", "ru", "ja", "pl", "es")
BROKEN = ('{"text": "cut of', "not JSON", '{"text": "two"} {"text": "values"}')
LOST = (None, "", "", " \n\t ")  # texts that some rows have in place of one
PRODUCTS = "products.jsonl.gz"


def english_texts():
    """The longest paragraph of what each package says of itself."""
    found = {}
    for package in distributions():
        content = package.read_text("METADATA") or ""
        parts = [part for part in content.partition("\n\n")[2].split("\n\n") if part.isascii()]
        if parts and len(longest := max(parts, key=len)) > 120:
            found[package.name] = longest[:300]
    return [found[name] for name in sorted(found)]


def translated_texts():
    """Messages of Sphinx in other languages, ten a text."""
    locale, texts = Path(find_spec("sphinx").origin).parent / "locale", []
    for language in LANGUAGES:
        content = (locale / language / "LC_MESSAGES/sphinx.po").read_text(encoding="utf-8")
        lines = [line[8:-1] for line in content.splitlines() if line.startswith('msgstr "')]
        lines = [line.replace('\\"', '"') for line in lines if len(line) > 20]
        texts += [". ".join(lines[start : start + 10]) for start in range(0, 120, 10)]
    return [text for text in texts if text]


def write_corpus(folder, seed=0):
    """Write the files; returns the rows that can be read, as they are there, and the products."""
    rng = random.Random(seed)
    texts = [*english_texts(), *translated_texts()]
    rng.shuffle(texts)
    count = (FILES - 1) * ROWS
    texts = (texts * (count // len(texts) + 1))[:count]
    rows = [
        {
            "id": f"row-{number}",
            "text": text,
            "metadata": {
                "url": f"https://host-{number % 5}.example/{number}",
                "crawl": {"date": "2026-11-01", "status": [200, number % 3]},
                "scores": {"ppl": number / 7, "lang": None if number % 4 else "en"},
            },
        }
        for number, text in enumerate(texts)
    ]
    for row in rng.sample(rows[2 * ROWS :], 40):  # the first two files are as clean as they come
        row["text"] = rng.choice(LOST)
    for one, other in np.reshape(rng.sample(rows[2 * ROWS :], 60), (-1, 2)):
        one["text"] = other["text"]
    products = [{"sku": f"p-{n}", "price": n / 4, "tags": ["a"] * (n % 3)} for n in range(ROWS)]
    folder.mkdir(parents=True)
    for number in range(FILES - 1):
        lines = [json.dumps(row) for row in rows[number * ROWS : (number + 1) * ROWS]]
        if number % 7 == 6:
            lines[number % 5 : number % 5] = BROKEN
        _write(folder / f"part-{number:02}.jsonl.gz", lines)
    _write(folder / PRODUCTS, map(json.dumps, products))
    return rows, products


def broken_lines():
    """How many lines of the files cannot be read."""
    return len(BROKEN) * sum(number % 7 == 6 for number in range(FILES - 1))


def _write(path, lines):
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
