"""The published tokenizers' algorithms, special tokens and classes, as a table."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenizerKind:
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
KINDS = {
    "deberta-v2": TokenizerKind(
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
    "bert": TokenizerKind(
        "wordpiece",
        "BertTokenizer",
        _BERT_ROLES,
        # Unused ids as in the published vocabulary, so that [UNK] is 100 and [CLS] is 101.
        first=("[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        settings={"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True},
    ),
    "roberta": TokenizerKind(
        "byte-bpe",
        "RobertaTokenizer",
        _ROBERTA_ROLES,
        first=_ROBERTA_FIRST,
        last=("<mask>",),
        settings={"add_prefix_space": False, **_NO_SEGMENTS},
    ),
    "xlm-roberta": TokenizerKind(
        "unigram",
        "XLMRobertaTokenizer",
        _ROBERTA_ROLES,
        first=_ROBERTA_FIRST,
        last=("<mask>",),
        settings=_NO_SEGMENTS,
    ),
    "albert": TokenizerKind(
        "unigram",
        "AlbertTokenizer",
        _BERT_ROLES | _roles(bos="[CLS]", eos="[SEP]", pad="<pad>", unk="<unk>"),
        first=("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        settings={"do_lower_case": True, "keep_accents": False},
    ),
    "gpt2": TokenizerKind(
        "byte-bpe",
        "GPT2Tokenizer",
        _roles(**dict.fromkeys(("bos", "eos", "pad", "unk"), "<|endoftext|>")),
        last=("<|endoftext|>",),
        template="$A",
        settings={"add_prefix_space": False, **_NO_SEGMENTS},
    ),
    "modernbert": TokenizerKind(
        "byte-bpe",
        "PreTrainedTokenizerFast",
        _BERT_ROLES,
        last=("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"),
        settings=_NO_SEGMENTS,
    ),
    "llama": TokenizerKind(
        "byte-bpe",
        "PreTrainedTokenizerFast",
        _roles(bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|pad|>"),
        last=("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"),
        template="{bos_token} $A",
        settings=_NO_SEGMENTS,
    ),
    "llama-guard": TokenizerKind(
        "piece-bpe",
        "LlamaTokenizer",
        _roles(bos="<s>", eos="</s>", unk="<unk>"),
        first=("<unk>", "<s>", "</s>"),
        template="{bos_token} $A",
        settings={"add_bos_token": True, "add_eos_token": False, "legacy": False},
    ),
}
