"""A BERT's pooler and classifier as the layers of a head, and the whole classifier as a checkpoint.

What FineWeb-Edu trains: everything but the pooler and the classifier is frozen, so that the state
of ``[CLS]``, computed once, is all that training reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.classifiers.embedder import Embedder, sentence_model
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.embedding_head import DenseHead
from gpuclassify.training.fitting import Examples, Recipe, layers_of, train_network
from gpuclassify.training.tasks import Layer, Task, grades_of

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification

_LAYERS = ("bert.pooler.dense", "classifier")


def pooler_embedder(backbone: Embedder | str) -> Embedder:
    """An embedder of the state of ``[CLS]``, as a BERT's pooler reads it.

    Raises
    ------
    CheckpointError
        The model is no BERT.
    ValueError
        The embedder given pools or changes texts in another way.
    """
    settings: dict[str, Any] = {"pooling": "cls", "normalize": False, "prompt": ""}
    embedder = backbone if isinstance(backbone, Embedder) else Embedder(model=backbone, **settings)
    checkpoint = embedder.model.checkpoint
    sizes, sentence = checkpoint.sizes, sentence_model(checkpoint)
    if sizes.get("model_type") != "bert":
        raise CheckpointError(
            f"{checkpoint.identity.name} is a {sizes.get('model_type')} model, and "
            'kind="pooler" trains the pooler of a BERT: take kind="mlp"'
        )
    if not isinstance(backbone, Embedder):
        length = sizes["max_position_embeddings"]
        return Embedder(model=backbone, max_seq_length=length, **settings)
    if sentence.pooling != "cls" or sentence.is_normalized or embedder.model.prompt:
        raise ValueError(
            'a pooler reads the state of [CLS] as it is: pass Embedder(pooling="cls", '
            'normalize=False, prompt="", ...), or the name of the model alone'
        )
    return embedder


def fit_pooler(
    task: Task,
    train: Examples,
    validation: Examples,
    record: dict[str, Any],
    embedder: Embedder,
    outputs: Sequence[str],
    recipe: Recipe,
    seed: int,
) -> list[Layer]:
    """The model's own pooler and a new classifier, trained; grades by the macro-F1 of their scores.

    The best epoch is that of the highest macro-F1 of rounded scores where labels are grades, else
    of the least loss.
    """
    import torch
    from sklearn.metrics import f1_score
    from torch import nn

    grades = grades_of(train.targets) if task.name == "regression" else None
    lowest, highest = grades or (0, 0)

    def macro_f1(scores: np.ndarray, targets: np.ndarray) -> float:
        rounded = np.clip(np.rint(scores[:, 0]), lowest, highest)
        return float(f1_score(np.rint(targets), rounded, average="macro"))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _classifier(embedder, task.problem_type, outputs)
        network = nn.Sequential(model.bert.pooler.dense, nn.Tanh(), model.classifier)
        quality = None if grades is None else macro_f1
        train_network(network, task, train, validation, recipe, record, quality)
    return layers_of(network)


def save_classifier(network: DenseHead, embedder: Embedder, folder: Path) -> None:
    """Write the whole classifier as a BertForSequenceClassification, and the tokenizer."""
    import torch

    from gpuclassify.models.loading import quiet_transformers

    model = _classifier(embedder, network.problem_type, network.labels)
    tensors = {
        f"{layer}.{kind}": torch.from_numpy(values)
        for layer, pair in zip(_LAYERS, network.layers, strict=True)
        for kind, values in zip(("weight", "bias"), pair, strict=True)
    }
    unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    assert not unknown, unknown
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer = embedder.model.new_tokenizer()
    tokenizer.model_max_length = embedder.options.max_seq_length or tokenizer.model_max_length
    tokenizer.save_pretrained(folder)


def read_layers(folder: Path) -> list[Layer]:
    """Pooler and classifier of a BertForSequenceClassification."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "np") as tensors:
        return [
            (tensors.get_tensor(f"{layer}.weight"), tensors.get_tensor(f"{layer}.bias"))
            for layer in _LAYERS
        ]


def _classifier(
    embedder: Embedder, problem_type: str, labels: Sequence[str]
) -> BertForSequenceClassification:
    """The model with the pooler and the classifier that it has, random ones for others, float32."""
    import torch
    from transformers import BertForSequenceClassification

    from gpuclassify.models.loading import building_lock, quiet_transformers

    directory = hub.download(embedder.model.identity, cache_dir=embedder.options.cache_dir)
    with building_lock, quiet_transformers():
        return BertForSequenceClassification.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            problem_type=problem_type,
            id2label=dict(enumerate(labels)),
            label2id={label: place for place, label in enumerate(labels)},
            hidden_dropout_prob=0.0,
            classifier_dropout=0.0,
        )
