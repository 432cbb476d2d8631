"""The demo classifier's sizes, tokenizer and untrained backbone."""

import json
from dataclasses import dataclass
from typing import Any

_SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
PAD, CLS, SEP, UNK = range(4)


@dataclass(frozen=True)
class Settings:
    """What decides the trained weights, beside the documents; sized for a minute on two cores."""

    vocabulary: int = 8000
    width: int = 128
    layers: int = 1
    heads: int = 4
    steps: int = 600
    batch_documents: int = 64
    max_tokens: int = 128
    min_kept_share: float = 0.1
    max_kept_share: float = 0.25
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.1


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Train a DeBERTa-v2 tokenizer: Unigram, lower-casing, punctuation apart.

    Parameters
    ----------
    texts : list of str
        The training texts.
    vocabulary : int
        An upper bound on the number of pieces, special tokens included.

    Returns
    -------
    transformers.DebertaV2Tokenizer
        With ``[PAD]`` 0, ``[CLS]`` 1, ``[SEP]`` 2, ``[UNK]`` 3 and ``[MASK]`` last.
    """
    from tokenizers.trainers import UnigramTrainer
    from transformers import DebertaV2Tokenizer

    def tokenizer(pieces: list[tuple[str, float]]) -> Any:
        return DebertaV2Tokenizer(
            vocab=pieces,
            unk_id=UNK,
            do_lower_case=True,
            split_by_punct=True,
            model_max_length=512,
        )

    specials = [(piece, 0.0) for piece in _SPECIAL_TOKENS]
    learner = tokenizer(specials).backend_tokenizer
    trainer = UnigramTrainer(
        vocab_size=vocabulary - 1,
        special_tokens=list(_SPECIAL_TOKENS),
        unk_token="[UNK]",
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    learned = [(piece, score) for piece, score in model["vocab"] if piece not in _SPECIAL_TOKENS]
    mask = ("[MASK]", 0.0)
    return tokenizer([*specials, *(pair for pair in learned if pair != mask), mask])


def build_backbone(vocabulary: int, settings: Settings) -> Any:
    """Build an untrained encoder like the published one, but for the sizes.

    Parameters
    ----------
    vocabulary : int
        Number of tokens.
    settings : Settings
        Width, layers and heads.

    Returns
    -------
    transformers.DebertaV2Model
    """
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=vocabulary,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=4 * settings.width,
        max_position_embeddings=512,
        position_buckets=32,
        max_relative_positions=-1,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        type_vocab_size=0,
        # Leaving tokens out (see training) regularises more, and dropout is slow on a CPU.
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        layer_norm_eps=1e-7,
        pad_token_id=PAD,
    )
    return DebertaV2Model(config)
