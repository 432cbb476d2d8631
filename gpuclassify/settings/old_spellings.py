"""The one table of older constructor spellings, of NeMo Curator's two generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuclassify.settings.checks import warn_once


@dataclass(frozen=True)
class Renamed:
    """An older spelling of today's argument `name`, whose value `convert` makes today's."""

    name: str
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Withdrawn:
    """An older argument that has no effect here; `harmless` values pass, others are refused."""

    harmless: tuple[Any, ...]
    reason: str
    is_refused: bool = True


ANY_VALUE = object()  # among `harmless`: every value passes
_ONLY_CALLED = Withdrawn((False,), "nothing is removed by finding duplicates: call remove()")
_FILES_ARE_A_JOB = Withdrawn((None, {}), "it takes a frame; Deduplicate reads and writes files")
_OF_CLUSTERS = Withdrawn(
    ("auto", None), "memory and spilling are the cluster's: see get_client", is_refused=False
)
_NO_FILES = Withdrawn((ANY_VALUE,), "a frame is given and a frame is returned")
_NO_BATCHES = Withdrawn((ANY_VALUE,), "sizes of batches are chosen by memory")
_SEMANTIC_BATCHES = (
    "batched_cosine_similarity",
    "pairwise_batch_size",
    "embedding_batch_size",
    "embedding_model_inference_batch_size",
    "embedding_max_mem_gb",
    "kmeans_max_samples_per_batch",
)
_SEMANTIC_FILES = (
    "num_files",
    "embeddings_save_loc",
    "clustering_save_loc",
    "write_embeddings_to_disk",
    "write_to_filename",
    "clustering_input_partition_size",
)
_KMEANS_ONLY = (
    *("kmeans_tol", "kmeans_init", "kmeans_n_init", "kmeans_oversampling_factor"),
    *("kmeans_fit_data_fraction", "tol", "init", "n_init", "oversampling_factor"),
    *("fit_data_fraction", "max_samples_per_batch"),
)
_OF_KMEANS = Withdrawn((ANY_VALUE,), "clusters are fitted to a sample, by scikit-learn")
_EMBEDDER_ONLY = (
    "embedding_pooling_strategy",
    "embedding_pooling",
    "embedding_max_seq_length",
    "embedding_max_chars",
    "embedding_padding_side",
)
_OF_EMBEDDER = Withdrawn((None,), "the embedder decides it: pass embedder=Embedder(...) with it")
_TOKENS_ARE_SHARED = "tokens are never stored in the dataset"
_PROMPTS_ARE_NOT_STORED = "prompts are never stored in the dataset"

_NAME_ALONE = Withdrawn((ANY_VALUE,), "it names a stage")
_NO_IDS = Withdrawn((False,), "ids are columns of the input")


def _bytes_of(size: int | str) -> int:
    """Bytes of a size such as "256MB"."""
    from dask.utils import parse_bytes

    return parse_bytes(size)


def _storage_options_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is for fsspec among arguments that were pandas's."""
    if others := sorted(set(given) - {"storage_options", "lines", "orient", "force_ascii"}):
        raise TypeError(f"{others} are arguments of pandas, which is not what reads and writes")
    return given.get("storage_options")


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
    ("aegis", "aegis_variant"): Renamed("model"),
    ("aegis", "pred_column"): Renamed("label_field"),
    ("aegis", "raw_pred_column"): Renamed("raw_field"),
    ("aegis", "raw_output_field"): Renamed("raw_field"),
    ("aegis", "keep_raw_pred"): Renamed("keep_raw"),
    ("aegis", "keep_raw_output"): Renamed("keep_raw"),
    ("aegis", "aegis_prompt_field"): Withdrawn((None,), _PROMPTS_ARE_NOT_STORED),
    ("aegis", "keep_aegis_prompt_field"): Withdrawn((False,), _PROMPTS_ARE_NOT_STORED),
    ("guard", "pred_column"): Renamed("label_field"),
    ("guard", "prob_column"): Renamed("score_field"),
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
    ("checkpoint", "has_seq_order"): Renamed("sort_by_length"),
    ("reader", "file_paths"): Renamed("paths"),
    ("reader", "input_files"): Renamed("paths"),
    ("reader", "columns"): Renamed("fields"),
    ("reader", "blocksize"): Renamed("part_bytes", _bytes_of),
    ("reader", "read_kwargs"): Renamed("storage_options", _storage_options_of),
    ("reader", "files_per_partition"): Withdrawn(
        (None,), "files are cut into parts of part_bytes=", is_refused=False
    ),
    ("reader", "add_filename"): Withdrawn((False,), "rows do not know their file"),
    ("reader", "input_meta"): Withdrawn((None,), "types= of JsonlReader gives columns their types"),
    ("reader", "task_type"): Withdrawn(("document",), "documents are all that is read"),
    ("reader", "file_extensions"): Withdrawn((None,), "paths= names the files, also as a glob"),
    ("reader", "name"): _NAME_ALONE,
    ("reader", "_generate_ids"): _NO_IDS,
    ("reader", "_assign_ids"): _NO_IDS,
    ("writer", "output_path"): Renamed("path"),
    ("writer", "write_kwargs"): Renamed("storage_options", _storage_options_of),
    ("writer", "write_to_filename"): Withdrawn((False,), "a part is a file"),
    ("writer", "keep_filename_column"): Withdrawn((False,), "all columns are written"),
    ("writer", "partition_on"): Withdrawn((None,), "a part is a file"),
    ("writer", "file_extension"): Withdrawn(("jsonl", "parquet"), "the format is the class's"),
    ("writer", "fields"): Withdrawn(
        (None,), "all columns are written: add a stage such as lambda frame: frame[fields] before"
    ),
    ("writer", "mode"): Withdrawn(
        ("ignore", "error"), "nothing is written over: run(restart=True) starts anew"
    ),
    ("writer", "name"): _NAME_ALONE,
    ("cluster", "scheduler_address"): Renamed("address"),
    ("cluster", "enable_spilling"): Renamed("enable_cudf_spill"),
    ("cluster", "set_torch_to_use_rmm"): Withdrawn(
        (False,), "torch has its own share of a GPU: see torch_memory_fraction", is_refused=False
    ),
    ("cluster", "nvlink_only"): Withdrawn((False,), "workers exchange little", is_refused=False),
    **{
        (family, name): spelling
        for family in ("exact", "fuzzy", "semantic")
        for name, spelling in {
            "logger": _NO_FILES,
            "cache_dir": _NO_FILES,
            "cache_path": _NO_FILES,
            "profile_dir": _NO_FILES,
            "perform_removal": _ONLY_CALLED,
            "assign_id": Withdrawn((True,), "without id_field= positions are the ids"),
            "normalize_text": Withdrawn((False,), "texts are compared as they are"),
            "input_path": _FILES_ARE_A_JOB,
            "output_path": _FILES_ARE_A_JOB,
            "input_filetype": _FILES_ARE_A_JOB,
            "input_blocksize": _FILES_ARE_A_JOB,
            "read_kwargs": _FILES_ARE_A_JOB,
            "write_kwargs": _FILES_ARE_A_JOB,
            "rmm_pool_size": _OF_CLUSTERS,
            "lsh_rmm_pool_size": _OF_CLUSTERS,
            "spill_memory_limit": _OF_CLUSTERS,
            "lsh_spill_memory_limit": _OF_CLUSTERS,
            "total_nparts": _OF_CLUSTERS,
            "lsh_num_output_partitions": _OF_CLUSTERS,
        }.items()
    },
    ("exact", "hash_method"): Withdrawn(("md5",), "texts are always compared by their MD5"),
    ("fuzzy", "num_buckets"): Renamed("bands"),
    ("fuzzy", "num_bands"): Renamed("bands"),
    ("fuzzy", "hashes_per_bucket"): Renamed("rows"),
    ("fuzzy", "minhashes_per_band"): Renamed("rows"),
    ("fuzzy", "buckets_per_shuffle"): Renamed("bands_per_pass"),
    ("fuzzy", "bands_per_iteration"): Renamed("bands_per_pass"),
    ("fuzzy", "false_positive_check"): Renamed("verify"),
    ("fuzzy", "jaccard_threshold"): Renamed("min_similarity"),
    ("fuzzy", "use_64_bit_hash"): Withdrawn((False,), "signatures have 32 bits"),
    ("fuzzy", "num_anchors"): Withdrawn((ANY_VALUE,), "texts are compared with those that stay"),
    ("semantic", "embedding_model_name_or_path"): Renamed("embedder"),
    ("semantic", "model_identifier"): Renamed("embedder"),
    ("semantic", "embedding_column"): Renamed("embedding_field"),
    ("semantic", "input_column"): Renamed("text_field"),
    ("semantic", "id_column"): Renamed("id_field"),
    ("semantic", "eps_to_extract"): Renamed("threshold", lambda eps: 1 - eps),
    ("semantic", "eps"): Renamed("threshold", lambda eps: 1 - eps),
    ("semantic", "random_state"): Renamed("seed"),
    ("semantic", "kmeans_random_state"): Renamed("seed"),
    ("semantic", "kmeans_max_iter"): Renamed("max_iter"),
    ("semantic", "sim_metric"): Withdrawn(("cosine",), "similarity is the cosine"),
    ("semantic", "distance_metric"): Withdrawn(("cosine",), "similarity is the cosine"),
    ("semantic", "which_to_keep"): Withdrawn(
        (None,), "keep_by= names the columns that decide", is_refused=False
    ),
    ("semantic", "ranking_strategy"): Withdrawn((None,), "keep_by= names the columns that decide"),
    **{("semantic", name): _NO_BATCHES for name in _SEMANTIC_BATCHES},
    **{("semantic", name): _OF_KMEANS for name in _KMEANS_ONLY},
    **{("semantic", name): _NO_FILES for name in _SEMANTIC_FILES},
    **{("semantic", name): _OF_EMBEDDER for name in _EMBEDDER_ONLY},
}


def modern_spellings(owner: str, family: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with the older spellings of `OLD_SPELLINGS` replaced by today's names.

    Raises TypeError if one is given in two spellings, or has no effect any more; the message shows
    no token.
    """
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        spelling = OLD_SPELLINGS.get((family, name)) or OLD_SPELLINGS.get(("*", name))
        if isinstance(spelling, Withdrawn):
            if not (value in spelling.harmless or ANY_VALUE in spelling.harmless):
                message = f"{owner}: {name}={value!r} has no effect, because {spelling.reason}"
                if spelling.is_refused:
                    raise TypeError(f"{message}. Leave it out.")
                warn_once(message)
            continue
        today = spelling.name if spelling else name
        if today in given or (today != name and today in arguments):
            raise TypeError(f"{owner} got {today!r} twice: {name!r} is an older spelling of it")
        convert = spelling.convert if spelling else None
        given[today] = value if convert is None or value is None else convert(value)
    return given
