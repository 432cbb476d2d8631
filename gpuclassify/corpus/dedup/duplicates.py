"""Base classes of exact, fuzzy and semantic deduplication: settings, calls and removal."""

from __future__ import annotations

import functools
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.corpus.dedup.corpus import (
    MEMBERS_GATHERED,
    Corpus,
    are_rounded,
    by_partition,
    check_comparable,
    like,
    shuffle,
    value_texts,
)
from gpuclassify.corpus.dedup.groups import LENGTH, decide, listed, take_members
from gpuclassify.corpus.dedup.normalizing import PRESETS, STEPS, as_steps, normalized
from gpuclassify.corpus.dedup.removal import (
    ID,
    PARTITIONS,
    POSITIONS,
    check_single,
    drop_documents,
    numbered_ids,
    refuse_repeated,
    removed,
)
from gpuclassify.corpus.dedup.summary import (
    DuplicatesSummary,
    count_decisions,
    count_documents,
    refuse,
    summarize,
)
from gpuclassify.frames import Frame, LazyFrame, backend_of, to_pandas
from gpuclassify.frames.lazy import as_dask
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.settings.checks import install, nearest
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.old_spellings import modern_spellings
from gpuclassify.settings.signatures import Public, show_settings

Settings = TypeVar("Settings", bound="type[Duplicates]")
# ``keep(name, frame)`` returns the frame, or writes it and returns one that reads the result.
Keep = Callable[[str, dd.DataFrame], dd.DataFrame]
RESULT_FIELDS = ("group", "keep", "similarity", "is_earlier", PARTITIONS)
SYNC = {"scheduler": "sync"}


def accepts_old_spellings(family: str) -> Callable[[Settings], Settings]:
    """Return a class decorator that lets a class accept old argument names.

    `family` is "exact", "fuzzy" or "semantic".
    """

    def decorate(settings: Settings) -> Settings:
        create = settings.__init__

        @functools.wraps(create)
        def init(self: Any, **arguments: Any) -> None:
            create(self, **modern_spellings(settings.__name__, family, arguments))

        settings.__init__ = init  # type: ignore[method-assign]
        show_settings(settings, settings, {})
        return settings

    return decorate


@declared
class Duplicates(Declared, Public):
    """Settings common to exact, fuzzy and semantic duplicates.

    Parameters
    ----------
    text_field : str
        Column of the text. Null and empty texts are never duplicates.
    id_field : str, optional
        Column that identifies documents: strings or integers, none null, none twice. Default:
        ``id``, if the frame has such a column, else positions in the frame. Positions are
        ``partition << 40 | row``, in a column ``id``, with a column ``partitions`` by which
        `remove_duplicates` recognizes the partitions. They are in a column ``position`` if the
        frame has a column ``id`` of another type, such as strings with dtype object, or one with
        null or repeated values. Such values are detected at the call of a plain frame, and at the
        start of a job of files; a lazy frame with them raises when the result is computed.
    keep_by : sequence of str
        Columns; the document with the largest value stays. "length" is the text's length in
        characters, unless the frame has a column of that name. The first column decides, then the
        next; null comes last, and the smallest id breaks ties.
    by : str, optional
        Column, such as a source or a language; documents with different values are no duplicates.
        Null is a value, too.
    source_field : str, optional
        Column; a summary shows the share removed for each of its values. Default: `by`.
    max_removed_share : float, optional
        Maximum share of removed documents, 0 to 1, overall and in each source of 1,000 documents or
        more; a larger one raises an error.
    max_group_size : int, optional
        Maximum documents of a group; a larger one raises an error.
    """

    text_field: str = "text"
    id_field: str | None = None
    keep_by: str | Sequence[str] = setting(
        default=(), is_tuple=True, what="the name of a column, or a list of such", metavar="COLUMN"
    )
    by: str | None = None
    source_field: str | None = None
    max_removed_share: float | None = setting(default=None, is_share=True, changes_results=False)
    max_group_size: int | None = setting(default=None, changes_results=False)

    public_names: ClassVar[tuple[str, ...]] = ("remove", "summarize")
    has_similarity: ClassVar[bool] = False  # whether the result has a column "similarity"
    libraries: ClassVar[tuple[str, ...]] = ()  # packages that the class needs

    def check_together(self) -> None:
        """Refuse an `id_field` that the result uses; set `source_field` to `by` if it is unset."""
        if self.id_field in RESULT_FIELDS:
            raise ValueError(
                f"id_field={self.id_field!r} is a column of the result, which has "
                f"{', '.join(RESULT_FIELDS)}: rename the column of ids"
            )
        if self.source_field is None:
            self._set("source_field", self.by)

    @abstractmethod
    def find_components(self, corpus: Corpus, keep: Keep) -> dd.DataFrame:
        """Find sets of documents that may be duplicates of each other.

        The lazy result has columns ``document`` and ``root`` (int64), both document numbers
        (``partition << 40 | row``). Documents with equal roots are a set. The root is one of them,
        and has one or more rows, too. Documents in no set have no row. If there is a column
        ``similarity``, the root is the document that stays. ``keep(name, frame)`` is called for
        intermediate frames and the result: it may write a frame to files, and returns the frame to
        go on with.
        """

    def __call__(
        self, dataset: Frame | LazyFrame, *, against: Frame | LazyFrame | None = None
    ) -> Any:
        """Find the duplicates in `dataset`.

        When the result is computed, a frame that only reads files is read several times: for
        signatures, for comparisons, and for checks of ids and limits. Any other frame is computed
        once, and its partitions stay in memory: write it to files first if it is larger than the
        memory of the cluster.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
        against : same type as `dataset`, optional
            An earlier corpus. Its documents stay, and their duplicates in `dataset` go. Documents
            of both are listed, and ``is_earlier`` tells them apart.

        Returns
        -------
        same type as `dataset`
            Documents in groups of two or more, lazy for Dask input: the id, ``group`` (the
            smallest id in the group), ``keep`` (bool, true once in a group); for fuzzy and
            semantic duplicates also ``similarity`` (float32) to the document that is kept; with
            `against` also ``is_earlier`` (bool); for positions as ids also ``partitions`` (int64).

        Raises
        ------
        TypeError
            The dataset is not a frame, or the text column does not hold strings.
        ValueError
            A column is missing or already in use. When computed: ids are null or not unique, or
            `max_removed_share` or `max_group_size` is exceeded.
        ModuleNotFoundError
            A package that the class needs is missing.
        """
        corpus, settings = self.corpus(dataset, against), self.with_ids(dataset, against)
        listing = like(dataset, settings.listing(corpus, settings._approved(corpus)))
        return listing if isinstance(dataset, dd.DataFrame) else listing.reset_index(drop=True)

    def remove(
        self, dataset: Frame | LazyFrame, *, against: Frame | LazyFrame | None = None
    ) -> Any:
        """Drop the duplicates that are not kept from `dataset`; nothing else changes.

        The result has the type of `dataset`, lazy for Dask. `against` is an earlier corpus of the
        same type: its documents stay, and their duplicates in `dataset` go. Input files are read
        once more than by `__call__`. Raises the errors of `__call__`.
        """
        corpus, settings = self.corpus(dataset, against), self.with_ids(dataset, against)
        decisions = settings._approved(corpus)[["document", "keep", "is_earlier"]]
        gone = decisions.map_partitions(removed, meta=removed(decisions._meta))
        return like(dataset, drop_documents(corpus.dataset, gone))

    def summarize(
        self, dataset: Frame | LazyFrame, *, against: Frame | LazyFrame | None = None
    ) -> DuplicatesSummary:
        """Count duplicates by source, and list the largest groups; computes when called.

        `against` is an earlier corpus of the same type as `dataset`: its documents stay. Limits and
        repeated ids are not checked.
        """
        corpus, settings = self.corpus(dataset, against), self.with_ids(dataset, against)
        counted = settings.count(corpus, settings.decisions(corpus))
        return counted.compute(**({} if isinstance(dataset, dd.DataFrame) else SYNC))

    def corpus(self, dataset: Any, against: Any = None) -> Corpus:
        """Return a dataset and an earlier corpus as lazy frames, after checking their columns."""
        for name in self.libraries:
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(
                    f"{type(self).__name__} needs {name}, which is not here: {install('dedup')}",
                    name=name,
                )
        corpus = Corpus(as_dask(dataset), None if against is None else as_dask(against))
        for frame in (dataset, against):
            if frame is not None:
                self._check(getattr(frame, "_meta", frame))
        if corpus.earlier is not None:
            self._check_types(corpus)
        return corpus

    def with_ids(self, dataset: Any, against: Any = None) -> Self:
        """Return settings with `id_field` set to ``id``, if it is unset and all frames have ids.

        Ids are integers, or strings with a string dtype, and in a plain frame unique and not null;
        a lazy frame's values are not checked. If frames have no ids, or ids of different types, the
        settings are returned unchanged, and positions identify documents. Raises ValueError if
        `dataset` then has no free column name for positions.
        """
        frames = [getattr(frame, "_meta", frame) for frame in (dataset, against)]
        frames = [frame for frame in frames if frame is not None]
        if self.id_field is not None:
            return self
        if all(map(_has_ids, frames)):
            ids = [*map(_ids_of, frames)]
            have_one_kind = len(set(map(_is_number, ids))) == 1
            if have_one_kind and not are_rounded(*(array.dtype for array in ids)):
                return replace(self, id_field=ID)
        self._position_field(frames[0])
        return self

    def _position_field(self, frame: Frame) -> str:
        for name in POSITIONS:
            if name not in frame.columns:
                return name
        raise ValueError(
            "without id_field= documents are named by position in a column "
            f"{' or '.join(map(repr, POSITIONS))}, and the frame has both: pass id_field=, or "
            "rename one of them"
        )

    def decisions(self, corpus: Corpus, keep: Keep | None = None) -> dd.DataFrame:
        """Decide which documents stay; return a lazy frame of all candidates for duplicates.

        Its columns are described in `gpuclassify.corpus.dedup.groups.decide`. `keep` is as in
        `find_components`; None writes nothing.
        """
        keep = keep or (lambda name, frame: frame)
        components = self.find_components(corpus, keep)
        moved = by_partition(components, corpus.npartitions)
        moved_parts = moved.to_delayed(optimize_graph=False)
        columns = self.member_fields(corpus)
        no_components = components._meta.set_index("document")
        meta = take_members(corpus.empty(columns), 0, no_components, self)
        members = corpus.map(take_members, columns, moved_parts, meta=meta, settings=self)
        moved = shuffle(members, "root", MEMBERS_GATHERED)
        options: dict[str, Any] = {
            "own_partitions": corpus.own_partitions,
            "verification": self.verification,
        }
        meta = decide(meta, **options)
        return keep("decisions", moved.map_partitions(decide, meta=meta, **options))

    def listing(self, corpus: Corpus, decisions: dd.DataFrame) -> dd.DataFrame:
        """Return the list of duplicates for users, lazily, from the result of `decisions`."""
        options: dict[str, Any] = {
            "id_name": self.id_field or self._position_field(corpus.dataset),
            "has_similarity": self.has_similarity,
            "has_earlier": corpus.earlier is not None,
            "partitions": corpus.own_partitions if self.id_field is None else None,
        }
        meta = listed(decisions._meta, **options)
        return decisions.map_partitions(listed, meta=meta, **options)

    def count(self, corpus: Corpus, decisions: dd.DataFrame) -> Any:
        """Return a delayed `DuplicatesSummary` of the corpus, from the result of `decisions`."""
        plain = Corpus(corpus.dataset)
        source = self.source_field
        columns = [source or self.id_field or self.text_field]
        meta = count_documents(plain.empty(columns), 0, source)
        documents = plain.map(count_documents, columns, source_field=source, meta=meta)
        parts = decisions.to_delayed(optimize_graph=False)
        counts = [dask.delayed(count_decisions, pure=True)(part) for part in parts]
        return dask.delayed(summarize, pure=True)(
            documents.to_delayed(optimize_graph=False), counts
        )

    def refuse_repeated_ids(self, corpus: Corpus) -> list[Any]:
        """Return delayed checks that raise RepeatedIdsError if a frame has null or repeated ids."""
        checks = []
        for frame in (corpus.dataset, corpus.earlier):
            if self.id_field is not None and frame is not None:
                one, name = Corpus(frame), self.id_field
                meta = numbered_ids(one.empty([name]), 0, name)
                ids = one.map(numbered_ids, [name], id_field=name, meta=meta)
                moved = shuffle(ids, "id")
                check = dask.delayed(refuse_repeated, pure=True)
                checks += [check(part, name) for part in moved.to_delayed(optimize_graph=False)]
        return checks

    @property
    def verification(self) -> Any:
        """Settings for comparing texts of candidates; None if all candidates are duplicates."""
        return None

    @property
    def signature_fields(self) -> list[str]:
        """Names of the columns that signatures are computed from."""
        return [self.text_field, *filter(None, [self.by])]

    def mappers(self) -> list[PartitionMap]:
        """Return the mappers that compute signatures, such as an `Embedder`; empty if none do."""
        return []

    @property
    def input_fields(self) -> list[str]:
        """Names of all columns to read, except "length" in `keep_by`; names may repeat."""
        named = [self.id_field, self.source_field, *self.keep_by]
        others = [name for name in named if name not in (None, LENGTH)]
        return [*self.signature_fields, *map(str, others)]

    def member_fields(self, corpus: Corpus) -> list[str]:
        """Return the names of the columns that `take_members` reads; names may repeat."""
        ranks = [name for name in self.keep_by if name in corpus.dataset.columns]
        return [self.text_field, *filter(None, [self.id_field, self.source_field]), *ranks]

    def _approved(self, corpus: Corpus) -> dd.DataFrame:
        """Return the lazy result of `decisions`, which checks ids and limits when computed."""
        decisions = self.decisions(corpus)
        checks = self.refuse_repeated_ids(corpus)
        if self.max_removed_share is not None or self.max_group_size is not None:
            counted = self.count(corpus, decisions)
            limits = (self.max_removed_share, self.max_group_size)
            checks.append(dask.delayed(refuse, pure=True)(counted, *limits))
        if not checks:
            return decisions
        passed = dask.delayed(all, pure=True)(checks)
        return decisions.map_partitions(_after, passed, meta=decisions._meta)

    def _check_types(self, corpus: Corpus) -> None:
        """Raise TypeError unless the settings' columns have comparable types in both corpora."""
        names = {*self.input_fields, *({LENGTH} & set(self.keep_by))}
        for name in sorted(names):
            ours, theirs = (
                frame._meta[name].dtype if name in frame.columns else "nothing"
                for frame in (corpus.dataset, corpus.earlier)
            )
            corpora, are_ids = ("here", "in the earlier corpus"), name == self.id_field
            check_comparable(name, ours, theirs, *corpora, are_ids=are_ids)

    def _check(self, frame: Frame) -> None:
        known = [str(name) for name in frame.columns]
        for name in (*self.signature_fields, self.id_field, self.source_field, *self.keep_by):
            if name is not None:
                check_single(frame, name)
            if name is not None and name not in (LENGTH, *known):
                raise ValueError(
                    f"the frame has no column {name!r}.{nearest(name, known)} It has {known}"
                )
        for name in {self.id_field, self.source_field, *self.keep_by} & {*frame.columns}:
            kind = getattr(frame[name].dtype, "pyarrow_dtype", None)
            if kind is not None and pa.types.is_nested(kind):
                raise TypeError(
                    f"column {name!r} holds {kind}: ids, sources and what ranks are texts, "
                    "numbers or times; convert it, or name another column"
                )
        backend_of(frame).check_text_column(frame, self.text_field)


@declared
class TextDuplicates(Duplicates):
    """Settings common to exact and fuzzy duplicates, which compare texts.

    Parameters
    ----------
    normalize : str, sequence of str or callable, optional
        Steps or a function that normalize texts for comparison; the texts of the result do not
        change. "basic" is the steps "unicode" (NFC), "case" and "white_space"; "datatrove" is
        "case", "digits" (each number becomes 0), "punctuation", "white_space" and "accents", as in
        datatrove's ``simplify_text``. Several names combine their steps.
    """

    normalize: str | Sequence[str] | Callable[[str], str] | None = setting(
        default=None, convert=as_steps, type=(*PRESETS, *STEPS)
    )

    def compared(self, frame: Frame, column: str) -> Any:
        """Return `frame`, or with `normalize` a pandas frame of only `column`, normalized."""
        if self.normalize is None:
            return frame
        texts = normalized(backend_of(frame).text_array(frame, column), self.normalize)
        return pd.DataFrame({column: pd.arrays.ArrowExtensionArray(texts)})


def group_hashes(frame: Frame, by: str | None) -> np.ndarray:
    """Return the hash of each row's value in the column `by`, int64 (rows,).

    It is 0 for null, and for all rows if `by` is None.
    """
    hashes = np.zeros(len(frame), np.int64)
    if by is not None:
        names = value_texts(to_pandas(frame[[by]])[by])
        is_given = pd.notna(names)
        hashes[is_given] = pd.util.hash_array(names[is_given]).view(np.int64)
    return hashes


def _has_ids(frame: Frame) -> bool:
    if [*frame.columns].count(ID) != 1:
        return False
    ids = _ids_of(frame)
    is_text = pd.api.types.is_string_dtype(ids.dtype) and ids.dtype != object
    # Dask's meta has no rows, so that only the type counts.
    return (is_text or _is_number(ids)) and not ids.isna().any() and bool(ids.is_unique)


def _ids_of(frame: Frame) -> Any:
    return backend_of(frame).without_views(frame[[ID]])[ID]  # pandas refuses most calls on views


def _is_number(ids: pd.Series) -> bool:
    return pd.api.types.is_integer_dtype(ids.dtype)


def _after(decisions: pd.DataFrame, passed: object) -> pd.DataFrame:
    return decisions
