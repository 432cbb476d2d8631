"""How fast do texts become tokens, beside `tokenizers`?

``python -m benchmarks.tokens --threads 1`` measures; README.md says what.
"""

import argparse
import copy
import functools
import gettext
import importlib.util
import itertools
import json
import os
import random
import sys
import sysconfig
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from benchmarks import SUBJECT
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from examples.demo.corpus import collect_documents
from gpuclassify import DistributedDataClassifier
from gpuclassify.tokenizing import gaps
from gpuclassify.tokenizing.prefetch import FIRST_BLOCK_CHARS, MOST_BLOCK_CHARS, text_blocks

QUESTION = "tokens"
LIBRARY = "tokenizers"
PEER = "gigatoken"  # of byte-pair encoding alone: make bench-tokens
WAYS = {"cold": "an empty cache", "steady": "other texts of the kind before", SUBJECT: "again"}
CATALOGUES = [Path(folder, "locale") for folder in ("/usr/share", f"{sys.prefix}/share")]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=30_000, help="of a language (30,000)")
    options = parse(parser, arguments)
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # of the tokenizers
    return finish(QUESTION, begin(options) | measure(options), options, table)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time every family on every language, in turns; ids must be equal."""
    corpora = {name: texts for name, texts in read_corpora(options.documents) if len(texts) > 9}
    everything = [text for texts in corpora.values() for text in texts[::4]]
    results: dict[str, Any] = {}
    for family, backend in train(everything, 500 if options.smoke else 30_000):
        for language, texts in corpora.items():
            results[f"{family}, {language}"] = compare(backend, texts, options)
    memory = {} if options.smoke else {"cache_mib_at_its_bound": fill(backend)}
    return {"cases": results, "classifier": classify(corpora["English"], options), **memory}


def classify(texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time a classifier of one layer of width 16, where tokens are the work, by its documents."""
    _, backend = next(train(texts, 500 if options.smoke else 30_000))
    backend.add_special_tokens(["[PAD]"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes)
    alone = Tokenizer.from_str(backend.to_str())
    alone.enable_truncation(config.max_position_embeddings)
    before, frame = texts[: len(texts) // 2], pd.DataFrame({"text": texts[len(texts) // 2 :]})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        BertForSequenceClassification(config).save_pretrained(folder)
        classifier = DistributedDataClassifier(model=folder, device="cpu")

        def tokenize() -> np.ndarray:
            alone.encode_batch_fast(list(frame["text"]))
            return frame["text"].str.len().to_numpy()

        def label() -> np.ndarray:
            return classifier(frame)["text"].str.len().to_numpy()

        def warm_up() -> None:
            classifier(pd.DataFrame({"text": before}))

        library = Variant(LIBRARY, tokenize, lambda: None)
        subject = Variant(SUBJECT, label, warm_up)
        run = run_interleaved([library, subject], options.repeats, 0)
    return {
        "documents": len(frame),
        "variants": {name: run.times(name) for name in (LIBRARY, SUBJECT)},
        "speed_up": {SUBJECT: run.speed_up(SUBJECT, LIBRARY)},
    }


def compare(backend: Any, texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time the second half of the texts, of which a steady cache has seen the first."""
    before, texts = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    blocks = [*text_blocks([*map(len, texts)], FIRST_BLOCK_CHARS, MOST_BLOCK_CHARS)]

    def of_library() -> np.ndarray:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return np.array([[len(ids), sum(ids[:9])] for ids in (one.ids for one in encodings)])

    def of_cache(cache: gaps.WordCache) -> np.ndarray:
        """Tokenize block by block, as a worker does, with the library's threads for new words."""
        answers = np.zeros((len(texts), 2), dtype=np.int64)
        for start, stop in blocks:
            made = cache(texts[start:stop])
            ids = made.take(np.zeros_like(made.lengths), made.lengths)
            ends = np.cumsum(made.lengths)
            sums, begins = np.append(0, np.cumsum(ids, dtype=np.int64)), ends - made.lengths
            few = sums[np.minimum(begins + 9, ends)] - sums[begins]
            answers[start:stop] = np.stack([made.lengths, few], axis=1)
        return answers

    empty = gaps.WordCache(backend, json.loads(backend.to_str()))
    fed, warm = filled(empty, before), filled(empty, before + texts)
    ways: dict[str, Callable[[], np.ndarray]] = {
        LIBRARY: of_library,
        "cold": lambda: of_cache(filled(empty, [])),
        "steady": lambda: of_cache(filled(fed, [])),
        SUBJECT: lambda: of_cache(warm),
    }
    check_ids(backend, warm, texts)
    if importlib.util.find_spec(PEER) and type(backend.model) is models.BPE:
        ways[PEER] = functools.partial(of_peer, peer_of(backend), texts)
    variants = [Variant(name, way, lambda: None) for name, way in ways.items()]
    run = run_interleaved(variants, options.repeats, 0)
    known = filled(fed, [])
    count = len(known(texts)._starts) - len(texts)  # beside texts that are not cut
    return {
        "documents": len(texts),
        "mean_text_chars": float(np.mean([len(text) for text in texts])),
        "share_of_words_known": 1 - len(kept(known) - kept(fed)) / count if count else 0,
        "variants": {
            name: run.times(name) | {"us_a_text": run.median_seconds(name) / len(texts) * 1e6}
            for name in ways
        },
        "speed_up": {SUBJECT: run.speed_up(SUBJECT, LIBRARY)},
    }


def peer_of(backend: Any) -> Any:
    """Return gigatoken's tokenizer of the same vocabulary, which keeps words it has seen."""
    import gigatoken

    return gigatoken.Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def of_peer(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """Return each text's tokens and the sum of its first nine ids, by gigatoken."""
    layout = tokenizer.encode_batch(texts).layout
    ends, ids = np.asarray(layout.offsets), np.asarray(layout.content.data, dtype=np.int64)
    sums, begins = np.append(0, np.cumsum(ids)), ends[:-1]
    few = sums[np.minimum(begins + 9, ends[1:])] - sums[begins]
    return np.stack([np.diff(ends), few], axis=1)


def filled(cache: gaps.WordCache, texts: list[str]) -> gaps.WordCache:
    """Return a copy of a cache that has seen these texts too."""
    cache = copy.copy(cache)
    cache._younger, cache._older = dict(cache._younger), dict(cache._older)
    for start in range(0, len(texts), 5_000):
        cache(texts[start : start + 5_000])
    return cache


def kept(cache: gaps.WordCache) -> set[str]:
    """Return the words that a cache holds."""
    return {*cache._younger, *cache._older}


def check_ids(backend: Any, cache: gaps.WordCache, texts: list[str]) -> None:
    """Raise AssertionError unless all ids are those of the library."""
    made = cache(texts)
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    ids = np.concatenate([np.array(one.ids, dtype=np.int32) for one in encodings])
    assert np.array_equal(made.take(np.zeros_like(made.lengths), made.lengths), ids)


def fill(backend: Any) -> float:
    """Return the MiB that Python holds more after a cache was filled twice over."""
    tracemalloc.start()
    cache = gaps.WordCache(backend, json.loads(backend.to_str()))
    draw, drops = random.Random(0), 0
    while drops < 4:
        older = cache._older
        block = [f"{draw.getrandbits(48):x}" for _ in range(20_000)]
        cache([" ".join(word for word in block for _ in range(3))])
        drops += cache._older is not older
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held_bytes / 2**20


def read_corpora(most: int) -> Iterator[tuple[str, list[str]]]:
    """Yield texts by language: docstrings, catalogues of messages, and files of this Python."""
    documents = collect_documents(max_documents=max(most, 200))
    yield "English", [document.text for document in documents][:most]
    for name, folders in (("Russian", ("ru",)), ("Chinese", ("zh_CN", "zh_Hans_CN"))):
        globs = (root.glob(f"{part}/*/*.mo") for root in CATALOGUES for part in folders)
        paths = itertools.chain.from_iterable(globs)
        messages = [message for path in sorted(paths) for message in _messages(path)]
        texts = ["\n".join(messages[n : n + 5]) for n in range(0, len(messages), 5)]
        random.Random(0).shuffle(texts)
        yield name, texts[:most]
    code = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines = path.read_text("utf-8", errors="ignore").splitlines()
        code += ["\n".join(lines[n : n + 30]) for n in range(0, len(lines), 30)]
    random.Random(0).shuffle(code)
    yield "code", code[:most]


def _messages(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    except (OSError, ValueError, UnicodeError):  # of another encoding
        return []
    return [text for text in catalogue.values() if isinstance(text, str) and text.strip()]


def train(texts: list[str], size: int) -> Iterator[tuple[str, Any]]:
    """Yield tokenizers of the four families, trained on texts."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    wordpiece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=True)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    unigram = Tokenizer(models.Unigram())
    collapsed = normalizers.Replace(Regex(" {2,}"), " ")
    white = normalizers.Nmt()
    unigram.normalizer = normalizers.Sequence([white, normalizers.NFKC(), collapsed])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    plain, pattern = Tokenizer(models.BPE()), Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    pattern.pre_tokenizer = pre_tokenizers.Sequence([split, bare])
    quiet = {"vocab_size": size, "show_progress": False}
    of_bytes = trainers.BpeTrainer(initial_alphabet=alphabet, **quiet)
    special = {"unk_token": "<unk>", "special_tokens": ["<unk>"]}
    for name, tokenizer, trainer in (
        ("WordPiece", wordpiece, trainers.WordPieceTrainer(special_tokens=["[UNK]"], **quiet)),
        ("Unigram", unigram, trainers.UnigramTrainer(**special, **quiet)),
        ("bytes", plain, of_bytes),
        ("bytes, pattern", pattern, of_bytes),
    ):
        tokenizer.train_from_iterator(texts, trainer)
        yield name, tokenizer


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [f"{'us a text':26}{LIBRARY:>12}" + "".join(f"{way:>20}" for way in WAYS)]
    for name, case in result["cases"].items():
        cells = [f"{case['variants'][LIBRARY]['us_a_text']:12.0f}"]
        for way in WAYS:
            time = case["variants"][way]["us_a_text"]
            ratio = case["variants"][LIBRARY]["us_a_text"] / time
            cells.append(f"{time:11.0f} ({ratio:5.2f}x)")
        known = case["share_of_words_known"]
        peer = case["variants"].get(PEER)
        beside = "" if peer is None else f", {PEER} {peer['us_a_text']:.0f}"
        lines.append(f"{name:26}{''.join(cells)}  {known:.0%} of words known{beside}")
    lines += [f"  {way}: {meaning}" for way, meaning in WAYS.items()]
    seconds = {
        name: way["median_seconds"] for name, way in result["classifier"]["variants"].items()
    }
    ratio = seconds[SUBJECT] / seconds[LIBRARY]
    lines.append(f"  a classifier of one narrow layer takes {ratio:.2f} of {LIBRARY}'s seconds")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
