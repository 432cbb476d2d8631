"""Older spellings of arguments, from NeMo Curator's two generations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuclassify.settings.checks import warn_once


@dataclass(frozen=True)
class Renamed:
    """Argument of NeMo Curator that is called `name` in this package.

    `convert` converts an old value other than None to the new one; without it, values stay.
    """

    name: str
    convert: Callable[[Any], Any] | None = None
    implied: tuple[tuple[str, Any], ...] = ()  # other arguments, unless they are passed


@dataclass(frozen=True)
class Withdrawn:
    """Argument of NeMo Curator that has no equivalent in this package.

    Values in `harmless` are ignored; others raise TypeError, or only warn if not `is_refused`.
    """

    harmless: tuple[Any, ...]
    reason: str
    is_refused: bool = True


ANY_VALUE = object()  # marks in `harmless` that all values are ignored
_ANY = (ANY_VALUE,)
_NORMALIZED = Renamed("normalize", lambda flag: ("case", "white_space") if flag else None)
_BY_CHARACTERS = (("compare_by", "characters"),)
# Spellings of NeMo Curator's Dask generation (0.x) and of its stages (1.x), by family ("*" for all
# families): renamed and removed arguments.
_RENAMED = {
    "*": "device_type=device hf_token=token model_inference_batch_size=batch_size",
    "aegis": "aegis_variant=model pred_column=label_field raw_pred_column=raw_field "
             "raw_output_field=raw_field keep_raw_pred=keep_raw keep_raw_output=keep_raw",
    "guard": "pred_column=label_field prob_column=score_field",
    "checkpoint": "model_identifier=model pred_column=label_field prob_column=score_field "
                  "has_seq_order=sort_by_length",
    "category": "pred_column=label_field prob_column=score_field",
    "education": "pred_column=score_field float_score_field=score_field "
                 "int_column=int_score_field quality_label_column=label_field",
    "reader": "file_paths=paths input_files=paths columns=fields",
    "writer": "output_path=path",
    "cluster": "scheduler_address=address enable_spilling=enable_cudf_spill",
    "fuzzy": "num_buckets=bands num_bands=bands hashes_per_bucket=rows minhashes_per_band=rows "
             "buckets_per_shuffle=bands_per_pass bands_per_iteration=bands_per_pass",
    "semantic": "embedding_model_name_or_path=embedder model_identifier=embedder "
                "embedding_column=embedding_field input_column=text_field id_column=id_field "
                "random_state=seed kmeans_random_state=seed kmeans_max_iter=max_iter",
}  # fmt: skip
_DUPLICATES = "exact fuzzy semantic"
_FRAMES = "a frame goes in and a frame comes back"
_BATCHES = "sizes of batches are chosen by memory"
# Families, names, harmless values, and the reason to refuse others.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("*", "keep_tokens use_existing_tokens", (False,), "tokens are never columns"),
    ("aegis", "aegis_prompt_field keep_aegis_prompt_field", (None, False), "they are not stored"),
    ("prompts", "filter_by", (None, (), []), "prompts have several labels: compare the columns"),
    ("reader", "input_meta", (None,), "types= of JsonlReader gives columns their types"),
    ("reader", "task_type", ("document",), "documents are all that is read"),
    ("reader", "file_extensions", (None,), "paths= names the files, also as a glob"),
    ("reader", "_generate_ids _assign_ids", (False,), "name a column of ids, or use Deduplicate"),
    ("reader writer", "name", _ANY, "it names a stage"),
    ("writer", "fields", (None,), "add a stage before it, such as lambda frame: frame[fields]"),
    ("writer", "file_extension", ("jsonl", "parquet"), "the format is the class's"),
    (_DUPLICATES, "logger cache_dir cache_path profile_dir", _ANY, _FRAMES),
    (_DUPLICATES, "perform_removal", (False,), "nothing is removed by finding: call remove()"),
    (_DUPLICATES, "assign_id", (True,), "without id_field= positions are the ids"),
    (_DUPLICATES, "input_path output_path input_filetype input_blocksize read_kwargs write_kwargs",
     (None, {}), "it takes a frame; Deduplicate reads and writes files"),
    ("exact", "hash_method", ("md5",), "texts are always compared by their MD5"),
    ("fuzzy", "use_64_bit_hash", (False,), "signatures have 32 bits"),
    ("fuzzy", "num_anchors", _ANY, "texts are compared with those that stay"),
    ("fuzzy", "bucket_mapping_blocksize parts_per_worker bucket_parts_per_worker", _ANY, _BATCHES),
    ("semantic", "sim_metric distance_metric", ("cosine",), "similarity is the cosine"),
    ("semantic", "which_to_keep ranking_strategy", (None,), "keep_by= names columns that decide"),
    ("semantic", "batched_cosine_similarity pairwise_batch_size embedding_batch_size "
     "embedding_model_inference_batch_size embedding_max_mem_gb kmeans_max_samples_per_batch",
     _ANY, _BATCHES),
    ("semantic", "kmeans_tol kmeans_init kmeans_n_init kmeans_oversampling_factor tol init n_init "
     "kmeans_fit_data_fraction oversampling_factor fit_data_fraction max_samples_per_batch", _ANY,
     "clusters are fitted to a sample, by scikit-learn"),
    ("semantic", "num_files embeddings_save_loc clustering_save_loc write_embeddings_to_disk "
     "write_to_filename clustering_input_partition_size", _ANY, _FRAMES),
    ("semantic", "embedding_pooling_strategy embedding_pooling embedding_max_seq_length "
     "embedding_max_chars embedding_padding_side", (None,), "pass embedder=Embedder(...) with it"),
)  # fmt: skip
# Same columns as `_REFUSED`, for arguments without effect on results; other values only warn.
_WARNED = (
    ("*", "max_mem_gb", (None,), "batches are sized by the memory that is measured to be free"),
    ("cluster", "set_torch_to_use_rmm", (False,), "see torch_memory_fraction for torch's share"),
    ("cluster", "nvlink_only", (False,), "workers exchange little"),
    (_DUPLICATES, "rmm_pool_size lsh_rmm_pool_size spill_memory_limit lsh_spill_memory_limit "
     "total_nparts lsh_num_output_partitions", ("auto", None), "see get_client for memory"),
)  # fmt: skip


def _bytes_of(size: int | str) -> int:
    from dask.utils import parse_bytes

    return parse_bytes(size)


# Arguments of pandas that are redundant, or have another name here.
_REDUNDANT = {
    **{"lines": (True,), "orient": ("records",), "force_ascii": (False,), "chunksize": (None,)},
    **{"compression": ("infer",), "encoding": (None, "utf-8", "utf8")},
}
_OTHER_NAMES = {
    **{"columns": "fields= of the reader", "dtype": "types= of JsonlReader"},
    **{
        "compression": "compression= of the writer",
        "partition_cols": "partition_by= of the writer",
    },
}


def _storage_options_of(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``storage_options`` of arguments for pandas; raise TypeError for most others."""
    others = {name: value for name, value in arguments.items() if name != "storage_options"}
    wrong = sorted(name for name, value in others.items() if value not in _REDUNDANT.get(name, ()))
    if wrong:
        values = ", ".join(f"{name}={others[name]!r}" for name in wrong)
        today = " and ".join(_OTHER_NAMES[name] for name in wrong if name in _OTHER_NAMES)
        raise TypeError(
            f"{wrong} are arguments of pandas, which is not what reads and writes: leave {values} "
            f"out{today and f', and pass {today}'}"
        )
    return arguments.get("storage_options")


# Replacements by (family, older name).
OLD_SPELLINGS: dict[tuple[str, str], Renamed | Withdrawn] = {
    ("reader", "blocksize"): Renamed("part_bytes", _bytes_of),
    ("reader", "read_kwargs"): Renamed("storage_options", _storage_options_of),
    ("writer", "write_kwargs"): Renamed("storage_options", _storage_options_of),
    ("exact", "normalize_text"): _NORMALIZED,
    ("fuzzy", "normalize_text"): _NORMALIZED,
    ("fuzzy", "false_positive_check"): Renamed("verify", implied=_BY_CHARACTERS),
    ("fuzzy", "jaccard_threshold"): Renamed("min_similarity", implied=_BY_CHARACTERS),
    ("semantic", "eps_to_extract"): Renamed("threshold", lambda eps: 1 - eps),
    ("semantic", "eps"): Renamed("threshold", lambda eps: 1 - eps),
}
for _family, _pairs in _RENAMED.items():
    for _old, _, _today in (pair.partition("=") for pair in _pairs.split()):
        OLD_SPELLINGS[_family, _old] = Renamed(_today)
for _is_refused, _rows in ((True, _REFUSED), (False, _WARNED)):
    for _families, _names, _harmless, _reason in _rows:
        for _key in itertools.product(_families.split(), _names.split()):
            OLD_SPELLINGS[_key] = Withdrawn(_harmless, _reason, _is_refused)


def modern_spellings(owner: str, family: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arguments` with NeMo Curator's names and values replaced by this package's.

    `family`, such as "reader", selects the replacements; other arguments stay. Arguments without
    effect are dropped, some with a warning. Raises TypeError if an argument is passed under two
    names, or is not supported. The message never shows a Hub token.
    """
    renamed: dict[str, Any] = {}
    implied: dict[str, Any] = {}
    for name, value in arguments.items():
        spelling = OLD_SPELLINGS.get((family, name)) or OLD_SPELLINGS.get(("*", name))
        if isinstance(spelling, Withdrawn):
            if not (value in spelling.harmless or ANY_VALUE in spelling.harmless):
                argument = f"{owner}: {name}={value!r}"
                if spelling.is_refused:
                    raise TypeError(f"{argument} is not supported: {spelling.reason}")
                warn_once(f"{argument} has no effect, because {spelling.reason}")
            continue
        today = spelling.name if spelling else name
        if today in renamed or (today != name and today in arguments):
            raise TypeError(f"{owner} got {today!r} twice: {name!r} is an older spelling of it")
        convert = spelling.convert if spelling else None
        renamed[today] = value if convert is None or value is None else convert(value)
        implied |= dict(spelling.implied if spelling else ())
    return implied | renamed
