"""Sections of a job's HTML report about test items found, and about the largest overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.corpus.decontamination.index import ABOUT, ItemIndex
from gpuclassify.corpus.decontamination.matching import Matches
from gpuclassify.jobs.ledger.records import MALFORMED, unsealed
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.stage_counts import TextOutcomes, beginning
from gpuclassify.pages.sections import (
    Block,
    Cell,
    Fold,
    PagePart,
    ReportPart,
    Section,
    Table,
    Text,
)

FOLDER = "_decontamination"  # folder in the output that dataset readers skip
INDEX = f"{FOLDER}/index"
BINS = 20  # bins of overlaps from 0 to 1
SHOWN_BINS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
MOST_ITEMS = 5  # items listed per benchmark, most frequent first


@dataclass(frozen=True)
class ItemOutcomes(TextOutcomes):
    """Results of `Decontaminate` for some texts, counted and shown in a job's report.

    ``worst`` maps each benchmark to its passages with the largest overlaps. Each is a pair of the
    overlap and a text with two lines: the passage, and the test item.
    """

    worst: dict[str, list[list[Any]]] = field(kw_only=True)

    def examples(self, most: int) -> dict[str, dict[str, list[list[Any]]]]:
        """Return the passages in `worst` as ``{"labels": worst, "dropped": {}}``."""
        return {"labels": self.worst, "dropped": {}}


def worst_passages(
    index: ItemIndex,
    texts: pa.LargeStringArray,
    worst: Matches,
    passages: Sequence[np.ndarray],
    most: int,
) -> dict[str, list[list[Any]]]:
    """Return up to `most` passages with the largest overlap for each benchmark, with their items.

    `worst` has one match for each document. `passages` are three arrays, sorted by document: row of
    the text, start and end in characters. The result has, by benchmark, lists of the overlap and a
    text with two lines: the beginning of the document's text from its first passage on, and the
    item's beginning.
    """
    groups: dict[str, list[list[Any]]] = {}
    for match in np.argsort(-worst.shares, kind="stable").tolist() if most else ():
        document, item = int(worst.documents[match]), int(worst.items[match])
        group = groups.setdefault(index.items["source"][item].as_py(), [])
        if len(group) < most:
            start = int(passages[1][np.searchsorted(passages[0], document)])
            passage = beginning(texts[document].as_py()[start:])
            both = f"{passage}\n{beginning(index.items['text'][item].as_py())}"
            group.append([round(float(worst.shares[match]), 4), both])
    return groups


def count_matches(index: ItemIndex, matches: Matches, reached: Matches) -> dict[str, Any]:
    """Count contaminated documents by benchmark ("" for all) and by test item, for the report.

    `reached` are the `matches` that reach the threshold. The result's ``documents`` are the numbers
    of documents in `reached` by benchmark, and ``items`` by benchmark (without "") and item id.
    ``shares`` is, by benchmark, a histogram of the documents in `matches` by their largest overlap,
    in twentieths: counts by number of the bin, as text, without empty bins.
    """
    counts: dict[str, Any] = {"documents": {}, "items": {}, "shares": {}}
    for name, source_matches, source_reached in _by_source(index, matches, reached):
        counts["shares"][name] = _bins(source_matches.worst().shares)
        counts["documents"][name] = len(source_reached.worst().shares)
        if name:
            ids = index.items["id"].take(pa.array(source_reached.items))
            pairs = pc.value_counts(ids).to_pylist()
            counts["items"][name] = {pair["values"]: pair["counts"] for pair in pairs}
    return counts


def _by_source(index: ItemIndex, *matches: Matches) -> Iterator[tuple[Any, ...]]:
    """Yield "" and the sets `matches`, then each benchmark in the first set and its matches."""
    yield ("", *matches)
    sources = [
        np.array(index.items["source"].take(pa.array(group.items)).to_pylist(), dtype=object)
        for group in matches
    ]
    for source in dict.fromkeys(sources[0].tolist()):
        pairs = zip(matches, sources, strict=True)
        yield (source, *(group.select(names == source) for group, names in pairs))


def _bins(shares: np.ndarray) -> dict[str, int]:
    bins = np.bincount((shares * BINS + 1e-9).astype(int))
    return {str(number): int(count) for number, count in enumerate(bins) if count}


class ContaminationReport(ReportPart):
    """Section of a job's HTML report about test items, from counts and index of `Decontaminate`."""

    def entries(
        self, directory: Store, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return counts of test items for ``report.json``, as the entry ``contamination``.

        Empty if no stage has searched for test items. In the entry, ``rows`` is the number of rows
        searched, ``documents`` of contaminated documents, ``benchmarks`` has items, items found and
        documents by benchmark, and ``falls`` has, by benchmark and for all (""), a list of 21
        counts: documents that share n-grams, and have an overlap of at least 0, 1, ... 20
        twentieths. ``settings``, ``boilerplate`` and ``digest`` describe the index.
        """
        found = next((counts for counts in stages.values() if "contamination" in counts), None)
        if found is None:
            return {}
        stage = (values for name, values in job["identity"].items() if "Decontaminate" in name)
        settings: Mapping[str, Any] = next(stage, {})
        about = _index_counts(directory)
        counts, sources = found["contamination"], about["sources"]
        bins = {name: np.zeros(BINS + 1, int) for name in ("", *sources, *counts["shares"])}
        for name, shares in counts["shares"].items():
            bins[name][[*map(int, shares)]] = [*shares.values()]
        falls = {name: np.cumsum(b[::-1])[::-1].tolist() for name, b in bins.items()}
        benchmarks = {
            name: {
                **{"items": None, "distinct": None, "too_short": None, **sources.get(name, {})},
                "found": len(items := counts["items"].get(name, {})),
                "documents": counts["documents"].get(name, 0),
                "most": sorted(items.items(), key=lambda item: -item[1])[:MOST_ITEMS],
            }
            for name in sorted(falls)
            if name
        }
        named = ("ngram", "min_words", "threshold", "max_items")
        contamination = {
            "rows": found["read"],
            "documents": counts["documents"].get("", 0),
            "benchmarks": benchmarks,
            "falls": falls,
            "settings": {name: settings.get(name) for name in named},
            "boilerplate": about["boilerplate"],
            "digest": about["digest"],
        }
        return {"contamination": contamination}

    def page(self, report: Mapping[str, Any]) -> PagePart:
        """Return sections of the HTML report about items found, and the largest overlaps."""
        found = report.get("contamination")
        if found is None:
            return PagePart()
        stages = [n for n, counts in report["stages"].items() if "contamination" in counts]
        worst = [
            _worst(report["examples"][name]["labels"])
            for name in stages
            if name in report["examples"]
        ]
        sections = [Section("Test items found", _blocks(found), is_wide=True), *worst]
        return PagePart("Decontaminated", sections=sections, stages=stages)


def _index_counts(directory: Store) -> dict[str, Any]:
    """Read counts of items and boilerplate, and the digest, of the index in an output directory.

    Without a readable index, counts are empty, and the digest is None.
    """
    try:
        about = unsealed(directory.read(f"{INDEX}/{ABOUT}")) or {}
        return {
            "sources": {
                name: {key: int(counts[key]) for key in ("items", "distinct", "too_short")}
                for name, counts in about["sources"].items()
            },
            "boilerplate": {
                reason: {"ngrams": int(found["ngrams"]), "such_as": [*map(str, found["such_as"])]}
                for reason, found in about["boilerplate"].items()
            },
            "digest": str(about["digest"]),
        }
    except (FileNotFoundError, *MALFORMED):
        return {"sources": {}, "boilerplate": {}, "digest": None}


def _blocks(found: Mapping[str, Any]) -> list[Block]:
    """Return tables of the test items found, and a text for the appendix of a paper."""
    items, falls = [], found["falls"]
    for name, counts in found["benchmarks"].items():
        most = ", ".join(f"{item} ({documents:,})" for item, documents in counts["most"])
        known = ("" if counts[n] is None else f"{counts[n]:,}" for n in ("items", "too_short"))
        share = f"{counts['documents'] / (found['rows'] or 1):.4%}"
        numbers = (*known, f"{counts['found']:,}", f"{counts['documents']:,}", share)
        items.append((Cell(name, f"most often: {most}") if most else name, *numbers))
    header = ("benchmark", "items", "too short", "found", "documents", "share")
    rows = [
        (f"{step / BINS:.1%}", *(f"{counts[step]:,}" for counts in falls.values()))
        for step in SHOWN_BINS
    ]
    names = [name or "all" for name in falls]
    folds = [
        Fold(
            f"{words['ngrams']:,} n-grams are boilerplate: {reason}",
            [Table((), [(ngram,) for ngram in words["such_as"]])],
        )
        for reason, words in found["boilerplate"].items()
    ]
    return [
        Table(header, items, numbers=range(1, len(header))),
        Text("How the count falls with the threshold", "heading"),
        Table(("share of an item", *names), rows, numbers=range(1 + len(names))),
        Text("Documents that hold at least this share of an item's n-grams."),
        *folds,
        Text("For an appendix", "heading"),
        Text(appendix(found), "preformatted"),
    ]


def _worst(groups: Mapping[str, Any]) -> Section:
    """Return a section with the passages of the largest overlaps, next to the test items."""
    blocks: list[Block] = []
    header = ("share", "document, from the passage on", "item")
    for benchmark, pairs in sorted(groups.items()):
        rows = [(f"{share:.1%}", *both.split("\n")) for share, both in pairs]
        blocks += [Text(benchmark, "heading"), Table(header, rows, numbers=(0,), is_wide=True)]
    return Section("The worst passages, and the items", blocks, is_wide=True)


def appendix(found: Mapping[str, Any]) -> str:
    """Describe method and results in sentences for the appendix of a paper."""
    settings, benchmarks = found["settings"], found["benchmarks"]
    least, most = int(settings["min_words"]), int(settings["ngram"]) - 1
    shorter = "Items of fewer words were left out. "
    if least <= most:
        shorter = (
            f"Items of {least} to {most} words had to occur as a whole, and shorter ones were left "
            "out. "
        )
    names = ", ".join(
        f"{name} ({counts['found']:,} items in {counts['documents']:,} documents)"
        for name, counts in benchmarks.items()
    )
    return (
        f"We compared all documents with all test items by n-grams of {settings['ngram']} words, "
        "after Unicode compatibility decomposition (NFKD), case folding, and removal of "
        "punctuation, symbols and white space; characters of scripts without spaces were words. "
        f"{shorter}N-grams in more than "
        f"{settings['max_items']} items or in many documents of a sample of the corpus were "
        "ignored. All matches are exact. A document was contaminated if it had at least "
        f"{100 * settings['threshold']:g}% of the n-grams of an item: {found['documents']:,} of "
        f"{found['rows']:,} documents ({found['documents'] / max(1, found['rows']):.4%}). By "
        f"benchmark: {names or 'none'}."
    )
