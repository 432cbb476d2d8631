"""Small tokenizers that load like published ones."""

import functools
from pathlib import Path
from typing import Any

from gpuclassify.testing.files import write_json
from gpuclassify.testing.kinds import KINDS
from gpuclassify.testing.vocabularies import byte_bpe, piece_bpe, unigram, wordpiece


@functools.lru_cache(maxsize=32)
def trained_tokenizer(name: str, texts: tuple[str, ...]) -> Any:
    """The complete ``tokenizers.Tokenizer``; shared, so callers must not change it."""
    from tokenizers import AddedToken, Tokenizer, processors

    kind = KINDS[name]
    builders = {
        "unigram": unigram,
        "wordpiece": wordpiece,
        "byte-bpe": byte_bpe,
        "piece-bpe": piece_bpe,
    }
    tokenizer = Tokenizer(builders[kind.algorithm](kind, texts))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = _stages(name, kind.algorithm)
    unknown = kind.roles.get("unk_token") if kind.is_flat else None
    ordered = [t for t in kind.first + kind.last if t in kind.roles.values()]
    tokenizer.add_special_tokens([AddedToken(t, normalized=t == unknown) for t in ordered])
    template = kind.template.format(**kind.roles)
    if template != "$A":
        specials = [(t, tokenizer.token_to_id(t)) for t in template.split() if t != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=specials
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
            normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
            normalizers.NFC(),
            normalizers.Strip(left=False, right=True),
        ],
        "albert": [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ],
    }
    spaces: list[Any] = [pre_tokenizers.Metaspace()]
    if name != "deberta-v2":
        spaces.insert(0, pre_tokenizers.WhitespaceSplit())
    normalizer = normalizers.Sequence(steps[name]) if name in steps else None
    return normalizer, pre_tokenizers.Sequence(spaces), decoders.Metaspace()


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
