"""HeadClassifier: several heads on one embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.classifiers.embedder import EmbeddingHead
from gpuclassify.classifiers.head_model import HeadsModel, check_width
from gpuclassify.classifiers.head_options import HeadOptions
from gpuclassify.frames import Texts
from gpuclassify.mapping.heads import HEADS, Head
from gpuclassify.mapping.runners import EncoderRunner, NonFiniteOutputError, Outputs, TokenLengths
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.trained_head import TrainedHead, TrainedHeadCheckpoint, load_head
from gpuclassify.settings.options import MULTI_LABEL, REGRESSION, ClassifierOptions
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats


class HeadRunner(EncoderRunner):
    """Embeds every text once and runs the heads on it: outputs are theirs, then the embedding."""

    model: HeadsModel

    @functools.cached_property
    def backbone(self) -> EncoderRunner:
        """Embeds, with the settings that were given or that the heads agree on."""
        model = self.model.backbone
        return EncoderRunner(model.options, model, self.own_module)

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Outputs of distinct texts; see `Runner.run`. Windows are aggregated before the heads."""
        outputs = self.backbone.run(texts, stats, name_text)
        activate = EmbeddingHead("HeadClassifier", self.options, self.model).activate
        # Again, because a mean of windows is shorter than they are.
        embeddings = activate(outputs.by_text(activate))
        values = []
        for name, head in self.model.heads.items():
            check_width(name, head.checkpoint, embeddings.shape[1], self.model.identity.name)
            loaded = _loaded_head(head.checkpoint, self.options.cache_dir)
            values.append(loaded.apply(embeddings))
            if len(failed := np.flatnonzero(~np.isfinite(values[-1]).all(axis=1))):
                raise NonFiniteOutputError(
                    f"head {name!r} gives {values[-1][failed[0]].tolist()} for "
                    f"{name_text(int(failed[0]))}: check its weights, or remove the row"
                )
        values.append(embeddings)
        return Outputs(np.hstack(values), np.arange(len(embeddings)), outputs.read)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """How long texts are for the backbone; see `Runner.token_lengths`."""
        return self.backbone.token_lengths(texts)


class HeadClassifier(TextMapper):
    """Several heads on the embedding of every text, which is computed once.

    A head is a directory or a Hub repository as `gpuclassify convert` writes it;
    its ``config.json`` says what its outputs mean. A head called "a" gives the
    most probable label, ``a_pred``, and all labels' probabilities if there is a
    `score_field`; or, of a regression, ``a_score``. What heads say of how they
    were trained is the default of `backbone`, `revision`, `pooling`,
    `normalize`, `prompt` and `max_seq_length`; heads that differ are refused.
    With ``long_text="windows"`` they read the aggregated embedding.

    Examples
    --------
    >>> heads = {"edu": "heads/edu", "topic": "heads/topic"}
    >>> classifier = HeadClassifier(heads=heads, min_score={"edu": 3})
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    Options = HeadOptions
    model_type = HeadsModel
    runner_type = HeadRunner
    purpose = "heads of one's own on one embedding"
    licence = "the model's and the heads'"
    model: HeadsModel

    if TYPE_CHECKING:

        @takes(HeadOptions)
        def __init__(self, **settings: Any) -> None: ...

    def make_heads(self) -> tuple[Head, ...]:
        """The heads in their order, and the embedding's column if it is to be kept."""
        made: list[Head] = []
        start = 0
        for name, options in self.options.by_head:
            model = self.model.heads[name]
            problem_type = options.problem_type or model.checkpoint.problem_type
            stop = start + len(options.labels or model.checkpoint.labels)
            options = _with_own_columns(options, name, problem_type)
            made.append(
                HEADS[problem_type](f"the head {name!r}", options, model, slice(start, stop))
            )
            start = stop
        if self.options.embedding_field is not None:
            owner = type(self).__qualname__
            made.append(EmbeddingHead(owner, self.options, self.model, slice(start, None)))
        return tuple(made)


def _with_own_columns(
    options: ClassifierOptions, name: str, problem_type: str
) -> ClassifierOptions:
    """A head's settings with the columns that its kind has."""
    if problem_type != MULTI_LABEL:
        options = replace(options, labels_field=None)
    if problem_type != REGRESSION:
        return options
    score_field = options.score_field or f"{name}_score"
    return replace(options, label_field=None, confidence_field=None, score_field=score_field)


@functools.lru_cache(maxsize=64)
def _loaded_head(checkpoint: TrainedHeadCheckpoint, cache_dir: str | None) -> TrainedHead:
    """The head in memory, once a process."""
    return load_head(checkpoint, cache_dir=cache_dir)
