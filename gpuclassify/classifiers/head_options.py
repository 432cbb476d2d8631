"""Settings of HeadClassifier: what holds for all heads, and what is told apart by their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gpuclassify import hub
from gpuclassify.classifiers.embedder import EmbeddingOptions
from gpuclassify.settings.checks import check_text, nearest
from gpuclassify.settings.options import SINGLE_LABEL, ClassifierOptions, ProblemType, StrPath

HEAD = "{head}"  # stands for a head's name in the names of columns
COLUMN_NAMES = ("label_field", "labels_field", "score_field", "confidence_field")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(EmbeddingOptions):
    """Settings of `HeadClassifier`, beside those of `EmbeddingOptions`.

    Attributes
    ----------
    heads : dict of str to str
        Directory or Hub name (or ``owner/name@revision``) of each, by name.
    backbone : str
        Hub name or directory of what embeds. Default: the heads' own.
    revision : str
        Branch, tag or commit of `backbone` on the Hub.
    label_field : str
        Output columns of labels, {head} being a head's name; or None.
    labels_field : str
        Output columns of all labels above `thresholds`, of multi-label heads.
    thresholds : dict of str to float or dict
        By head: the least score of a label in `labels_field`. Default: 0.5.
    score_field : str
        Of scores. Default: {head}_score of a regression, else none.
    confidence_field : str
        Output columns (float32) of the labels' probabilities.
    filter_by : dict of str to labels
        By head: keep only rows with these labels.
    min_score : dict of str to float or dict
        By head: the least score to keep, or a dict of them by label.
    min_confidence : dict of str to float
        By head: the least probability to keep of its label, 0 to 1.
    keep_field : str
        Write the filters' decision to this column, and drop nothing.
    labels : dict of str to list of str
        Of each head, in id order, for a client without the models.
    problem_type : dict of str to str
        By head, beside `labels`. Default: that of one label a text.
    pooling : {"mean", "cls", "last"}
        Which tokens are averaged. Default: as the model's files say.
    """

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by", "min_confidence", "min_score")
    names_by_head: ClassVar[tuple[str, ...]] = (
        *filter_names,
        *("thresholds", "labels", "problem_type"),
    )

    model: StrPath = field(default="", init=False)
    heads: Mapping[str, StrPath]
    backbone: StrPath | None = None
    label_field: str | None = f"{HEAD}_pred"
    labels_field: str | None = None
    score_field: str | None = None
    confidence_field: str | None = None
    filter_by: Mapping[str, Any] | None = None
    min_score: Mapping[str, Any] | None = None
    min_confidence: Mapping[str, float] | None = None
    keep_field: str | None = None
    thresholds: Mapping[str, Any] | None = None
    labels: Mapping[str, Sequence[str]] | None = None
    problem_type: Mapping[str, ProblemType] | None = None
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
        given = {key: self._of_heads(key, heads) for key in self.names_by_head}
        by_head = {name: self._of_head(name, path, given) for name, path in heads.items()}
        object.__setattr__(self, "heads", tuple(heads.items()))
        object.__setattr__(self, "by_head", tuple(by_head.items()))
        for key, of in given.items():  # as the heads' own options normalise them
            values = tuple((name, getattr(by_head[name], key)) for name in heads if name in of)
            object.__setattr__(self, key, values or None)

    @property
    def plans_without_model(self) -> bool:
        """Whether the labels of all heads are given, so that no model need be in reach."""
        return all(own.plans_without_model for _, own in self.by_head)

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
        return {name: own for name, own in given.items() if own is not None}

    def _of_head(
        self, name: str, path: str, given: Mapping[str, Mapping[str, Any]]
    ) -> ClassifierOptions:
        """The settings of one head."""
        own = {key: of[name] for key, of in given.items() if name in of}
        if "labels" in own:
            own.setdefault("problem_type", SINGLE_LABEL)
        columns = {key: getattr(self, key) for key in COLUMN_NAMES}
        model, revision = path, ""
        if "@" in path and not hub.is_directory_name(path):
            model, _, revision = path.partition("@")
        return ClassifierOptions(
            model=model,
            revision=revision or None,
            cache_dir=self.cache_dir,
            keep_field=self.keep_field if own.keys() & {*self.filter_names} else None,
            **{key: column and column.replace(HEAD, name) for key, column in columns.items()},
            **own,
        )


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
