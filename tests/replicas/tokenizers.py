"""Small tokenizers that load like published ones, the same ones in every process."""

import functools
import json
import math
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.replicas.writing import write_json


@dataclass(frozen=True)
class _Kind:
    """A published tokenizer's algorithm, special tokens and class in transformers."""

    algorithm: str
    class_name: str
    roles: dict[str, str]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    template: str = "{cls_token} $A {sep_token}"
    pair: str = "{cls_token} $A {sep_token} $B:1 {sep_token}:1"
    settings: dict[str, Any] = field(default_factory=dict)
    is_flat: bool = False  # special_tokens_map.json holds strings, not records


def _roles(**names: str) -> dict[str, str]:
    return {f"{role}_token": token for role, token in sorted(names.items())}


_BERT_ROLES = _roles(cls="[CLS]", mask="[MASK]", pad="[PAD]", sep="[SEP]", unk="[UNK]")
_ROBERTA_ROLES = _roles(
    bos="<s>", cls="<s>", eos="</s>", mask="<mask>", pad="<pad>", sep="</s>", unk="<unk>"
)
_ROBERTA_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
_NO_SEGMENTS = {"model_input_names": ["input_ids", "attention_mask"]}
KINDS = {
    "deberta-v2": _Kind(
        "unigram",
        "DebertaV2Tokenizer",
        _BERT_ROLES | _roles(bos="[CLS]", eos="[SEP]"),
        first=("[PAD]", "[CLS]", "[SEP]", "[UNK]"),
        last=("[MASK]",),
        settings={
            "do_lower_case": False,
            "sp_model_kwargs": {},
            "split_by_punct": False,
            "vocab_type": "spm",
        },
        is_flat=True,
    ),
    "bert": _Kind(
        "wordpiece",
        "BertTokenizer",
        _BERT_ROLES,
        # Unused ids as in the published vocabulary, so that [UNK] is 100 and [CLS] is 101.
        first=("[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        settings={"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True},
    ),
    "roberta": _Kind(
        "byte-bpe",
        "RobertaTokenizer",
        _ROBERTA_ROLES,
        first=_ROBERTA_FIRST,
        last=("<mask>",),
        pair="{cls_token} $A {sep_token} {sep_token} $B {sep_token}",
        settings={"add_prefix_space": False, **_NO_SEGMENTS},
    ),
    "xlm-roberta": _Kind(
        "unigram",
        "XLMRobertaTokenizer",
        _ROBERTA_ROLES,
        first=_ROBERTA_FIRST,
        last=("<mask>",),
        pair="{cls_token} $A {sep_token} {sep_token} $B {sep_token}",
        settings=_NO_SEGMENTS,
    ),
    "albert": _Kind(
        "unigram",
        "AlbertTokenizer",
        _BERT_ROLES | _roles(bos="[CLS]", eos="[SEP]", pad="<pad>", unk="<unk>"),
        first=("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        settings={"do_lower_case": True, "keep_accents": False},
    ),
    "gpt2": _Kind(
        "byte-bpe",
        "GPT2Tokenizer",
        _roles(**dict.fromkeys(("bos", "eos", "pad", "unk"), "<|endoftext|>")),
        last=("<|endoftext|>",),
        template="$A",
        settings={"add_prefix_space": False, **_NO_SEGMENTS},
    ),
    "modernbert": _Kind(
        "byte-bpe",
        "PreTrainedTokenizerFast",
        _BERT_ROLES,
        last=("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"),
        settings=_NO_SEGMENTS,
    ),
    "llama": _Kind(
        "byte-bpe",
        "PreTrainedTokenizerFast",
        _roles(bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|pad|>"),
        last=("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"),
        template="{bos_token} $A",
        pair="{bos_token} $A {bos_token}:1 $B:1",
        settings=_NO_SEGMENTS,
    ),
    "llama-guard": _Kind(
        "piece-bpe",
        "LlamaTokenizer",
        _roles(bos="<s>", eos="</s>", unk="<unk>"),
        first=("<unk>", "<s>", "</s>"),
        template="{bos_token} $A",
        pair="{bos_token} $A {bos_token}:1 $B:1",
        settings={"add_bos_token": True, "add_eos_token": False, "legacy": False},
    ),
}


@functools.cache
def published_files() -> dict[str, bytes]:
    """Tokenizers as transformers 4.57.6 wrote them and read them, by path.

    ``deberta/`` has all files of a DeBERTa-v2 tokenizer, texts, and the ids that transformers gave
    them. ``other/`` has vocabularies, and ``transformers_4.json`` the ids that it gave texts by
    each of several classes, with one of the vocabularies and no ``tokenizer.json`` beside.
    """
    with tarfile.open(Path(__file__).with_name("published_tokenizers.tar.xz")) as archive:
        members = [member for member in archive if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


@functools.cache
def nmt_nfkc() -> Any:
    """The normaliser of most SentencePiece models."""
    from tokenizers import Tokenizer

    steps = Tokenizer.from_str(published_files()["deberta/tokenizer.json"].decode()).normalizer
    return steps[1]


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
        tokenizer.normalizer = nmt_nfkc()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _unigram(kind: _Kind, texts: tuple[str, ...]) -> Any:
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


def _wordpiece(kind: _Kind, texts: tuple[str, ...]) -> Any:
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


def _byte_bpe(kind: _Kind, texts: tuple[str, ...]) -> Any:
    """A model of byte-level byte-pair pieces."""
    from tokenizers import models

    trained = json.loads(_merged("byte-bpe", texts).to_str())["model"]
    pieces = sorted(trained["vocab"], key=trained["vocab"].get)
    ids = {token: number for number, token in enumerate((*kind.first, *pieces, *kind.last))}
    return models.BPE(ids, [tuple(merge) for merge in trained["merges"]])


def _piece_bpe(kind: _Kind, texts: tuple[str, ...]) -> Any:
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


_MODELS = {
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "byte-bpe": _byte_bpe,
    "piece-bpe": _piece_bpe,
}


@functools.lru_cache(maxsize=32)
def trained_tokenizer(name: str, texts: tuple[str, ...]) -> Any:
    """The complete ``tokenizers.Tokenizer``; shared, so callers must not change it."""
    from tokenizers import AddedToken, Tokenizer, processors

    kind = KINDS[name]
    tokenizer = Tokenizer(_MODELS[kind.algorithm](kind, texts))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = _stages(name, kind.algorithm)
    unknown = kind.roles.get("unk_token") if kind.is_flat else None
    ordered = [t for t in kind.first + kind.last if t in kind.roles.values()]
    tokenizer.add_special_tokens([AddedToken(t, normalized=t == unknown) for t in ordered])
    template = kind.template.format(**kind.roles)
    if template != "$A":
        specials = [(t, tokenizer.token_to_id(t)) for t in template.split() if t != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=kind.pair.format(**kind.roles), special_tokens=specials
        )
    return tokenizer


def _stages(name: str, algorithm: str) -> tuple[Any, Any, Any]:
    """Normalizer, pre-tokenizer and decoder of a published tokenizer."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if algorithm == "wordpiece":
        lower = normalizers.BertNormalizer(lowercase=True)
        return lower, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    if algorithm == "byte-bpe":
        return None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if algorithm == "piece-bpe":
        text_of_pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        return (
            None,
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
            decoders.Sequence([*text_of_pieces, decoders.Strip(" ", left=1, right=0)]),
        )
    steps: dict[str, list[Any]] = {
        "deberta-v2": [
            normalizers.Strip(),
            nmt_nfkc(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ],
        "xlm-roberta": [nmt_nfkc()],
        "albert": [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            nmt_nfkc(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ],
    }
    spaces: list[Any] = [pre_tokenizers.Metaspace()]
    if name != "deberta-v2":
        spaces.insert(0, pre_tokenizers.WhitespaceSplit())
    return normalizers.Sequence(steps[name]), pre_tokenizers.Sequence(spaces), decoders.Metaspace()


_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def write_tokenizer(
    directory: Path, name: str, tokenizer: Any, max_tokens: int, padding_side: str
) -> None:
    """Write a trained tokenizer with all the files that its published kind has."""
    kind = KINDS[name]
    added = {
        number: {key: getattr(token, key) for key in _TOKEN_FIELDS}
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    records = {record["content"]: record for record in added.values()}
    config = kind.settings | kind.roles
    config |= {
        "added_tokens_decoder": {str(number): record for number, record in added.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "padding_side": padding_side,
        "tokenizer_class": kind.class_name,
    }
    special = {
        role: token
        if kind.is_flat and not records[token]["normalized"]
        else {key: value for key, value in records[token].items() if key != "special"}
        for role, token in kind.roles.items()
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "tokenizer_config.json": dict(sorted(config.items())),
        "special_tokens_map.json": special,
    }
    if kind.algorithm == "unigram" and kind.last:
        files["added_tokens.json"] = {t: tokenizer.token_to_id(t) for t in kind.last}
    for file_name, value in files.items():
        write_json(directory / file_name, value)
    if kind.algorithm == "wordpiece":
        ids = tokenizer.get_vocab()
        lines = "".join(f"{token}\n" for token in sorted(ids, key=ids.get))
        (directory / "vocab.txt").write_text(lines, encoding="utf-8")
