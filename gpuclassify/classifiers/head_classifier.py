"""HeadClassifier: several heads on one embedding."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from gpuclassify import hub
from gpuclassify.checks import check_text, nearest
from gpuclassify.classifiers.embedder import (
    EmbedderOptions,
    EmbeddingHead,
    EmbeddingModel,
    EmbeddingOptions,
)
from gpuclassify.encoder_runner import EncoderRunner
from gpuclassify.frames.texts import Texts
from gpuclassify.heads import Head
from gpuclassify.hub import Identity
from gpuclassify.hub.tensors import WEIGHTS
from gpuclassify.label_heads import HEADS
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, state_width
from gpuclassify.models.embedding_head import (
    CONVERT,
    Backbone,
    HeadCheckpoint,
    load_head,
    read_head,
)
from gpuclassify.options import (
    MULTI_LABEL,
    REGRESSION,
    ClassifierOptions,
    StrPath,
    setting_names,
)
from gpuclassify.pinned_model import PinnedModel
from gpuclassify.runners import NonFiniteOutputError, Outputs, OwnModule
from gpuclassify.signatures import takes
from gpuclassify.text_mapper import TextMapper
from gpuclassify.workers.run_stats import RunStats

HEAD = "{head}"  # stands for a head's name in the names of columns
COLUMN_NAMES = ("label_field", "labels_field", "score_field", "confidence_field")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(EmbeddingOptions):
    """Settings of `HeadClassifier`, beside those of `EmbeddingOptions`.

    Attributes
    ----------
    heads : dict of str to str
        Directory or Hub name (or ``owner/name@revision``) of each head, by name.
    backbone : str
        Hub name or directory of what embeds. Default: the heads' own.
    revision : str
        Branch, tag or commit of `backbone` on the Hub.
    label_field : str
        Output columns of labels, {head} being a head's name; None: none.
    labels_field : str
        Output columns of all labels above `thresholds`, of multi-label heads.
    thresholds : dict of str to float or dict
        By head: the least score of a label in `labels_field`. Default: 0.5.
    score_field : str
        Of scores. Default: {head}_score of a regression, else none.
    confidence_field : str
        Output columns (float32) of the labels' probabilities.
    embedding_field : str
        Output column of the embedding. Default: none.
    filter_by : dict of str to labels
        By head: keep only rows with these labels.
    min_score : dict of str to float or dict
        By head: the least score to keep, or a dict of them by label.
    min_confidence : dict of str to float
        By head: the least probability to keep of its label, 0 to 1.
    keep_field : str
        Write the filters' decision to this column, and drop nothing.
    pooling : {"mean", "cls", "last"}
        Which tokens are averaged. Default: as the model's files say.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_confidence", "min_score")

    model: StrPath = field(default="", init=False)
    heads: Mapping[str, StrPath]
    backbone: StrPath | None = None
    label_field: str | None = f"{HEAD}_pred"
    labels_field: str | None = None
    score_field: str | None = None
    confidence_field: str | None = None
    embedding_field: str | None = None
    filter_by: Mapping[str, Any] | None = None
    min_score: Mapping[str, Any] | None = None
    min_confidence: Mapping[str, float] | None = None
    keep_field: str | None = None
    thresholds: Mapping[str, Any] | None = None
    # The settings of each head, by its name.
    by_head: tuple[tuple[str, ClassifierOptions], ...] = field(default=(), init=False)

    def check(self) -> None:
        """See `ModelOptions.check`."""
        super().check()
        if self.keep_field is not None and not self.filters:
            raise ValueError(
                f"keep_field={self.keep_field!r} has no decision to write: "
                f"pass {' or '.join(self.filter_names)} with it"
            )
        heads = _named_heads(self.heads)
        names_by_head = (*self.filter_names, "thresholds")
        values = {name: self._of_heads(name, heads) for name in names_by_head}
        by_head = {name: self._of_head(name, path, values) for name, path in heads.items()}
        object.__setattr__(self, "heads", tuple(heads.items()))
        object.__setattr__(self, "by_head", tuple(by_head.items()))
        for key in names_by_head:  # as the heads' own options normalise them
            given = [(name, getattr(own, key)) for name, own in by_head.items()]
            given = [(name, value) for name, value in given if value is not None]
            object.__setattr__(self, key, tuple(given) or None)

    def _of_heads(self, key: str, heads: Mapping[str, str]) -> dict[str, Any]:
        """A setting's values by the names of heads."""
        value = getattr(self, key)
        try:
            given = {} if value is None else dict(value)
        except (TypeError, ValueError):
            example = f"{key}={{{next(iter(heads))!r}: {value!r}}}"
            raise TypeError(f"{key}={value!r} names no head: pass {example}") from None
        for name in given:
            if name not in heads:
                near = nearest(str(name), heads)
                raise ValueError(
                    f"{key} names the head {name!r}.{near} Heads are {', '.join(heads)}"
                )
        return given

    def _of_head(
        self, name: str, path: str, values: Mapping[str, Mapping[str, Any]]
    ) -> ClassifierOptions:
        """The settings of one head."""
        columns = {key: getattr(self, key) for key in COLUMN_NAMES}
        own = {key: by_head[name] for key, by_head in values.items() if name in by_head}
        filters = own.keys() & set(self.filter_names)
        return ClassifierOptions(
            model=path,
            cache_dir=self.cache_dir,
            keep_field=self.keep_field if filters else None,
            **{key: column and column.replace(HEAD, name) for key, column in columns.items()},
            **own,
        )


class PinnedHead(PinnedModel):
    """One head, of a directory or the Hub."""

    @property
    def checkpoint(self) -> HeadCheckpoint:
        """What the head declares, read once."""
        return cast(HeadCheckpoint, super().checkpoint)

    @property
    def repositories(self) -> list[str]:
        """The head's, without a revision."""
        return [self.options.model.partition("@")[0]]

    @functools.cached_property
    def identity(self) -> Identity:
        """The head pinned to a commit or to a digest of its directory; see `PinnedModel`."""
        name, cache_dir = self.options.model, self.options.cache_dir
        if Path(name).is_file():
            raise CheckpointError(f"{name} is a file, and a head is a directory: {CONVERT}")
        if self._checkpoint is not None:
            return self._checkpoint.identity
        revision = None
        if not hub.is_directory_name(name):
            name, _, revision = name.partition("@")
        return hub.resolve(name, revision or None, cache_dir=cache_dir)

    def read(self) -> HeadCheckpoint:
        """Read what the head declares; no weights."""
        return read_head(self.identity, cache_dir=self.options.cache_dir)


class HeadsModel(PinnedModel):
    """A model that embeds, and the heads on its embeddings."""

    def __init__(self, options: HeadOptions, **parts: Any) -> None:
        super().__init__(options, **parts)
        self.heads = {name: PinnedHead(own) for name, own in options.by_head}

    @functools.cached_property
    def backbone(self) -> EmbeddingModel:
        """The model that embeds, with the settings that were given or that the heads agree on."""
        heads = {name: head.checkpoint for name, head in self.heads.items()}
        return EmbeddingModel(embedder_options(self.options, heads))

    @property
    def repositories(self) -> list[str]:
        """The backbone and the heads, as far as they are named."""
        is_known = "backbone" in vars(self)
        backbone = self.backbone.options.model if is_known else self.options.backbone
        heads = [name for head in self.heads.values() for name in head.repositories]
        return [*([backbone] if backbone else []), *heads]

    @property
    def identity(self) -> Identity:
        """The backbone's."""
        return self.backbone.identity

    @property
    def identities(self) -> list[Identity]:
        """The backbone's, then the heads'."""
        return [*super().identities, *(head.identity for head in self.heads.values())]

    @property
    def prompt(self) -> str:
        """What stands before every text that the backbone reads."""
        return self.backbone.prompt

    @property
    def weights_files(self) -> dict[Identity, str]:
        """The weights of the backbone and of the heads."""
        heads = {head.identity: WEIGHTS for head in self.heads.values()}
        return super().weights_files | heads

    def read(self) -> Checkpoint:
        """Read what the backbone declares; no weights."""
        return self.backbone.checkpoint

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless all heads read embeddings of the backbone's width."""
        backbone, width = checkpoint.identity, state_width(checkpoint.sizes)
        for name, head in self.heads.items():
            if width is not None:  # else the first embedding tells
                check_width(name, head.checkpoint, width, backbone.name)
            if head.checkpoint.backbone is not None:
                _warn_of_other_model(name, head.checkpoint.backbone.model, backbone)

    def describe(self) -> dict[str, Any]:
        """The backbone's settings, and the commits or digests of backbone and heads."""
        options = self.backbone.options
        return {
            **super().describe(),
            "backbone": {own.name: getattr(options, own.name) for own in fields(Backbone)},
            "heads": {
                name: {"model": head.identity.name, "revision": head.identity.revision}
                for name, head in self.heads.items()
            },
        }

    def key(self) -> Any:
        """What tells the backbone and the heads from all others."""
        return (super().key(), *(head.key() for head in self.heads.values()))


class HeadRunner(EncoderRunner):
    """Embeds every text once and runs the heads on it: outputs are the embedding, then theirs."""

    def __init__(self, options: Any, model: Any, own_module: OwnModule | None) -> None:
        super().__init__(model.backbone.options, model.backbone, own_module)
        self.heads: dict[str, PinnedHead] = model.heads
        self.embedding = EmbeddingHead("HeadClassifier", self.options, self.model)

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Outputs of distinct texts; see `Runner.run`. Windows are aggregated before the heads."""
        outputs = super().run(texts, stats, name_text)
        embeddings = outputs.by_text(self.embedding.activate)
        embeddings = self.embedding.activate(embeddings)  # a mean of windows is shorter than they
        values = [embeddings]
        for name, head in self.heads.items():
            check_width(name, head.checkpoint, embeddings.shape[1], self.options.model)
            loaded = _loaded_head(head.checkpoint, self.options.cache_dir)
            values.append(loaded.apply(embeddings))
            if len(failed := np.flatnonzero(~np.isfinite(values[-1]).all(axis=1))):
                raise NonFiniteOutputError(
                    f"head {name!r} gives {values[-1][failed[0]].tolist()} for "
                    f"{name_text(int(failed[0]))}: check its weights, or remove the row"
                )
        return Outputs(np.hstack(values), np.arange(len(embeddings)), outputs.read)


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
        models = self.model.heads
        width = end = next(iter(models.values())).checkpoint.widths[0]
        for name, options in self.options.by_head:
            checkpoint = models[name].checkpoint
            start, end = end, end + checkpoint.widths[-1]
            options = _with_own_columns(options, name, checkpoint.problem_type)
            owner, kind = f"the head {name!r}", HEADS[checkpoint.problem_type]
            made.append(kind(owner, options, models[name], slice(start, end)))
        if self.options.embedding_field is not None:
            backbone = self.model.backbone
            owner = type(self).__qualname__
            made.append(EmbeddingHead(owner, backbone.options, backbone, slice(width)))
        return tuple(made)


def embedder_options(given: HeadOptions, heads: Mapping[str, HeadCheckpoint]) -> EmbedderOptions:
    """The backbone's settings: those given, else those that the heads were trained with.

    Raises
    ------
    CheckpointError
        No backbone is known, or heads were trained with different ones.
    """
    shared = set(setting_names(EmbedderOptions)) & set(setting_names(given))
    settings = {name: getattr(given, name) for name in shared} | {"model": given.backbone}
    known = {name: head.backbone for name, head in heads.items() if head.backbone is not None}
    models = {backbone.model for backbone in known.values()}
    for own in fields(Backbone):
        name = own.name
        if settings[name] is not None or (name == "prompt" and given.prompt_name is not None):
            continue
        if name == "revision" and models != {settings["model"]}:
            continue  # it is not that of another place
        settings[name] = _agreed(name, known)
    if settings["model"] is None:
        raise CheckpointError(
            f"the heads {', '.join(heads)} do not say what model embeds for them: pass backbone="
        )
    if settings["embedding_field"] is None:
        del settings["embedding_field"]
    return EmbedderOptions(**settings)


def check_width(name: str, head: HeadCheckpoint, width: int, backbone: str) -> None:
    """Raise CheckpointError unless the head reads embeddings of `width` numbers."""
    if head.widths[0] != width:
        raise CheckpointError(
            f"head {name!r} ({head.identity.name}) reads embeddings of {head.widths[0]} numbers, "
            f"and those of {backbone} have {width}: pass the backbone= that it was trained on"
        )


def _warn_of_other_model(name: str, trained_on: str, backbone: Identity) -> None:
    """Warn if a head was trained on another model of the Hub; a directory may be a copy of it."""
    if trained_on == backbone.name or backbone.is_directory or hub.is_directory_name(trained_on):
        return
    message = f"head {name!r} was trained on embeddings of {trained_on}, not of {backbone.name}"
    warnings.warn(message, UserWarning, stacklevel=2)


def _agreed(setting: str, backbones: Mapping[str, Backbone]) -> Any:
    """The value that all heads have for a setting of their backbone; None if none is known."""
    found = {name: getattr(backbone, setting) for name, backbone in backbones.items()}
    if setting == "revision":  # which need not be known
        found = {name: value for name, value in found.items() if value is not None}
    if not found:
        return None
    (first, value), *others = found.items()
    for name, other in others:
        if other != value:
            argument = "backbone" if setting == "model" else setting
            raise CheckpointError(
                f"the heads {first!r} and {name!r} were trained on other embeddings: {setting} is "
                f"{value!r} of one and {other!r} of the other. Run them in two HeadClassifiers, or "
                f"pass {argument}= for both"
            )
    return value


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


def _named_heads(heads: Any) -> dict[str, str]:
    """Paths of heads by their names.

    Raises
    ------
    TypeError, ValueError
        They are no mapping of names to paths, or there are none.
    """
    example = 'heads={"edu": "heads/edu"}'
    try:
        named = {name: os.fspath(path) for name, path in dict(heads).items()}
    except (TypeError, ValueError) as err:
        raise TypeError(f"heads={heads!r}: pass names and paths, such as {example}") from err
    if not named:
        raise ValueError(f"no heads: pass at least one, such as {example}")
    for name, path in named.items():
        check_text("the name of a head", name, "a text, of which columns' names are made")
        check_text(f"heads[{name!r}]", path, "a directory or a Hub name")
    return named


@functools.lru_cache(maxsize=64)
def _loaded_head(checkpoint: HeadCheckpoint, cache_dir: str | None) -> Any:
    """The head in memory, once a process."""
    return load_head(checkpoint, cache_dir=cache_dir)
