"""Count duplicates by source, list the largest groups, and refuse too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gpuclassify.corpus.dedup.corpus import value_texts
from gpuclassify.frames import Frame, to_pandas
from gpuclassify.pages import counted, html_table, text_table

MOST_GROUPS = 20  # largest groups listed, with the beginnings of their texts
SHOWN, SHOWN_CHARS = 5, 60  # sources and groups in a repr, and characters of their texts
BINS = 20  # bins of the histogram of similarities, from 0 to 1
COUNTS = ("in_groups", "groups", "duplicates", "compared", "accepted", "rejected", "near_border")
FEWEST_DOCUMENTS = 1_000  # minimum documents of a source whose share is checked


class TooManyDuplicatesError(ValueError):
    """Error if more duplicates would be removed, or a group is larger, than the settings allow."""


class Group(NamedTuple):
    """Group of duplicates: number of documents, smallest id, and beginning of the kept text.

    The beginning has up to 200 characters, none if the text is only white space.
    """

    size: int
    group: Any
    beginning: str


@dataclass(repr=False)
class DuplicatesSummary:
    """Counts of duplicates.

    Attributes
    ----------
    documents : int
        Documents of the dataset, without an earlier corpus.
    in_groups, groups : int
        Documents in groups of two or more, including the documents that are kept and those of an
        earlier corpus, and number of these groups.
    blank : int
        Documents in groups whose text is only white space.
    duplicates : int
        Documents that duplicate one that is kept: to be removed, or only marked.
    compared, accepted, rejected : int
        Pairs of candidates whose texts were compared, pairs among them that were similar enough,
        and pairs that were not. 0 except for fuzzy duplicates that are verified.
    near_border : int
        Documents near the border of a cluster, whose semantic duplicates may be missed; see
        `gpuclassify.corpus.dedup.semantic.SemanticDuplicates`.
    sources : dict of str to (int, int)
        Number of documents, and of duplicates, by value of the source column ("null" for null); all
        are under "" without such a column.
    similarities : list of int
        Duplicates by similarity to the kept document, if it was measured, in 20 equal bins from 0
        to 1.
    largest : list of Group
        The up to 20 largest groups; of groups of blank texts, only the largest one.
    """

    documents: int = 0
    in_groups: int = 0
    groups: int = 0
    blank: int = 0
    duplicates: int = 0
    compared: int = 0
    accepted: int = 0
    rejected: int = 0
    near_border: int = 0
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    similarities: list[int] = field(default_factory=lambda: [0] * BINS)
    largest: list[Group] = field(default_factory=list)

    @property
    def duplicate_share(self) -> float:
        """Share of the dataset's documents that are removed or marked as duplicates, 0 to 1.

        The document that stays of each group is not counted, nor is an earlier corpus.
        """
        return self.duplicates / self.documents if self.documents else 0.0

    @property
    def shown(self) -> list[str]:
        """Lines that describe the five largest groups, and the documents of blank texts, if any."""
        texts = [(group.size, group.beginning.split()) for group in self.largest if group.beginning]
        shown = [f"{size:,} documents: {' '.join(text)[:SHOWN_CHARS]}" for size, text in texts]
        blank = [f"{self.blank:,} documents of white space alone"] if self.blank else []
        return shown[:SHOWN] + blank

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table("DuplicatesSummary", self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        share = f"({self.duplicate_share:.1%})"
        yield "duplicates", f"{self.duplicates:,} of {self.documents:,} documents {share}"
        pairs = f"; {self.compared:,} pairs compared, {self.rejected:,} of them too unlike"
        size = f"{counted(self.groups, 'group')} of {counted(self.in_groups, 'document')}"
        yield "found", size + (pairs if self.compared else "")
        large = {k: v for k, v in self.sources.items() if v[0] >= FEWEST_DOCUMENTS} or self.sources
        by_share = sorted(large.items(), key=lambda item: -item[1][1] / max(item[1][0], 1))
        if len(self.sources) > 1:
            shown = [f"{name}: {gone:,} of {n:,}" for name, (n, gone) in by_share[:SHOWN]]
            yield "sources", f"the largest share of duplicates is in {'; '.join(shown)}"
        for number, line in enumerate(self.shown):
            yield "" if number else "largest", line

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes and ``duplicate_share`` by name, as JSON values."""
        groups = [group._asdict() for group in self.largest]
        return {**asdict(self), "duplicate_share": self.duplicate_share, "largest": groups}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DuplicatesSummary:
        """Make a summary from values that `as_dict` returned."""
        known = {
            figure.name: values[figure.name] for figure in fields(cls) if figure.name in values
        }
        known["sources"] = {name: tuple(counts) for name, counts in values["sources"].items()}
        known["largest"] = [Group(**group) for group in values["largest"]]
        return cls(**known)


def count_documents(frame: Frame, partition: int, source_field: str | None) -> pd.DataFrame:
    """Count a partition's documents by source, in columns ``source`` and ``documents``.

    The source is "null" for null, and "" for all documents if `source_field` is None.
    """
    if source_field is None:
        return pd.DataFrame({"source": pd.array([""], "str"), "documents": [len(frame)]})
    values = frame[[source_field]]
    plain = to_pandas(values)
    counts = source_names(plain[source_field]).value_counts()
    names = pd.array(counts.index.to_numpy(), "str")
    return pd.DataFrame({"source": names, "documents": counts.to_numpy()})


def source_names(values: pd.Series) -> pd.Series:
    """Convert values of the source column to texts by `value_texts`; null becomes "null"."""
    return pd.Series(value_texts(values), dtype="str").fillna("null")


def summarize(
    documents: Sequence[pd.DataFrame], decisions: Sequence[DuplicatesSummary]
) -> DuplicatesSummary:
    """Sum the results of `count_documents` and `count_decisions` of all partitions."""
    total = DuplicatesSummary()
    counted: Counter[str] = Counter()
    for frame in documents:
        for source, count in zip(frame["source"], frame["documents"], strict=True):
            counted[str(source)] += int(count)
    removed: Counter[str] = Counter()
    for part in decisions:
        for name in (*COUNTS, "blank"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.similarities = [
            a + b for a, b in zip(total.similarities, part.similarities, strict=True)
        ]
        total.largest = _largest([*total.largest, *part.largest])
        for source, (_, gone) in part.sources.items():
            removed[str(source)] += gone
    total.documents = counted.total()
    total.sources = {name: (counted[name], removed[name]) for name in sorted(counted)}
    return total


def count_decisions(decisions: pd.DataFrame) -> DuplicatesSummary:
    """Count duplicates in one partition of `gpuclassify.corpus.dedup.groups.decide`'s results.

    ``documents`` stays 0, also in ``sources``, because only documents with candidates are known.
    """
    in_groups = decisions[decisions["size"] > 1]
    goes = in_groups[~in_groups["keep"]]
    compared, accepted = int(decisions["compared"].sum()), int((goes["compared"] > 0).sum())
    measured = goes["similarity"].dropna().to_numpy()
    bins = np.clip(measured * BINS, 0, BINS - 1).astype(int)
    heads = in_groups[in_groups["keep"]]
    sources = source_names(goes["source"]).value_counts()
    groups = zip(heads["size"].tolist(), heads["group"].tolist(), heads["beginning"], strict=True)
    return DuplicatesSummary(
        in_groups=len(in_groups),
        groups=len(heads),
        blank=int(heads.loc[heads["beginning"] == "", "size"].sum()),
        duplicates=len(goes),
        compared=compared,
        accepted=accepted,
        rejected=compared - accepted,
        near_border=int(decisions["near_border"].sum()),
        sources={str(name): (0, int(count)) for name, count in sources.items()},
        similarities=np.bincount(bins, minlength=BINS).tolist(),
        largest=_largest([Group(*group) for group in groups]),
    )


def refuse(
    summary: DuplicatesSummary, max_removed_share: float | None, max_group_size: int | None
) -> None:
    """Raise TooManyDuplicatesError if duplicates exceed one of the limits; None is no limit."""
    largest = summary.largest[0] if summary.largest else Group(0, None, "")
    if max_group_size is not None and largest.size > max_group_size:
        raise TooManyDuplicatesError(
            f"group {largest.group!r} has {largest.size:,} documents, more than "
            f"max_group_size={max_group_size:,}; its text begins {largest.beginning[:80]!r}. "
            "Where that is boilerplate, remove it from the texts or run ExactDuplicates first; "
            "where it is no duplicate, raise threshold= or min_similarity="
        )
    if max_removed_share is None:
        return
    shares = [("the corpus", summary.documents, summary.duplicates)]
    sources = ((f"source {name!r}", *counts) for name, counts in summary.sources.items())
    shares += [share for share in sources if share[1] >= FEWEST_DOCUMENTS]
    for where, documents, gone in shares:
        if gone > max_removed_share * documents:
            raise TooManyDuplicatesError(
                f"{gone:,} of {documents:,} documents of {where} would go "
                f"({gone / documents:.1%}), more than max_removed_share={max_removed_share}: look "
                "at the largest groups in summarize(), and raise the limit if they are right"
            )


def _largest(groups: list[Group]) -> list[Group]:
    ordered = sorted(groups, key=lambda group: (-group.size, str(group.group)))
    blank = [group for group in ordered if not group.beginning][1:]  # all but the largest one
    return [group for group in ordered if group not in blank][:MOST_GROUPS]
