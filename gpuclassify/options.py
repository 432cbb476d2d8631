"""Settings shared by mappers, and the one table of older constructor spellings.

Settings are frozen dataclasses whose values are normalised (sequences become tuples, paths become
strings), so that equal settings are equal in every process and give equal Dask keys.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

LOADERS = ("sorted", "crossfit")
DTYPES = ("float32", "bfloat16", "float16")
PADDING_SIDES = ("left", "right")
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
        Run in the fastest precision that the device does well: bfloat16 where native, else float16
        on CUDA; float32 on a CPU without native bfloat16. ``False`` means float32.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Overrides `autocast`.
    device : str
        "auto" (CUDA, then MPS, then CPU) or a torch device such as "cuda" or "cpu".
    loader : {"sorted", "crossfit"}
        What cuts and pads batches: gpuclassify's own loader or CrossFit's SortedSeqLoader.
    overwrite : bool
        Replace output columns that the dataset already has instead of refusing.
    """

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
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_text(
            "model", self.model, 'a Hub name such as "nvidia/domain-classifier" or a directory'
        )
        check_text("text_field", self.text_field, 'a column name such as "text"')
        if self.max_chars == -1:  # how NeMo Curator's first generation spelt "no limit"
            object.__setattr__(self, "max_chars", None)
        for name in ("base_model", "revision", "cache_dir"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name), "a string, or None")
        if not isinstance(self.device, str) or not re.fullmatch(DEVICE, self.device):
            raise ValueError(
                f"device={self.device!r} is not auto, cpu, mps, cuda or cuda with a number"
            )
        for name in ("max_chars", "max_seq_length", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("sort_by_length", "autocast", "overwrite"):
            check_flag(name, getattr(self, name))
        check_choice("loader", self.loader, LOADERS)
        check_choice("dtype", self.dtype, (None, *DTYPES))
        check_choice("padding_side", self.padding_side, (None, *PADDING_SIDES))


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(ModelOptions):
    """Settings of a classifier, beside those of `ModelOptions`.

    Attributes
    ----------
    label_field : str, optional
        Output column of the label. ``None`` writes none.
    score_field : str, optional
        Output column of the scores: list<float32> of all classes in id order for category and
        multi-label models, float32 for a regression model. ``None`` writes none.
    confidence_field : str, optional
        Output column (float32) of the probability of the label given.
    filter_by : str or list of str, optional
        Keep only rows with these labels.
    min_confidence : float, optional
        Keep only rows whose label has at least this probability.
    min_score : float or dict of str to float, optional
        Keep only rows that score at least this much; with several classes, a minimum by label.
    keep_field : str, optional
        Write the filters' decision to this boolean column and drop nothing.
    labels : list of str, optional
        The labels in id order, for a client that cannot read the checkpoint; workers verify them.
    problem_type : str, optional
        "single_label_classification", "multi_label_classification" or "regression", for a
        checkpoint whose configuration does not say.
    """

    label_field: str | None = None
    score_field: str | None = None
    confidence_field: str | None = None
    filter_by: tuple[str, ...] | None = None
    min_confidence: float | None = None
    min_score: float | tuple[tuple[str, float], ...] | None = None
    keep_field: str | None = None
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("label_field", "score_field", "confidence_field", "keep_field"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name), "a column name or None")
        check_choice("problem_type", self.problem_type, (None, *PROBLEM_TYPES))
        object.__setattr__(self, "filter_by", label_tuple("filter_by", self.filter_by))
        object.__setattr__(self, "labels", label_tuple("labels", self.labels, keep_order=True))
        object.__setattr__(self, "min_score", _minimum_score(self.min_score))
        if self.min_confidence is not None:
            check_number("min_confidence", self.min_confidence)
            if not 0 <= self.min_confidence <= 1:
                raise ValueError(
                    f"min_confidence={self.min_confidence} is no probability: pass 0 to 1, or None"
                )
        if self.keep_field is not None and not self.filters:
            raise ValueError(
                f"keep_field={self.keep_field!r} has no decision to write: "
                "pass filter_by, min_confidence or min_score with it"
            )

    @property
    def filters(self) -> bool:
        """Whether any filter is set."""
        return any(
            setting is not None for setting in (self.filter_by, self.min_confidence, self.min_score)
        )


@dataclass(frozen=True, kw_only=True)
class EducationOptions(ClassifierOptions):
    """Settings of the FineWeb family, beside those of `ClassifierOptions`.

    Attributes
    ----------
    int_score_field : str, optional
        Output column (Int64) of the score rounded half to even.
    """

    int_score_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.int_score_field is not None:
            check_text("int_score_field", self.int_score_field, "a column name or None")


PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


@dataclass(frozen=True)
class Renamed:
    """An older spelling of today's argument `name`."""

    name: str


@dataclass(frozen=True)
class Withdrawn:
    """An older argument that has no effect here; `harmless` values pass, others are refused."""

    harmless: tuple[Any, ...]
    reason: str
    is_refused: bool = True


_TOKENS_ARE_SHARED = "tokens are never stored in the dataset"

# Constructor spellings of NeMo Curator's Dask generation (0.x) and of its stages (1.x), keyed by
# (family, older name); "*" stands for every family.
OLD_SPELLINGS: dict[tuple[str, str], Renamed | Withdrawn] = {
    ("*", "device_type"): Renamed("device"),
    ("*", "hf_token"): Renamed("token"),
    ("*", "model_inference_batch_size"): Renamed("batch_size"),
    ("*", "max_mem_gb"): Withdrawn(
        (None,), "batches are sized by the memory that is measured to be free", is_refused=False
    ),
    ("*", "keep_tokens"): Withdrawn((False,), _TOKENS_ARE_SHARED),
    ("*", "use_existing_tokens"): Withdrawn((False,), _TOKENS_ARE_SHARED),
    ("prompts", "filter_by"): Withdrawn(
        (None, (), []), "a prompt gets several labels and scores: compare the columns instead"
    ),
    ("checkpoint", "model_identifier"): Renamed("model"),
    ("checkpoint", "pred_column"): Renamed("label_field"),
    ("checkpoint", "prob_column"): Renamed("score_field"),
    ("category", "pred_column"): Renamed("label_field"),
    ("category", "prob_column"): Renamed("score_field"),
    ("education", "pred_column"): Renamed("score_field"),
    ("education", "float_score_field"): Renamed("score_field"),
    ("education", "int_column"): Renamed("int_score_field"),
    ("education", "quality_label_column"): Renamed("label_field"),
}

Options = TypeVar("Options")


def parse_options(
    owner: str,
    options_type: type[Options],
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Options:
    """Settings from constructor arguments.

    Parameters
    ----------
    owner : str
        Name of the class, for messages.
    options_type : type
        The frozen dataclass to make.
    defaults : mapping
        The class's own defaults, which win over those of `options_type`.
    given : mapping
        What the caller passed, as `modern_spellings` gives it.

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
            raise TypeError(_unknown_argument(owner, name, [*names, "token"]))
    settings = {**defaults, **given}
    if "model" in names and settings.get("model") is None:
        raise TypeError(f"{owner} needs model=: a Hub name or the directory of a checkpoint")
    return options_type(**{name: _normal(value) for name, value in settings.items()})


def modern_spellings(owner: str, family: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with the older spellings of `OLD_SPELLINGS` replaced by today's names.

    Raises
    ------
    TypeError
        One is given in two spellings, or has no effect any more; the message shows no token.
    """
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        spelling = OLD_SPELLINGS.get((family, name)) or OLD_SPELLINGS.get(("*", name))
        if isinstance(spelling, Withdrawn):
            _pass_or_refuse(owner, name, value, spelling)
            continue
        today = spelling.name if spelling else name
        if today in given or (today != name and today in arguments):
            raise TypeError(f"{owner} got {today!r} twice: {name!r} is an older spelling of it")
        given[today] = value
    return given


def signature_of(
    options_type: type[Any], defaults: Mapping[str, Any], extra: Iterable[str] = ()
) -> inspect.Signature:
    """The constructor's signature as ``help()`` shows it: every setting with its true default."""
    parameters = []
    for field in fields(options_type):
        default = defaults.get(field.name, field.default)
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=field.type,
            )
        )
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in extra
    ]
    return inspect.Signature(parameters)


def label_tuple(name: str, labels: Any, *, keep_order: bool = False) -> tuple[str, ...] | None:
    """Labels as a tuple without repeats: sorted, or in the order given.

    Raises
    ------
    TypeError
        Neither a string nor a collection of strings.
    ValueError
        No label at all.
    """
    if labels is None:
        return None
    if isinstance(labels, str):
        return (labels,)
    if not isinstance(labels, Iterable) or isinstance(labels, Mapping):
        raise TypeError(f"{name}={labels!r}: pass a label or a list of labels")
    labels = tuple(labels)
    wrong = [label for label in labels if not isinstance(label, str)]
    if wrong:
        raise TypeError(
            f"{name} holds {wrong[0]!r} of type {type(wrong[0]).__name__}: labels are str"
        )
    if not labels:
        raise ValueError(f"{name}=[] names no label: pass at least one, or None for all")
    return labels if keep_order else tuple(sorted(set(labels)))


def nearest(name: str, names: Iterable[str]) -> str:
    """A phrase that suggests the known name nearest to `name`, or nothing."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        hint = nearest(value, [c for c in choices if c]) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.{hint}")


def check_text(name: str, value: Any, what: str) -> None:
    """Raise TypeError unless `value` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r} is not {what}")


def check_count(name: str, value: Any) -> None:
    """Raise unless `value` is None or an integer of at least 1."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass an int, or None")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1; None means no limit")


def check_number(name: str, value: Any, what: str = "a number") -> None:
    """Raise TypeError unless `value` is an int or a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass True or False")


def _normal(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list):
        return tuple(value)
    return value


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


def _pass_or_refuse(owner: str, name: str, value: Any, spelling: Withdrawn) -> None:
    if value in spelling.harmless:
        return
    message = f"{owner}: {name}={value!r} has no effect, because {spelling.reason}"
    if spelling.is_refused:
        raise TypeError(f"{message}. Leave it out.")
    warnings.warn(message, UserWarning, stacklevel=4)


def _unknown_argument(owner: str, name: str, names: list[str]) -> str:
    return (
        f"{owner} has no argument {name!r}.{nearest(name, names)} Arguments are {', '.join(names)}."
    )
