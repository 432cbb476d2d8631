"""Tiny random checkpoints with the layouts of published ones, to test without the Hub.

`write_checkpoint` writes a small copy of one of the published classifiers,
`write_sequence_classifier` any small ``AutoModelForSequenceClassification``. Each directory
holds weights, configuration and a trained tokenizer, and loads like a download. Weights are
random; the last layer is fitted so that different texts get clearly different answers.
`write_gte` writes GTE encoders, for labels or embeddings, as their authors publish them.
`write_safety_models` writes a decoder that answers a safety prompt, adapters to it and a guard.
"""

from tests.replicas.architectures import ARCHITECTURES, write_sequence_classifier
from tests.replicas.checkpoints import write_checkpoint
from tests.replicas.configs import (
    FAMILIES,
    FAMILY_LABELS,
    category_config,
    education_config,
)
from tests.replicas.gte import write_gte
from tests.replicas.safety import SafetyModels, safety_template, write_safety_models
from tests.replicas.texts import sample_texts

__all__ = [
    "ARCHITECTURES",
    "FAMILIES",
    "FAMILY_LABELS",
    "SafetyModels",
    "category_config",
    "education_config",
    "safety_template",
    "sample_texts",
    "write_checkpoint",
    "write_gte",
    "write_safety_models",
    "write_sequence_classifier",
]
