"""The one table of older constructor spellings, of NeMo Curator's two generations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
_PROMPTS_ARE_NOT_STORED = "prompts are never stored in the dataset"

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
}


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


def _pass_or_refuse(owner: str, name: str, value: Any, spelling: Withdrawn) -> None:
    if value in spelling.harmless:
        return
    message = f"{owner}: {name}={value!r} has no effect, because {spelling.reason}"
    if spelling.is_refused:
        raise TypeError(f"{message}. Leave it out.")
    warnings.warn(message, UserWarning, stacklevel=4)
