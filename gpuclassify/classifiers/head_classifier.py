"""HeadClassifier: run several trained heads (small classifier networks) on one embedding."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuclassify import hub
from gpuclassify.classifiers.embedder import EmbeddingHead, EmbeddingModel, EmbeddingOptions
from gpuclassify.frames import Texts
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.mapping.heads import Head
from gpuclassify.mapping.label_heads import HEADS
from gpuclassify.mapping.pinned_model import PIN, PinnedModel
from gpuclassify.mapping.runners import EncoderRunner, NonFiniteOutputError, Outputs
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.mapping.token_lengths import TokenLengths
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.models.head_network import (
    CONVERT,
    Backbone,
    HeadCheckpoint,
    HeadNetwork,
    load_head,
    read_head,
)
from gpuclassify.settings.checks import check_names, check_text, setting_names, warn_once
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import (
    MODEL,
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ClassifierOptions,
    ProblemType,
    ScoreFormat,
    StrPath,
    check_decision,
)
from gpuclassify.settings.paths import is_file
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats

HEAD = "{head}"  # placeholder of a head's name in names of columns
_COLUMN_NAMES = ("label_field", "labels_field", "score_field", "confidence_field")


@declared
class HeadClassifierOptions(EmbeddingOptions):
    """Settings of `HeadClassifier`, in addition to `EmbeddingOptions`.

    Attributes
    ----------
    heads : dict of str to str
        Directory or Hub name (or ``owner/name@revision``) of each head, by name.
    backbone : str
        Name or directory of the embedding model. Default: the heads'.
    revision : str
        Branch, tag or commit of `backbone` on the Hub.
    label_field : str
        Output columns of labels, {head} being a head's name; or None.
    labels_field : str
        Output columns of all labels that reach `thresholds`, of multi-label heads.
    thresholds : dict of str to float or dict
        Minimum score for `labels_field` by head, or head and label; 0.5.
    score_field : str
        Output columns of scores. Default: {head}_score for a regression, else none.
    score_format : {"list", "struct"}
        Probabilities as a list in id order, or a struct by label.
    confidence_field : str
        Output columns (float32) of the label's probability.
    filter_by : dict of str to labels
        Labels of the rows to keep, by head; all heads must pass.
    min_score : dict of str to float or dict
        Minimum score of rows to keep, by head: a number for a regression, else by label.
    min_confidence : dict of str to float
        Minimum probability of the label to keep a row, by head.
    keep_field : str
        Write the filters' decision to this column, and drop nothing.
    labels : dict of str to list of str
        Labels of each head in id order, for a client without the models.
    problem_type : dict of str to str
        Problem type by head, together with `labels`. Default: a single label per text.
    pooling : {"mean", "cls", "last"}
        Mean of a text's tokens, or its first or last token. Default: the heads', else from the
        model's files.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_confidence", "min_score")
    names_by_head: ClassVar[tuple[str, ...]] = (
        *filter_names,
        *("thresholds", "labels", "problem_type"),
    )

    model: StrPath = field(default="", init=False)
    heads: Mapping[str, StrPath] = setting(
        group=MODEL,
        metavar="NAME=PATH",
        form="NAME=PATH, such as edu=heads/edu",
        help="Directory or Hub name of a head on embeddings, and the name of its columns; "
        "repeatable.",
    )
    backbone: StrPath | None = setting(
        default=None,
        group=MODEL,
        metavar="NAME",
        help="Hub name or directory of the model that embeds for heads. Default: the one that they "
        "were trained on.",
    )
    label_field: str | None = f"{HEAD}_pred"
    labels_field: str | None = None
    score_field: str | None = None
    score_format: ScoreFormat = "list"
    confidence_field: str | None = None
    filter_by: Mapping[str, str | Collection[str]] | None = setting(
        default=None, form="HEAD=LABEL, such as topic=News"
    )
    min_score: Mapping[str, float | Mapping[str, float]] | None = None
    min_confidence: Mapping[str, float] | None = None
    keep_field: str | None = None
    thresholds: Mapping[str, float | Mapping[str, float]] | None = None
    labels: Mapping[str, Sequence[str]] | None = None
    problem_type: Mapping[str, ProblemType] | None = None
    # Settings of the heads, by name.
    by_head: tuple[tuple[str, ClassifierOptions], ...] = field(default=(), init=False)

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other; normalize them.

        Converts `heads` and settings by head to (name, value) pairs, or None; sets `by_head`.
        """
        super().check_together()
        check_decision(self)
        heads = _named_heads(self.heads)
        by_setting = {key: self._values_by_head(key, heads) for key in self.names_by_head}
        by_head = {name: self._head_options(name, path, by_setting) for name, path in heads.items()}
        object.__setattr__(self, "heads", tuple(heads.items()))
        object.__setattr__(self, "by_head", tuple(by_head.items()))
        for key, of in by_setting.items():  # normalized by the options of each head
            values = tuple((name, getattr(by_head[name], key)) for name in heads if name in of)
            object.__setattr__(self, key, values or None)

    @property
    def plans_without_model(self) -> bool:
        """Whether labels of all heads are passed, so that the client can plan without models."""
        return all(options.plans_without_model for _, options in self.by_head)

    def _values_by_head(self, key: str, heads: Mapping[str, str]) -> dict[str, Any]:
        """Return the setting `key`, such as "min_score", as a dict by head; {} if it is None."""
        value = getattr(self, key)
        try:
            by_name = {} if value is None else dict(value)
        except (TypeError, ValueError):
            example = f"{key}={{{next(iter(heads))!r}: {value!r}}}"
            raise TypeError(f"{key}={value!r} names no head: pass {example}") from None
        check_names(f"{key} is by head, and there is", "head", by_name, heads)
        return {name: setting for name, setting in by_name.items() if setting is not None}

    def _head_options(
        self, name: str, path: str, by_setting: Mapping[str, Mapping[str, Any]]
    ) -> ClassifierOptions:
        """Return the settings for running one head, as a classifier with columns of its own."""
        settings = {key: of[name] for key, of in by_setting.items() if name in of}
        if "labels" in settings:
            settings.setdefault("problem_type", SINGLE_LABEL)
        columns = {key: getattr(self, key) for key in _COLUMN_NAMES}
        model, revision = path, ""
        if "@" in path and not hub.is_directory_name(path):
            model, _, revision = path.partition("@")
        return ClassifierOptions(
            model=model,
            revision=revision or None,
            cache_dir=self.cache_dir,
            score_format=self.score_format,
            keep_field=self.keep_field if settings.keys() & {*self.filter_names} else None,
            **{key: column and column.replace(HEAD, name) for key, column in columns.items()},
            **settings,
        )


def _named_heads(heads: Any) -> dict[str, str]:
    """Convert the setting `heads` to a dict of paths by name of head."""
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


class HeadModel(PinnedModel):
    """Pinned head (a small classifier network) in a directory or on the Hub."""

    checkpoint: HeadCheckpoint

    def read(self) -> HeadCheckpoint:
        """Return the head's description, read from its ``config.json`` without weights."""
        name = self.options.model
        if is_file(name):
            raise CheckpointError(f"{name} is a file, and a head is a directory: {CONVERT}")
        return read_head(self.identity, cache_dir=self.options.cache_dir)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if the settings have a `problem_type`, and the head has another."""
        expected, kind = self.options.problem_type, checkpoint.problem_type
        if expected not in (None, kind):
            raise CheckpointError(
                f"{self.options.model} is a {kind} head, and by the settings a {expected} one: "
                f"pass problem_type={{NAME: {kind!r}}}, NAME being what heads= calls it"
            )


class HeadsModel(PinnedModel):
    """Pinned embedding model (the backbone), and the heads that read its embeddings."""

    def __init__(self, options: HeadClassifierOptions, **parts: Any) -> None:
        super().__init__(options, **parts)
        self.heads = {name: HeadModel(settings) for name, settings in options.by_head}

    @functools.cached_property
    def backbone(self) -> EmbeddingModel:
        """Pinned embedding model, whose embeddings all heads read."""
        heads = {name: head.checkpoint for name, head in self.heads.items()}
        return EmbeddingModel(backbone_options(self.options, heads))

    @property
    def repositories(self) -> list[str]:
        """Hub names or directories of the backbone, if it is known yet, and of the heads."""
        is_known = "backbone" in vars(self)
        backbone = self.backbone.options.model if is_known else self.options.backbone
        heads = [name for head in self.heads.values() for name in head.repositories]
        return [*([backbone] if backbone else []), *heads]

    @property
    def unpinned(self) -> str:
        """Argument that would pin the backbone or a head, for messages; "" if all are pinned."""
        backbone, revision = self.options.backbone, self.options.revision
        if backbone is None or not hub.is_pinned(backbone, revision):
            return f"backbone= and {PIN}"
        open_heads = [head.options.model for head in self.heads.values() if head.unpinned]
        return f"{open_heads[0]}@COMMIT, a commit of 40 hex digits, in heads=" if open_heads else ""

    @property
    def identity(self) -> Identity:
        """Name of the backbone with its commit, or with a digest of its directory."""
        return self.backbone.identity

    @property
    def identities(self) -> list[Identity]:
        """Pinned repositories or directories of the backbone, then of the heads."""
        return [*super().identities, *(head.identity for head in self.heads.values())]

    @property
    def prompt(self) -> str:
        """Text that the backbone expects before every text; "" for none."""
        return self.backbone.prompt

    @property
    def weights_files(self) -> dict[Identity, str]:
        """Names of the weight files of backbone and heads, by pinned repository or directory."""
        heads = {head.identity: WEIGHTS for head in self.heads.values()}
        return super().weights_files | heads

    def read(self) -> Checkpoint:
        """Return the backbone's description, read from its configuration without weights."""
        return self.backbone.checkpoint

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a head reads embeddings of another width than the backbone's.

        Warns if a head was trained on another model of the Hub.
        """
        backbone, width = checkpoint.identity, checkpoint.embedding_width
        for name, head in self.heads.items():
            if width is not None:  # otherwise checked with the first embedding
                check_width(name, head.checkpoint, width, backbone.name)
            trained_on = head.checkpoint.backbone
            if trained_on is None or trained_on.model == backbone.name:
                continue
            # A directory may be a copy of the model.
            if not (backbone.is_directory or hub.is_directory_name(trained_on.model)):
                was = f"head {name!r} was trained on embeddings of {trained_on.model}"
                warn_once(f"{was}, not of {backbone.name}")

    def describe(self) -> dict[str, Any]:
        """Return the pinned versions of backbone and heads, for reports."""
        options = self.backbone.options
        return {
            **super().describe(),
            "backbone": {
                setting.name: getattr(options, setting.name) for setting in fields(Backbone)
            },
            "heads": {
                name: {"model": head.identity.name, "revision": head.identity.revision}
                for name, head in self.heads.items()
            },
        }

    def key(self) -> Any:
        """Return the part of Dask's task keys that identifies backbone and heads."""
        heads = () if self._is_out_of_reach else self.heads.values()
        return (super().key(), *(head.key() for head in heads))


def backbone_options(
    options: HeadClassifierOptions, heads: Mapping[str, HeadCheckpoint]
) -> EmbeddingOptions:
    """Return the backbone's settings: passed values, else the values that the heads share.

    The heads' revision applies only to the backbone that they name, and their prompt only without a
    `prompt_name`. Raises CheckpointError if heads differ in a setting that is needed, or no
    backbone is named.
    """
    settings = {name: getattr(options, name) for name in setting_names(EmbeddingOptions)}
    settings["model"] = options.backbone
    known = {name: head.backbone for name, head in heads.items() if head.backbone is not None}
    models = {backbone.model for backbone in known.values()}
    for own in fields(Backbone):
        name = own.name
        if settings[name] is not None or (name == "prompt" and options.prompt_name is not None):
            continue
        if name == "revision" and models != {settings["model"]}:
            continue  # revisions of another repository do not apply
        settings[name] = _agreed(name, known)
    if settings["model"] is None:
        raise CheckpointError(
            f"the heads {', '.join(heads)} do not say what model embeds for them: pass backbone="
        )
    return EmbeddingOptions(**settings)


def _agreed(setting: str, backbones: Mapping[str, Backbone]) -> Any:
    """Return the value of `setting` that all backbones share; raise an error if they differ."""
    values = {name: getattr(backbone, setting) for name, backbone in backbones.items()}
    if setting == "revision":  # heads may lack a revision
        values = {name: value for name, value in values.items() if value is not None}
    if not values:
        return None
    (first, value), *others = values.items()
    for name, other in others:
        if other != value:
            argument = "backbone" if setting == "model" else setting
            raise CheckpointError(
                f"the heads {first!r} and {name!r} were trained on other embeddings: {setting} is "
                f"{value!r} of one and {other!r} of the other. Run them in two HeadClassifiers, or "
                f"pass {argument}= for both"
            )
    return value


def check_width(name: str, head: HeadCheckpoint, width: int, backbone: str) -> None:
    """Raise CheckpointError unless the head called `name` reads embeddings of `width` numbers."""
    if head.widths[0] != width:
        raise CheckpointError(
            f"head {name!r} ({head.identity.name}) reads embeddings of {head.widths[0]} numbers, "
            f"and those of {backbone} have {width}: pass the backbone= that it was trained on"
        )


@functools.lru_cache(maxsize=64)
def _load_head_once(checkpoint: HeadCheckpoint, cache_dir: str | None) -> HeadNetwork:
    return load_head(checkpoint, cache_dir=cache_dir)


class HeadsRunner(EncoderRunner):
    """Runner that embeds every text once, and runs all heads on the embedding.

    Outputs have one row per text: the concatenated outputs of all heads, then the embedding, which
    is normalized if so set, but not truncated.
    """

    model: HeadsModel

    @functools.cached_property
    def backbone(self) -> EncoderRunner:
        """Runner of the embedding model, without the heads."""
        model = self.model.backbone
        return EncoderRunner(model.options, model, self.own_module)

    @property
    def encoder(self) -> EncoderRunner | None:
        """Embedding model's runner if other mappers' networks may share its layers, or None."""
        return self.backbone.encoder

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Embed distinct texts, and compute the outputs of all heads from the embeddings.

        Embeddings of a long text's windows are aggregated to one before the heads run.
        """
        outputs = self.backbone.run(texts, stats, name_text)
        head = EmbeddingHead("HeadClassifier", self.options, self.model)
        # Normalize again, because the mean of several windows is shorter.
        whole = head.activate(outputs.by_text(head.activate))
        values, embeddings = [], head.cut(whole)
        for name, head_model in self.model.heads.items():
            check_width(name, head_model.checkpoint, embeddings.shape[1], self.model.identity.name)
            loaded = _load_head_once(head_model.checkpoint, self.options.cache_dir)
            values.append(loaded.apply(embeddings))
            if len(failed := np.flatnonzero(~np.isfinite(values[-1]).all(axis=1))):
                raise NonFiniteOutputError(
                    f"head {name!r} gives {values[-1][failed[0]].tolist()} for "
                    f"{name_text(int(failed[0]))}: check its weights, or remove the row"
                )
        values.append(whole)
        return Outputs(np.hstack(values), outputs.text_windows, outputs.seen_share)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Return the numbers of tokens and windows of texts, as the embedding model reads them."""
        return self.backbone.token_lengths(texts)


class HeadClassifier(TextMapper[HeadClassifierOptions]):
    """Classifier with several heads on one embedding of every text.

    A head is a directory or a Hub repository in the format of ``gpuclassify
    convert``; its ``config.json`` defines its outputs. A head "a" writes the
    most probable label to ``a_pred``, and the probabilities of all labels with
    `score_field`; a regression writes only ``a_score``. Defaults of `backbone`,
    `revision`, `pooling`, `normalize`, `prompt`, `max_seq_length` and
    `truncate_dim` are the heads' training settings; heads that differ in one
    are refused. With ``long_text="windows"`` heads read aggregated embeddings.

    Examples
    --------
    >>> heads = {"edu": "heads/edu", "topic": "heads/topic"}
    >>> classifier = HeadClassifier(heads=heads, min_score={"edu": 3})
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    Options = HeadClassifierOptions
    model_type = HeadsModel
    runner_type = HeadsRunner
    purpose = "custom heads on one embedding"
    licence = "the model's and the heads'"
    model: HeadsModel

    if TYPE_CHECKING:

        @takes(HeadClassifierOptions)
        def __init__(self, **settings: object) -> None: ...

    def make_heads(self) -> tuple[Head, ...]:
        """Return a column converter for each trained head, then one for the embedding if kept."""
        made: list[Head] = []
        start = 0
        for name, options in self.options.by_head:
            model = self.model.heads[name]
            problem_type = options.problem_type or model.checkpoint.problem_type
            stop = start + len(options.labels or model.checkpoint.labels)
            if problem_type != MULTI_LABEL:
                options = replace(options, labels_field=None)
            if problem_type == REGRESSION:
                options = replace(
                    options,
                    score_field=options.score_field or f"{name}_score",
                    label_field=None,
                    confidence_field=None,
                    score_format="list",
                )
            head_type, outputs = HEADS[problem_type], slice(start, stop)
            made.append(head_type(f"the head {name!r}", options, model, outputs))
            start = stop
        if self.options.embedding_field is not None:
            parts = (type(self).__qualname__, self.options, self.model)
            made.append(EmbeddingHead(*parts, slice(start, None)))
        return tuple(made)
