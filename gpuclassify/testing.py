"""Tiny random checkpoints with the layouts of published ones, to test without the Hub.

``write_checkpoint`` writes a small copy of one of the published classifiers,
``write_sequence_classifier`` any small ``AutoModelForSequenceClassification``. Each directory
holds weights, configuration and a trained tokenizer, and loads like a download. Weights are
random; the last layer is fitted so that different texts get clearly different answers.
"""

import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FAMILY_LABELS: dict[str, tuple[str, ...]] = {
    "domain": _words(
        "Adult Arts_and_Entertainment Autos_and_Vehicles Beauty_and_Fitness Books_and_Literature "
        "Business_and_Industrial Computers_and_Electronics Finance Food_and_Drink Games Health "
        "Hobbies_and_Leisure Home_and_Garden Internet_and_Telecom Jobs_and_Education "
        "Law_and_Government News Online_Communities People_and_Society Pets_and_Animals "
        "Real_Estate Science Sensitive_Subjects Shopping Sports Travel_and_Transportation"
    ),
    "quality": ("High", "Medium", "Low"),
    "content-type": (
        "Product/Company/Organization/Personal Websites",
        "Explanatory Articles",
        "News",
        "Blogs",
        "MISC",
        "Boilerplate Content",
        "Analytical Exposition",
        "Online Comments",
        "Reviews",
        "Books and Literature",
        "Conversational",
    ),
}
FAMILY_LABELS["multilingual-domain"] = FAMILY_LABELS["domain"]
_EDUCATION = ("fineweb-edu", "fineweb-mixtral-edu", "fineweb-nemotron-edu")
FAMILIES = ("domain", "multilingual-domain", "quality", "content-type", *_EDUCATION)

_TOPICS = (
    _words("river mountain valley forest winter storm island harbour glacier meadow"),
    _words("market budget invoice shares pension interest mortgage auditor profit currency"),
    _words("match season goalkeeper referee champion stadium training league medal sprint"),
    _words("oven flour butter garlic recipe simmer vinegar pastry roasted spoonful"),
    _words("patient vaccine clinic therapy symptom surgeon dosage recovery nutrition allergy"),
    _words("processor network compiler database keyboard encryption server browser pixel robot"),
    _words("theorem electron orbit enzyme molecule fossil gravity equation telescope neuron"),
    _words("election minister treaty parliament verdict lawsuit citizen mayor reform census"),
)
_COMMON = _words(
    "the a of and to in is was for with on that by from this which were has their about after "
    "when because however many small new old long often slowly together without between people "
    "year day way part place found made said gives takes shows keeps remains becoming quickly"
)
_ACCENTED = _words("café naïve jalapeño Zürich São façade smörgåsbord Łódź crème déjà Ελλάδα")
_RARE = _words(
    "天気がいい 学习语言 東京 你好世界 한국어 Москва नमस्ते 🙂 🚀 👩\u200d🔬 "
    "http://example.org/a?b=1 #tag C++"
)
_SYLLABLES = _words("ba ker lo min tra ves ul dor pi shan gre tuk el ona")


def sample_texts(
    count: int, seed: int = 0, *, min_words: int = 1, max_words: int = 120
) -> list[str]:
    """Pseudo-natural documents of varied length, the same ones for the same arguments.

    Parameters
    ----------
    count : int
        Number of documents. A longer list begins with the shorter one.
    seed : int
        Another seed gives other documents.
    min_words, max_words : int
        Bounds, both included, of the words between white space; short texts are commoner.

    Returns
    -------
    list of str
        Mostly lower-case English words in sentences, with some accents, other scripts,
        emoji, numbers and line breaks. Never empty.

    Raises
    ------
    ValueError
        If not ``1 <= min_words <= max_words``.
    """
    if not 1 <= min_words <= max_words:
        raise ValueError(
            f"min_words={min_words}, max_words={max_words}: need 1 <= min_words <= max_words"
        )
    rng = random.Random(seed)
    longest = math.log(max_words + 1)
    shortest = math.log(min_words)
    lengths = (int(math.exp(rng.uniform(shortest, longest))) for _ in range(count))
    return [_text(rng, min(max(length, min_words), max_words)) for length in lengths]


def _text(rng: random.Random, words: int) -> str:
    topic, parts = rng.choice(_TOPICS), []
    while words > 0:
        length = min(words, rng.randint(3, 14))
        sentence = " ".join(_word(rng, topic) for _ in range(length))
        parts.append(sentence[0].upper() + sentence[1:] + rng.choice(("." * 4) + "!?…"))
        parts.append(rng.choice((" ", " ", " ", "\n", "\n\n")))
        words -= length
    return "".join(parts[:-1])


def _word(rng: random.Random, topic: Sequence[str]) -> str:
    draw = rng.random()
    if draw < 0.40:
        word = rng.choice(topic)
    elif draw < 0.85:
        word = rng.choice(_COMMON)
    elif draw < 0.90:
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4)))
    elif draw < 0.93:
        word = str(rng.randint(0, 2100))
    else:
        word = rng.choice(_ACCENTED if draw < 0.97 else _RARE)
    return word + ("," if rng.random() < 0.08 else "")


@dataclass(frozen=True)
class _TokenizerKind:
    """A published tokenizer's algorithm, special tokens and class in transformers."""

    algorithm: str
    class_name: str
    roles: dict[str, str]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    template: str = "{cls_token} $A {sep_token}"
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
_KINDS = {
    "deberta-v2": _TokenizerKind(
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
    "bert": _TokenizerKind(
        "wordpiece",
        "BertTokenizer",
        _BERT_ROLES,
        # Unused ids as in the published vocabulary, so that [UNK] is 100 and [CLS] is 101.
        first=("[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        settings={"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True},
    ),
    "roberta": _TokenizerKind(
        "byte-bpe",
        "RobertaTokenizer",
        _ROBERTA_ROLES,
        first=_ROBERTA_FIRST,
        last=("<mask>",),
        settings={"add_prefix_space": False, **_NO_SEGMENTS},
    ),
    "xlm-roberta": _TokenizerKind(
        "unigram",
        "XLMRobertaTokenizer",
        _ROBERTA_ROLES,
        first=_ROBERTA_FIRST,
        last=("<mask>",),
        settings=_NO_SEGMENTS,
    ),
    "albert": _TokenizerKind(
        "unigram",
        "AlbertTokenizer",
        _BERT_ROLES | _roles(bos="[CLS]", eos="[SEP]", pad="<pad>", unk="<unk>"),
        first=("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        settings={"do_lower_case": True, "keep_accents": False},
    ),
    "gpt2": _TokenizerKind(
        "byte-bpe",
        "GPT2Tokenizer",
        _roles(**dict.fromkeys(("bos", "eos", "pad", "unk"), "<|endoftext|>")),
        last=("<|endoftext|>",),
        template="$A",
        settings={"add_prefix_space": False, **_NO_SEGMENTS},
    ),
    "modernbert": _TokenizerKind(
        "byte-bpe",
        "PreTrainedTokenizerFast",
        _BERT_ROLES,
        last=("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"),
        settings=_NO_SEGMENTS,
    ),
    "llama": _TokenizerKind(
        "byte-bpe",
        "PreTrainedTokenizerFast",
        _roles(bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|pad|>"),
        last=("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"),
        template="{bos_token} $A",
        settings=_NO_SEGMENTS,
    ),
}


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


def _unigram(kind: _TokenizerKind, texts: tuple[str, ...]) -> Any:
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


def _wordpiece(kind: _TokenizerKind, texts: tuple[str, ...]) -> Any:
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


def _byte_bpe(kind: _TokenizerKind, texts: tuple[str, ...]) -> Any:
    from tokenizers import models

    trained = json.loads(_merged("byte-bpe", texts).to_str())["model"]
    pieces = sorted(trained["vocab"], key=trained["vocab"].get)
    ids = {token: number for number, token in enumerate((*kind.first, *pieces, *kind.last))}
    return models.BPE(ids, [tuple(merge) for merge in trained["merges"]])


def _stages(name: str, algorithm: str) -> tuple[Any, Any, Any]:
    """Normalizer, pre-tokenizer and decoder of a published tokenizer."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if algorithm == "wordpiece":
        lower = normalizers.BertNormalizer(lowercase=True)
        return lower, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    if algorithm == "byte-bpe":
        return None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
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


@functools.lru_cache(maxsize=32)
def _tokenizer(name: str, texts: tuple[str, ...]) -> Any:
    """The complete ``tokenizers.Tokenizer``; shared, so callers must not change it."""
    from tokenizers import AddedToken, Tokenizer, processors

    kind = _KINDS[name]
    build = {"unigram": _unigram, "wordpiece": _wordpiece, "byte-bpe": _byte_bpe}[kind.algorithm]
    tokenizer = Tokenizer(build(kind, texts))
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


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write_tokenizer(
    directory: Path, name: str, tokenizer: Any, max_tokens: int, padding_side: str
) -> None:
    kind = _KINDS[name]
    added = {
        number: {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
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
        (directory / file_name).write_text(_json(value), encoding="utf-8")
    if kind.algorithm == "wordpiece":
        ids = tokenizer.get_vocab()
        lines = "".join(f"{token}\n" for token in sorted(ids, key=ids.get))
        (directory / "vocab.txt").write_text(lines, encoding="utf-8")


def category_config(labels: Sequence[str], base_model: str = "backbone") -> str:
    """The text of config.json of a DeBERTa classifier with one linear head.

    Parameters
    ----------
    labels : sequence of str
        Labels in id order.
    base_model : str
        Hub name, or a directory relative to the checkpoint, of the backbone's configuration.

    Returns
    -------
    str
        JSON with sorted keys and no final newline, byte for byte as published.
    """
    config = {
        "base_model": base_model,
        "config_path": None,
        "fc_dropout": 0.2,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "model_type": "deberta-v2",
        "pretrained": True,
    }
    return json.dumps(config, indent=2, sort_keys=True)


def education_config(
    *,
    vocab_size: int = 30522,
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    initializer_range: float = 0.02,
    max_positions: int = 512,
    label: str = "LABEL_0",
) -> str:
    """The text of config.json of a FineWeb education scorer; the defaults give the published one.

    Parameters
    ----------
    vocab_size, hidden_size, num_layers, num_heads, max_positions : int
        Sizes of the BERT model; the feed-forward layers are four times as wide as the others.
    initializer_range : float
        Standard deviation of fresh weights.
    label : str
        Name of the only output.

    Returns
    -------
    str
        JSON with sorted keys and a final newline.
    """
    config = {
        "_name_or_path": "Snowflake/snowflake-arctic-embed-m",
        "architectures": ["BertForSequenceClassification"],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": 0.0,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": hidden_size,
        "id2label": {"0": label},
        "initializer_range": initializer_range,
        "intermediate_size": 4 * hidden_size,
        "label2id": {label: 0},
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": max_positions,
        "model_type": "bert",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "problem_type": "regression",
        "torch_dtype": "float32",
        "transformers_version": "4.40.1",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _backbone_config(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    initializer_range: float,
    max_positions: int,
) -> dict[str, Any]:
    return {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": hidden_size,
        "initializer_range": initializer_range,
        "intermediate_size": 4 * hidden_size,
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": max_positions,
        "max_relative_positions": -1,
        "model_type": "deberta-v2",
        "norm_rel_ebd": "layer_norm",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "pos_att_type": ["p2c", "c2p"],
        # 256 as published would leave the logarithmic buckets to texts of over 128 tokens.
        "position_buckets": 32,
        "position_biased_input": False,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
        "vocab_size": vocab_size,
    }


def _empty_directory(directory: str | Path) -> Path:
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file: give a directory that is new or empty")
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(
            f"{path} is not empty (it holds {min(path.iterdir()).name!r}): "
            "give a directory that is new or empty"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def _seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build` returns when run from `seed`, the caller's random state left as it was."""
    import torch

    # torch.manual_seed would also reseed every GPU.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def _fit_head(
    head: Any,
    outputs_of: Callable[[Any], Any],
    documents: list[Any],
    centre: float = 0.0,
    spread: float = 1.5,
) -> None:
    """Shift and scale the linear layer `head`: outputs get mean `centre`, deviation `spread`."""
    import torch

    with torch.no_grad():
        outputs = torch.stack([outputs_of(ids) for ids in documents]).double()
        mean = outputs.mean(dim=0)
        # Rounded, so that the last bit of a matrix product does not reach the written bytes.
        scale = round(float(spread / (outputs - mean).square().mean().sqrt()), 3)
        head.weight.mul_(scale)
        if head.bias is not None:
            head.bias.copy_(((head.bias.double() - mean) * scale + centre).round(decimals=3))


def _save(model: Any, path: Path) -> None:
    """Save without the progress bar, which would fill a test's output."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(path)
    finally:
        if is_shown:
            logging.enable_progress_bar()


def _token_ids(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[Any]:
    import torch

    encodings = tokenizer.encode_batch(list(texts)[:32])
    ids = [encoding.ids[:max_tokens] for encoding in encodings]
    return [torch.tensor([row]) for row in ids if row]


def write_checkpoint(
    directory: str | Path,
    family: str = "domain",
    *,
    labels: Sequence[str] | None = None,
    seed: int = 0,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    initializer_range: float = 0.3,
    max_positions: int | None = None,
    texts: Sequence[str] | None = None,
) -> Path:
    """Write a small random checkpoint with the layout of a published classifier.

    Parameters
    ----------
    directory : path
        Where to write; created if missing.
    family : str
        One of ``FAMILIES``. The four categories are DeBERTa with one linear head, whose
        backbone configuration lies in the sub-directory ``backbone``; the three FineWeb
        scorers are BERT with one regression output.
    labels : sequence of str, optional
        Labels in id order in place of the published ones; one name for a FineWeb scorer.
    seed : int
        Seed of the weights. The same arguments give the same bytes.
    hidden_size, num_layers, num_heads : int
        Sizes of the model; `num_heads` divides `hidden_size`.
    initializer_range : float
        Standard deviation of the weights. The default suits the default `hidden_size`;
        divide it by two for four times the size.
    max_positions : int, optional
        Longest input in tokens, special ones included. Published: 1024 for quality and
        content-type, 512 otherwise.
    texts : sequence of str, optional
        Documents to train the tokenizer on and to fit the last layer to.

    Returns
    -------
    Path
        The directory. Its weights are float32 in ``model.safetensors``.

    Raises
    ------
    ValueError
        If the family is unknown, the labels do not suit it or the texts hold no words.
    FileExistsError
        If the directory is not empty.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    is_education = family in _EDUCATION
    labels = _checked_labels(FAMILY_LABELS.get(family, ("LABEL_0",)) if labels is None else labels)
    if is_education and len(labels) != 1:
        raise ValueError(f"{family} has one output, got {len(labels)} labels: give one or none")
    documents = _documents(texts)
    path = _empty_directory(directory)
    name = "bert" if is_education else "deberta-v2"
    tokenizer = _tokenizer(name, documents)
    published = 1024 if family in ("quality", "content-type") else 512
    _write_tokenizer(path, name, tokenizer, max_positions or published, "right")
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "initializer_range": initializer_range,
        "max_positions": max_positions or 512,
    }
    ids = _token_ids(tokenizer, documents, sizes["max_positions"])
    write = _write_education if is_education else _write_category
    # Families of one layout differ, or a test could not tell one from another.
    write(path, labels, sizes, ids, seed * len(FAMILIES) + FAMILIES.index(family))
    return path


def _checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    if not labels:
        raise ValueError("a classifier needs at least one label, got none")
    repeated = sorted({label for label in labels if list(labels).count(label) > 1})
    if repeated:
        raise ValueError(f"labels {repeated} occur more than once: every label needs its own id")
    return tuple(labels)


def _documents(texts: Sequence[str] | None) -> tuple[str, ...]:
    documents = _default_texts() if texts is None else tuple(texts)
    if not any(text.strip() for text in documents):
        raise ValueError("texts holds no words: give documents, or None for built-in ones")
    return documents


@functools.lru_cache(maxsize=1)
def _default_texts() -> tuple[str, ...]:
    return tuple(sample_texts(300, seed=1))


def _write_category(
    path: Path, labels: tuple[str, ...], sizes: dict[str, Any], ids: list[Any], seed: int
) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import DebertaV2Config, DebertaV2Model

    config = _backbone_config(**sizes)
    backbone, head = _seeded(
        lambda: (
            DebertaV2Model(DebertaV2Config(**config)).float().eval(),
            torch.nn.Linear(sizes["hidden_size"], len(labels)).float(),
        ),
        seed,
    )
    _fit_head(head, lambda row: head(backbone(row).last_hidden_state[0, 0]), ids)
    tensors = {f"model.{name}": tensor for name, tensor in backbone.state_dict().items()}
    tensors |= {f"fc.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(category_config(labels), encoding="utf-8")
    (path / "backbone").mkdir()
    (path / "backbone" / "config.json").write_text(_json(config), encoding="utf-8")


def _write_education(
    path: Path, labels: tuple[str, ...], sizes: dict[str, Any], ids: list[Any], seed: int
) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    text = education_config(**sizes, label=labels[0])
    config = BertConfig(**json.loads(text))
    model = _seeded(lambda: BertForSequenceClassification(config).float().eval(), seed)
    _fit_head(model.classifier, lambda row: model(row).logits[0], ids, centre=2.5, spread=1.9)
    _save(model, path)
    (path / "config.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class _Architecture:
    """Which tokenizer a model goes with, and its sizes under its own names."""

    tokenizer: str
    sizes: dict[str, Any]


_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES: dict[str, Any] = _ENCODER | {"intermediate_size": 64}
_DECODER: dict[str, Any] = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_TABLE = {
    "bert": _Architecture("bert", _SIZES),
    "roberta": _Architecture("roberta", _SIZES | {"max_position_embeddings": 514}),
    "xlm-roberta": _Architecture("xlm-roberta", _SIZES | {"max_position_embeddings": 514}),
    "electra": _Architecture("bert", _SIZES | {"embedding_size": 16}),
    "distilbert": _Architecture("bert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "modernbert": _Architecture("modernbert", _SIZES | {"max_position_embeddings": 512}),
    "deberta-v2": _Architecture(
        "deberta-v2",
        _SIZES
        | {
            "max_relative_positions": -1,
            "norm_rel_ebd": "layer_norm",
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 32,
            "relative_attention": True,
            "share_att_key": True,
        },
    ),
    "albert": _Architecture("albert", _SIZES | {"embedding_size": 16}),
    "camembert": _Architecture("xlm-roberta", _SIZES | {"max_position_embeddings": 514}),
    "gpt2": _Architecture("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "llama": _Architecture("llama", _DECODER | {"max_position_embeddings": 512}),
    "mistral": _Architecture("llama", _DECODER | {"max_position_embeddings": 512}),
}
ARCHITECTURES = tuple(_TABLE)


def write_sequence_classifier(
    directory: str | Path,
    architecture: str = "bert",
    *,
    num_labels: int = 3,
    labels: Sequence[str] | None = None,
    problem_type: str | None = None,
    seed: int = 0,
    padding_side: str = "right",
    initializer_range: float = 0.3,
    texts: Sequence[str] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a small random model for ``AutoModelForSequenceClassification``.

    Parameters
    ----------
    directory : path
        Where to write; created if missing.
    architecture : str
        One of ``ARCHITECTURES``.
    num_labels : int
        Number of outputs; `labels` decides where it is given.
    labels : sequence of str, optional
        Labels in id order; by default ``LABEL_0``, ``LABEL_1`` ...
    problem_type : str, optional
        ``"single_label_classification"``, ``"multi_label_classification"``,
        ``"regression"``, or None to leave it out of config.json.
    seed : int
        Seed of the weights. The same arguments give the same bytes.
    padding_side : str
        ``"left"`` or ``"right"``, written to the tokenizer's configuration.
    initializer_range : float
        Standard deviation of the weights.
    texts : sequence of str, optional
        Documents to train the tokenizer on and to fit the last layer to.
    **config_overrides
        Fields of the model's configuration class, for example ``num_hidden_layers=3``.

    Returns
    -------
    Path
        The directory. Its weights are float32 in ``model.safetensors``; logits spread by
        1.5 around 0, or around 2.5 for regression.

    Raises
    ------
    ValueError
        If the architecture, padding side, problem type, labels or texts cannot be used.
    FileExistsError
        If the directory is not empty.
    """
    _check_choice("architecture", architecture, ARCHITECTURES)
    _check_choice("padding_side", padding_side, ("left", "right"))
    _check_choice("problem_type", problem_type, _PROBLEM_TYPES)
    if labels is None:
        labels = [f"LABEL_{number}" for number in range(num_labels)]
    labels = _checked_labels(labels)
    documents = _documents(texts)
    path = _empty_directory(directory)
    name = _TABLE[architecture].tokenizer
    tokenizer = _tokenizer(name, documents)
    config = _model_config(architecture, tokenizer, labels, initializer_range, config_overrides)
    config.problem_type = problem_type
    max_tokens = config.max_position_embeddings
    if architecture in _OFFSET_POSITIONS:
        max_tokens -= config.pad_token_id + 1
    ids = _token_ids(tokenizer, documents, max_tokens)
    model, head = _model_and_head(config, seed)
    centre = 2.5 if problem_type == "regression" else 0.0
    _fit_head(head, lambda row: model(row).logits[0], ids, centre)
    _save(model, path)
    _write_tokenizer(path, name, tokenizer, max_tokens, padding_side)
    return path


_PROBLEM_TYPES = (None, "single_label_classification", "multi_label_classification", "regression")
# Their first position is pad_token_id + 1.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")


def _check_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument}={value!r} is not known: choose one of {known}")


def _model_config(
    architecture: str,
    tokenizer: Any,
    labels: tuple[str, ...],
    initializer_range: float,
    overrides: dict[str, Any],
) -> Any:
    from transformers import AutoConfig

    row = _TABLE[architecture]
    roles = _KINDS[row.tokenizer].roles
    special_ids = {
        f"{role}_id": tokenizer.token_to_id(roles[role]) if role in roles else None
        for role in ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token")
        if role in roles or role in ("bos_token", "eos_token")
    }
    settings = {
        "vocab_size": tokenizer.get_vocab_size(),
        "initializer_range": initializer_range,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        **special_ids,
        **row.sizes,
    }
    return AutoConfig.for_model(architecture, **(settings | overrides))


def _model_and_head(config: Any, seed: int) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = _seeded(
        lambda: AutoModelForSequenceClassification.from_config(config).float().eval(), seed
    )
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    return model, [part for part in linear if part.out_features == config.num_labels][-1]
