"""Which way to compute DeBERTa's attention is fastest on this device?

By blocks of matrix products, as one compiled kernel of torch's flex_attention, and by looking up
each pair of tokens, for texts of one length; heads and sizes are those of DeBERTa-v3-base.
``python -m benchmarks.attention --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from gpuclassify.inference.packed.disentangled import (
    DisentangledAttention,
    PositionTables,
    RelativePositions,
)
from gpuclassify.inference.packed.fused_attention import FusedAttention
from gpuclassify.inference.packed.layout import Layout

QUESTION = "attention"
HEADS, SIZE, BUCKETS, REACH = 12, 64, 256, 512
SCALE = (3 * SIZE) ** -0.5
TOLERANCE = 1e-4
BLOCKS, FUSED, LOOKED_UP = "blocks of products", "flex_attention", "pair by pair"


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--tokens", type=int, default=2_048, help="of a batch (2048)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 300, 128, 64, 24])
    options = parse(parser, arguments)
    result = begin(options, heads=HEADS, head_size=SIZE, buckets=BUCKETS, dtype="float32")
    result["lengths"] = {str(length): measure(length, options) for length in options.lengths}
    return finish(QUESTION, result, options, table)


def measure(length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Findings for texts of one length."""
    device = torch.device(options.device)
    texts = max(1, options.tokens // length)
    torch.manual_seed(0)
    states = [torch.randn(1, texts * length, HEADS * SIZE, device=device) for _ in range(3)]
    tables = PositionTables(
        *(torch.randn(HEADS, 2 * BUCKETS, SIZE, device=device) * SCALE for _ in range(2))
    )
    buckets = make_log_bucket_position(torch.arange(1 - length, length), BUCKETS, REACH).long()
    places = (buckets + BUCKETS).clamp(0, 2 * BUCKETS - 1).to(device)
    positions = RelativePositions(places, int(places.min()), int(places.max()))
    layout = Layout(np.full(texts, length), length, device)
    ways = {
        BLOCKS: functools.partial(attend, DisentangledAttention, layout, positions, tables, states),
        FUSED: functools.partial(attend, FusedAttention, layout, positions, tables, states),
        LOOKED_UP: functools.partial(look_up, texts, positions, tables, states),
    }
    variants = [Variant(name, run=way, warm_up=way) for name, way in ways.items()]
    run = run_interleaved(variants, options.repeats, TOLERANCE)
    return {
        "texts": texts,
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in ways},
    }


@torch.inference_mode()
def attend(
    kind: type[DisentangledAttention],
    layout: Layout,
    positions: RelativePositions,
    tables: PositionTables,
    states: Sequence[torch.Tensor],
) -> np.ndarray:
    """By gpuclassify, float32 (tokens, heads * size)."""
    attention = kind(layout, positions)
    given = (by_head(attention.pad(own)) for own in states)
    return attention(*given, tables, SCALE)[0, : states[0].shape[1]].cpu().numpy()


@torch.inference_mode()
def look_up(
    texts: int, positions: RelativePositions, tables: PositionTables, states: Sequence[torch.Tensor]
) -> np.ndarray:
    """By a gather for each relative term, one text at a time, float32 (tokens, heads * size)."""
    occurring = slice(positions.first, positions.last + 1)
    length = states[0].shape[1] // texts
    columns = torch.arange(length, device=states[0].device)
    distances = columns[:, None] - columns + length - 1
    index = (positions.by_distance - positions.first)[distances].expand(HEADS, -1, -1)
    outputs = []
    for query, key, value in zip(
        *(own.unflatten(1, (texts, -1))[0] for own in states), strict=True
    ):
        q, k, v = (by_head(own[None])[0] for own in (query, key, value))
        bias = torch.bmm(q, tables.keys[:, occurring].mT).gather(-1, index)
        bias += torch.bmm(tables.queries[:, occurring], k.mT).gather(1, index)
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=SCALE))
    return torch.cat(outputs, 1).transpose(0, 1).flatten(1).cpu().numpy()


def by_head(states: torch.Tensor) -> torch.Tensor:
    """(1, tokens, heads * size) as (1, heads, tokens, size)."""
    return states.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    lines = [f"milliseconds, medians of {result['settings']['repeats']}"]
    for length, found in result["lengths"].items():
        times = ", ".join(
            f"{name} {own['median_seconds'] * 1e3:.1f}" for name, own in found["variants"].items()
        )
        lines.append(f"{found['texts']:4} texts of {length:>4} tokens: {times}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
