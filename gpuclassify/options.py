"""Settings of mappers.

They are frozen and normalised (sequences become tuples, paths strings), so that equal settings are
equal in every process and give equal Dask keys.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar

from gpuclassify.checks import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_optional_texts,
    check_text,
    label_tuple,
    nearest,
)

LOADERS = ("sorted", "crossfit")
DTYPES = ("float32", "bfloat16", "float16")
SCORE_FORMATS = ("list", "struct")
COVERAGE_FIELDS = ("windows_field", "seen_field", "truncated_field")
SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"
DEVICE = r"auto|cpu|mps|cuda(:\d+)?"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Settings of every mapper that runs a model over a text column.

    Attributes
    ----------
    model : str
        Hub name or local directory of the checkpoint.
    base_model : str, optional
        Hub name or local directory whose ``config.json`` gives the backbone's sizes, for
        checkpoints that do not carry them. Default: what the checkpoint names.
    revision : str, optional
        Branch, tag or commit of `model` on the Hub.
    cache_dir : str, optional
        Where downloads are kept. Default: the Hub client's own cache.
    text_field : str
        Column that holds the text.
    max_chars : int, optional
        Characters of a text that the model gets to see. The column itself is never cut.
    max_seq_length : int, optional
        Tokens of a text that the model gets to see, special tokens included. Default: what the
        tokenizer and the model's positions allow.
    batch_size : int, optional
        Upper bound on the rows of a batch. Default: batches are sized by tokens and memory alone.
    sort_by_length : bool
        Batch texts of similar length together. Scores do not depend on it, speed does.
    padding_side : {"left", "right"}, optional
        Default: the tokenizer's own.
    autocast : bool
        Run in the fastest precision that a GPU does well: bfloat16 where it is native, else
        float16; on a CPU in float32, so that results do not depend on which one it is. ``False``
        means float32 everywhere.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Overrides `autocast`, such as with "bfloat16" on a CPU with AMX, which multiplies it fast.
    device : str
        "auto" (CUDA, then MPS, then CPU) or a torch device such as "cuda" or "cpu".
    loader : {"sorted", "crossfit"}
        What cuts and pads batches: gpuclassify's own loader or CrossFit's SortedSeqLoader. Prompts
        that a decoder answers go through the first in either case.
    engine : {"auto", "packed", "padded", "reference"}
        How an encoder's batches run. "packed": its layers see texts end to end without padding,
        which is an error for models that this would change. "padded": in rectangles. "auto": packed
        where a check on the loaded model finds the same outputs, else padded. "reference":
        transformers' own code, one text at a time, to compare with. Scores do not depend on it.
    tokenizer : {"auto", "host", "gpu"}
        Where texts become tokens. "host": in the Hugging Face tokenizer. "gpu": texts of a cudf
        frame stay on the GPU and cuDF tokenizes them there, for a WordPiece model on CUDA; a text
        that cuDF might tokenize otherwise goes through the host's tokenizer and is counted, so that
        ids are always the same. Any other model or frame is an error then. "auto": the host, until
        it has been measured on a GPU that "gpu" is faster. Scores do not depend on it.
    overwrite : bool
        Replace output columns that the dataset already has instead of refusing.
    strict : bool
        Refuse a checkpoint whose labels are not those that the class was published with, instead of
        warning. Labels that are passed as ``labels=`` are meant, and neither happens.
    unpack_inference_batch : bool
        Call a module of your own with tensors as keyword arguments; ``False`` passes it one dict.
    long_text : {"truncate", "windows"}
        What happens to texts of more than `max_seq_length` tokens: cut, or read in overlapping
        windows of that length, whose outputs are aggregated to one row. With windows, a class's
        own `max_chars` does not apply; one that is given does.
    window_overlap : int, optional
        Tokens that neighbouring windows share. Default: an eighth of the window.
    window_aggregation : {"mean", "max", "first", "tokens"}
        How windows become a row; "tokens" is the mean weighted by the windows' tokens.
    windows_field : str, optional
        Output column (Int64) of the number of windows.
    seen_field : str, optional
        Output column (float32) of the share of the text, 0 to 1, that the model read: characters
        left by `max_chars` times tokens left by `max_seq_length`.
    truncated_field : str, optional
        Output column (boolean) that says whether the model read less than the whole text.
    """

    # The settings that filter rows.
    filter_names: ClassVar[tuple[str, ...]] = ()

    model: str
    base_model: str | None = None
    revision: str | None = None
    cache_dir: str | None = None
    text_field: str = "text"
    max_chars: int | None = None
    max_seq_length: int | None = None
    batch_size: int | None = None
    sort_by_length: bool = True
    padding_side: str | None = None
    autocast: bool = True
    dtype: str | None = None
    device: str = "auto"
    loader: str = "sorted"
    engine: str = "auto"
    tokenizer: str = "auto"
    overwrite: bool = False
    strict: bool = False
    unpack_inference_batch: bool = True
    long_text: str = "truncate"
    window_overlap: int | None = None
    window_aggregation: str = "mean"
    windows_field: str | None = None
    seen_field: str | None = None
    truncated_field: str | None = None

    def __post_init__(self) -> None:
        check_text(
            "model", self.model, 'a Hub name such as "nvidia/domain-classifier" or a directory'
        )
        check_text("text_field", self.text_field, 'a column name such as "text"')
        if self.max_chars == -1:  # how NeMo Curator's first generation spelt "no limit"
            object.__setattr__(self, "max_chars", None)
        check_optional_texts(self, ("base_model", "revision", "cache_dir"), "a string, or None")
        check_optional_texts(self, COVERAGE_FIELDS, "a column name or None")
        if not isinstance(self.device, str) or not re.fullmatch(DEVICE, self.device):
            raise ValueError(
                f"device={self.device!r} is not auto, cpu, mps, cuda or cuda with a number"
            )
        for name in ("max_chars", "max_seq_length", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("sort_by_length", "autocast", "overwrite", "strict", "unpack_inference_batch"):
            check_flag(name, getattr(self, name))
        check_choice("loader", self.loader, LOADERS)
        check_choice("engine", self.engine, ("auto", "packed", "padded", "reference"))
        check_choice("tokenizer", self.tokenizer, ("auto", "host", "gpu"))
        check_choice("dtype", self.dtype, (None, *DTYPES))
        check_choice("padding_side", self.padding_side, (None, "left", "right"))
        check_choice("long_text", self.long_text, ("truncate", "windows"))
        check_choice(
            "window_aggregation", self.window_aggregation, ("mean", "max", "first", "tokens")
        )
        self._check_windows()
        self._check_tokenizer()

    @property
    def has_windows(self) -> bool:
        """Whether long texts are read in windows."""
        return self.long_text == "windows"

    def overlap_of(self, window_tokens: int) -> int | None:
        """Tokens that neighbouring windows of this length share; None without windows."""
        if not self.has_windows:
            return None
        return window_tokens // 8 if self.window_overlap is None else self.window_overlap

    @property
    def filters(self) -> bool:
        """Whether any filter is set."""
        return any(getattr(self, name) is not None for name in self.filter_names)

    @property
    def declared(self) -> dict[str, Any]:
        """What these settings say of the checkpoint in place of its own files."""
        return {}

    @property
    def plans_without_model(self) -> bool:
        """Whether a client can plan with a model that is out of its reach."""
        return False

    def _check_tokenizer(self) -> None:
        if self.tokenizer == "gpu":
            cure = 'pass tokenizer="host" with it, or leave it out'
            if self.has_windows:
                raise ValueError(
                    f'tokenizer="gpu" makes no windows, which long_text="windows" asks for: {cure}'
                )
            if self.device in ("cpu", "mps"):
                raise ValueError(
                    f'tokenizer="gpu" needs the model on CUDA, not device={self.device!r}: {cure}'
                )

    def _check_windows(self) -> None:
        for name in () if self.has_windows else ("window_overlap", "windows_field"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f'{name}={value!r} has no meaning with long_text="truncate": '
                    'pass long_text="windows" with it'
                )
        overlap, length = self.window_overlap, self.max_seq_length
        if overlap is None:
            return
        if isinstance(overlap, bool) or not isinstance(overlap, int):
            raise TypeError(f"window_overlap={overlap!r}: pass an int, or None")
        if overlap < 0:
            raise ValueError(f"window_overlap={overlap} must be at least 0")
        if length is not None and overlap >= length:
            raise ValueError(
                f"window_overlap={overlap} leaves windows of {length} tokens no way forward: "
                "pass a smaller one"
            )


@dataclass(frozen=True, kw_only=True)
class LabelOptions(ModelOptions):
    """Settings of every mapper that gives labels, beside those of `ModelOptions`.

    Attributes
    ----------
    label_field : str, optional
        Output column of the label. ``None`` writes none.
    filter_by : str or list of str, optional
        Keep only rows with these labels.
    keep_field : str, optional
        Write the filters' decision to this boolean column and drop nothing.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by",)

    label_field: str | None = None
    filter_by: tuple[str, ...] | None = None
    keep_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optional_texts(self, ("label_field", "keep_field"), "a column name or None")
        object.__setattr__(self, "filter_by", self.normal_labels(self.filter_by))
        if self.keep_field is not None and not self.filters:
            raise ValueError(
                f"keep_field={self.keep_field!r} has no decision to write: "
                f"pass {' or '.join(self.filter_names)} with it"
            )

    def normal_labels(self, labels: Any) -> Any:
        """The labels to keep as a sorted tuple, or None for all."""
        return label_tuple("filter_by", labels)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(LabelOptions):
    """Settings of every mapper that gives labels and scores, beside those of `LabelOptions`.

    Attributes
    ----------
    score_field : str, optional
        Output column of the scores: those of all classes for category and multi-label models,
        float32 for a regression model. ``None`` writes none.
    min_score : float or dict of str to float, optional
        Keep only rows that score at least this much; with several classes, a minimum by label.
    labels : list of str, optional
        The labels in id order, for a client that cannot read the checkpoint; workers verify them.
    problem_type : {"single_label_classification", "multi_label_classification", "regression"}
        For a checkpoint whose configuration does not say.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_score")

    score_field: str | None = None
    min_score: float | tuple[tuple[str, float], ...] | None = None
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optional_texts(self, ("score_field",), "a column name or None")
        check_choice(
            "problem_type", self.problem_type, (None, SINGLE_LABEL, MULTI_LABEL, REGRESSION)
        )
        object.__setattr__(self, "labels", label_tuple("labels", self.labels, keep_order=True))
        object.__setattr__(self, "min_score", _minimum_score(self.min_score))

    @property
    def declared(self) -> dict[str, Any]:
        """The kind of problem, where the checkpoint's configuration does not say it."""
        return {"problem_type": self.problem_type}

    @property
    def plans_without_model(self) -> bool:
        """Whether the labels are given, so that the model need not be in reach."""
        return self.labels is not None


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(ScoreOptions):
    """Settings of a classifier with probabilities, beside those of `ScoreOptions`.

    Attributes
    ----------
    score_format : {"list", "struct"}
        How `score_field` holds the scores of several labels: a list in id order, or a struct with
        a field for each label, so that one is read by its name.
    confidence_field : str, optional
        Output column (float32) of the probability of the label given.
    min_confidence : float, optional
        Keep only rows whose label has at least this probability.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_confidence", "min_score")

    score_format: str = "list"
    confidence_field: str | None = None
    min_confidence: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("score_format", self.score_format, SCORE_FORMATS)
        check_optional_texts(self, ("confidence_field",), "a column name or None")
        if self.min_confidence is not None:
            check_number("min_confidence", self.min_confidence)
            if not 0 <= self.min_confidence <= 1:
                raise ValueError(
                    f"min_confidence={self.min_confidence} is no probability: pass 0 to 1, or None"
                )


Options = TypeVar("Options")


def parse_options(
    owner: str, options_type: type[Options], defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> Options:
    """Settings from what the caller of `owner` passed, over the class's own defaults.

    Raises
    ------
    TypeError
        Unknown argument (with the nearest known one).
    ValueError
        A value out of range.
    """
    names = [field.name for field in fields(options_type)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            known = [*names, "token"]
            raise TypeError(
                f"{owner} has no argument {name!r}.{nearest(name, known)} "
                f"Arguments are {', '.join(known)}."
            )
    settings = {**defaults, **given}
    if "model" in names and settings.get("model") is None:
        raise TypeError(f"{owner} needs model=: a Hub name or the directory of a checkpoint")
    for name, value in settings.items():  # equal settings are equal however they are given
        if isinstance(value, os.PathLike):
            settings[name] = os.fspath(value)
        elif isinstance(value, list):
            settings[name] = tuple(value)
    return options_type(**settings)


def signature_of(
    options_type: type[Any], defaults: Mapping[str, Any], extra: Iterable[str] = ()
) -> inspect.Signature:
    """The constructor's signature as ``help()`` shows it: every setting with its true default."""
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = []
    for field in fields(options_type):
        default = defaults.get(field.name, field.default)
        shown = inspect.Parameter.empty if default is MISSING else default
        parameters.append(keyword(field.name, default=shown, annotation=field.type))
    return inspect.Signature([*parameters, *(keyword(name, default=None) for name in extra)])


def _minimum_score(value: Any) -> float | tuple[tuple[str, float], ...] | None:
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("min_score={} names no label: pass at least one, or None")
        for label, minimum in value.items():
            check_text("min_score's key", label, "a label")
            check_number("min_score", minimum)
        return tuple(sorted((label, float(minimum)) for label, minimum in value.items()))
    if value is None:
        return None
    check_number("min_score", value, "a number, or a dict of label to number")
    return float(value)
