"""Examples of mappers that run an encoder, or its tokenizer alone."""

import functools

from gpuclassify import (
    DistributedDataClassifier,
    Embedder,
    HeadClassifier,
    TokenCounter,
    ZeroShotClassifier,
)
from gpuclassify.classifiers import FAMILIES
from tests.examples import known_options
from tests.replicas import FAMILIES as REPLICAS
from tests.replicas.heads import save_heads


def published(name):
    """Return the example of a family whose small copy the fixture `checkpoint` writes."""
    own = {"text_template": None} if name in ("topic", "format") else {}

    def example(checkpoint, **options):
        return FAMILIES[name](model=checkpoint(name), **own | options)

    return example


def any_checkpoint(sequence_classifier, **options):
    model = sequence_classifier("modernbert")
    return DistributedDataClassifier(model=model, **{"score_field": "scores", **options})


def relevance(sequence_classifier, **options):
    model = sequence_classifier("bert", num_labels=1)
    return DistributedDataClassifier(model=model, query="which market", **options)


def pairs(sequence_classifier, **options):
    """Reads a column `other`, too."""
    return DistributedDataClassifier(
        model=sequence_classifier("bert", num_labels=1),
        text_field=["other", "text"],
        max_seq_length=40,
        label_field=None,
        **options,
    )


def embedder(sequence_classifier, **options):
    return Embedder(model=sequence_classifier("roberta"), pooling="mean", **options)


@functools.cache
def saved_heads(folder):
    """Written once, as their times are part of a mapper's key."""
    return save_heads(folder, 32)


def heads(sequence_classifier, tmp_path_factory, **options):
    names = {"embedding_field": "e", "labels_field": "{head}s"}
    saved = saved_heads(tmp_path_factory.getbasetemp() / "heads")
    return HeadClassifier(heads=saved, backbone=sequence_classifier("roberta"), **names | options)


def tokens(sequence_classifier, **options):
    """Counts the tokens of whole texts only."""
    return TokenCounter(
        model=sequence_classifier("modernbert"),
        special_tokens=options.pop("max_chars", None) is not None,
        **known_options(TokenCounter, options),
    )


def zero_shot(sequence_classifier, **options):
    model = sequence_classifier("bert", labels=("entailment", "neutral", "contradiction"))
    labels = {"News": "reports of events", "Food": "something to cook"}
    return ZeroShotClassifier(
        model=model, labels=labels, **{"score_field": "scores", "multi_label": True, **options}
    )


EXAMPLES = {
    **{name: published(name) for name in (*REPLICAS, "topic", "format")},
    "checkpoint": any_checkpoint,
    "relevance": relevance,
    "pairs": pairs,
    "embedder": embedder,
    "heads": heads,
    "tokens": tokens,
    "zero-shot": zero_shot,
}
