"""Counterparts of the Dask generation's deduplication modules, which take datasets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpuclassify.classifiers.embedder import Embedder
from gpuclassify.corpus.dedup import exact, fuzzy, semantic
from gpuclassify.corpus.dedup.removal import remove_duplicates
from gpuclassify.curator.documents import DocumentDataset
from gpuclassify.settings.checks import check_choice, warn_once


class SemDedupConfig(SimpleNamespace):
    """Settings of a semantic deduplication, as attributes with NeMo Curator's names.

    For a fuzzy deduplication, the same class is called `FuzzyDuplicatesConfig`. `cache_dir` is
    ignored, because the modules take and return frames.
    """

    num_files = -1  # all files

    def __init__(self, cache_dir: str, **settings: Any) -> None:
        super().__init__(cache_dir=cache_dir, **settings)


FuzzyDuplicatesConfig = SemDedupConfig


class ExactDuplicates:
    """NeMo Curator's module that finds documents with equal texts in a `DocumentDataset`.

    A call returns a dataset that lists the duplicates or, with `perform_removal`, the documents
    without duplicates. `options` are settings of `gpuclassify.ExactDuplicates`, whose ``id_field``
    is "id" by default.
    """

    settings_type: Any = exact.ExactDuplicates

    def __init__(self, *, perform_removal: bool = False, **options: Any) -> None:
        self.settings = self.settings_type(**{"id_field": "id"} | options)
        self.perform_removal = perform_removal

    def __call__(self, dataset: DocumentDataset) -> DocumentDataset:
        """Return a listing of duplicates or, with `perform_removal`, the dataset without them."""
        duplicates = self.identify_duplicates(dataset)
        return self.remove(dataset, duplicates) if self.perform_removal else duplicates

    def identify_duplicates(self, dataset: DocumentDataset) -> DocumentDataset:
        """Return a listing of the documents that have duplicates, the kept ones included.

        It has their ids, the column ``group`` with an id that is common to duplicates, and the
        column ``keep``, which is true for one document of each group.
        """
        return DocumentDataset(self.settings(dataset.df))

    def remove(
        self, dataset: DocumentDataset, duplicates_to_remove: DocumentDataset
    ) -> DocumentDataset:
        """Return the dataset without the documents that `duplicates_to_remove` lists.

        The listing has ids as its only column, or a column ``keep``; then documents with a true
        value in it stay.
        """
        duplicates = duplicates_to_remove.df
        if list(duplicates.columns) == [self.settings.id_field]:
            duplicates = duplicates.assign(keep=False)
        return DocumentDataset(remove_duplicates(dataset.df, duplicates))


class FuzzyDuplicates(ExactDuplicates):
    """NeMo Curator's module that finds near-duplicates by MinHash, with Curator's defaults.

    `config` has settings of `gpuclassify.FuzzyDuplicates` as attributes. `logger` is ignored. With
    `perform_removal`, a call returns the documents without duplicates.
    """

    settings_type = fuzzy.FuzzyDuplicates

    def __init__(
        self, config: object, logger: object = None, perform_removal: bool = False
    ) -> None:
        shape = {"num_buckets": 20, "hashes_per_bucket": 13, "false_positive_check": False}
        super().__init__(**shape | vars(config) | {"perform_removal": perform_removal})


class SemDedup(ExactDuplicates):
    """NeMo Curator's module that finds duplicates by embeddings, with Curator's defaults.

    `config` has settings of `gpuclassify.SemanticDuplicates` and of the embedding model as
    attributes; `options` are the same settings by name, and override `config`. `input_column` has
    the texts, and `id_column` the ids. The document with the smallest id is kept, whatever
    ``which_to_keep`` says; a warning says so.
    """

    settings_type = semantic.SemanticDuplicates

    def __init__(
        self, config: object, input_column: str = "text", id_column: str = "id", **options: Any
    ) -> None:
        settings = {"eps_to_extract": 0.01, "n_clusters": 1000, **vars(config), **options}
        model = settings.pop("embedding_model_name_or_path", Embedder.defaults["model"])
        poolings: dict[str, Any] = {"mean_pooling": "mean", "last_token": "last"}
        strategy = settings.pop("embedding_pooling_strategy", "mean_pooling")
        check_choice("embedding_pooling_strategy", strategy, tuple(poolings))
        rank = settings.pop("which_to_keep", "hard")
        warn_once(f"SemDedup: which_to_keep={rank!r} is not followed: the smallest id is kept")
        settings.pop("embedding_column", None)  # only for files between steps
        settings["embedder"] = Embedder(
            model=model, pooling=poolings[strategy], text_field=input_column
        )
        super().__init__(text_field=input_column, id_field=id_column, **settings)

    def identify_duplicates(self, dataset: DocumentDataset) -> DocumentDataset:
        """Return a listing of the documents to remove, without the documents to keep.

        It has the columns of `ExactDuplicates.identify_duplicates`; ``keep`` is false.
        """
        duplicates = super().identify_duplicates(dataset)
        return duplicates[~duplicates["keep"].astype(bool)]
