"""Tiny random checkpoints with the layouts of published ones, to test without the Hub.

Each directory holds weights, configuration and a trained tokenizer, and loads like a download.
Weights are random; the last layer is fitted so that different texts get clearly different answers.
Read `classifiers.py` first.
"""

from tests.replicas.classifiers import (
    ARCHITECTURES,
    FAMILIES,
    FAMILY_LABELS,
    category_config,
    write_celadon,
    write_checkpoint,
    write_eurofilter,
    write_gte,
    write_sequence_classifier,
    write_token_classifier,
)
from tests.replicas.decoders import SafetyModels, safety_template, write_safety_models
from tests.replicas.texts import sample_texts

__all__ = [
    "ARCHITECTURES",
    "FAMILIES",
    "FAMILY_LABELS",
    "SafetyModels",
    "category_config",
    "safety_template",
    "sample_texts",
    "write_celadon",
    "write_checkpoint",
    "write_eurofilter",
    "write_gte",
    "write_safety_models",
    "write_sequence_classifier",
    "write_token_classifier",
]
