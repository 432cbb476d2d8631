"""Vocabularies trained on a few texts, the same ones in every process."""

import functools
import json
import math
from typing import Any

from gpuclassify.testing.kinds import TokenizerKind


@functools.lru_cache(maxsize=32)
def _merged(algorithm: str, texts: tuple[str, ...]) -> Any:
    """A byte-pair tokenizer of `texts`, split into words as `algorithm` does.

    The other algorithms take their pieces from it as well: of the library's trainers it alone
    gives the same vocabulary in every process.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    alphabet: list[str] = []
    if algorithm == "wordpiece":
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif algorithm == "unigram":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def unigram(kind: TokenizerKind, texts: tuple[str, ...]) -> Any:
    """A model of Unigram pieces."""
    from tokenizers import models

    merged = _merged("unigram", texts)
    counts = dict.fromkeys(sorted(merged.get_vocab()), 1)
    for encoding in merged.encode_batch(list(texts)):
        for piece in encoding.tokens:
            counts[piece] += 1
    total = sum(counts.values())
    scored = sorted((round(math.log(count / total), 4), piece) for piece, count in counts.items())
    pieces = [(piece, score) for score, piece in reversed(scored)]
    unknown = kind.first.index(kind.roles["unk_token"])
    return models.Unigram([(token, 0.0) for token in kind.first] + pieces, unknown, False)


def wordpiece(kind: TokenizerKind, texts: tuple[str, ...]) -> Any:
    """A model of WordPiece pieces."""
    from tokenizers import models

    merged = _merged("wordpiece", texts)
    pieces = {piece for piece in merged.get_vocab() if len(piece) == 1}
    pieces |= {f"##{piece}" for piece in pieces}
    for encoding in merged.encode_batch(list(texts)):
        words = [None, *encoding.word_ids]
        for piece, word, previous in zip(encoding.tokens, words[1:], words, strict=False):
            pieces.add(piece if word != previous else f"##{piece}")
    vocabulary = [*kind.first, *sorted(pieces), *kind.last]
    ids = {token: number for number, token in enumerate(vocabulary)}
    return models.WordPiece(ids, unk_token=kind.roles["unk_token"])


def byte_bpe(kind: TokenizerKind, texts: tuple[str, ...]) -> Any:
    """A model of byte-level byte-pair pieces."""
    from tokenizers import models

    trained = json.loads(_merged("byte-bpe", texts).to_str())["model"]
    pieces = sorted(trained["vocab"], key=trained["vocab"].get)
    ids = {token: number for number, token in enumerate((*kind.first, *pieces, *kind.last))}
    return models.BPE(ids, [tuple(merge) for merge in trained["merges"]])


def piece_bpe(kind: TokenizerKind, texts: tuple[str, ...]) -> Any:
    """A model of byte-pair pieces with spaces as ``▁`` and bytes for what has no piece."""
    from tokenizers import models

    trained = json.loads(_merged("unigram", texts).to_str())["model"]
    pieces = sorted(trained["vocab"], key=trained["vocab"].get)
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    ordered = [*kind.first, *raw_bytes, "▁▁", "▁▁▁▁", *pieces]
    ids = {token: number for number, token in enumerate(dict.fromkeys(ordered))}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), *map(tuple, trained["merges"])]
    unknown = kind.roles["unk_token"]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
