"""DeBERTa-v2's attention as one compiled kernel, used if it is measured to be faster at load."""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DebertaV2ForSequenceClassification,
)

from gpuclassify._version import installed_versions
from gpuclassify.inference.device import exclusive_device, to_device
from gpuclassify.inference.memory import CudaMemory, MeasurementFile, machine
from gpuclassify.inference.packed.disentangled import (
    DisentangledAttention,
    DisentangledEncoder,
    PositionTables,
    RelativePositions,
    position_projections,
)
from gpuclassify.inference.packed.layout import Layout, States
from gpuclassify.inference.packed.packed_layers import rms
from gpuclassify.workers.device_errors import is_broken_device, is_out_of_memory

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 128  # block size of torch's block mask
FEWEST_BLOCKS = 2  # with a single block, torch would compile for that size only
_MOST_GRAPHS = 256  # graphs of one kernel for all head shapes; torch's default limit is eight
_CHECKED_LENGTHS = (24, 9)
_CHECKED_LAYERS = 2
_TOLERANCE = 1e-6  # relative to the largest state
# Blocks of matrix products are faster on a CPU.
FUSED_DEVICES = {"cuda"}
FUSED_LENGTHS = (512,) * 16 + (384, 300, 129, 128, 60, 7, 1)
# Largest root mean square of differences from plain attention, relative to that of the states.
FUSED_TOLERANCE = 1e-5
FUSED_HALF_TOLERANCE = 0.02


class Kernel(NamedTuple):
    """Choice of a kernel of attention (`is_own`), and its block sizes, warps and stages.

    `query_tokens` and `key_tokens` are a block's queries and keys. 0 leaves a number to torch,
    which only the kernel of flex_attention allows.
    """

    query_tokens: int = 0
    key_tokens: int = 0
    warps: int = 0
    stages: int = 0
    is_own: bool = False  # whether it is `kernels.attend`, not the kernel of flex_attention

    def options(self) -> dict[str, int]:
        """Return the numbers that are not 0, by name, as flex_attention's ``kernel_options``."""
        names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        return {name: value for name, value in zip(names, self, strict=False) if value}


# Candidate kernels by item size in bytes. They hardly spill registers on sm_80 to sm_90, where
# torch's choice spills thousands of bytes, and fit these GPUs' minimum of 99 KB shared memory. On
# an H200, three other kernels in 16 bits were slower and took 1 to 2 seconds each to compile.
KERNELS = {
    2: (
        *(Kernel(64, 64, 8, 2), Kernel(64, 64, 8, 3)),
        *(Kernel(128, 32, 8, 3, is_own=True), Kernel(64, 64, 8, 2, is_own=True)),
    ),
    4: (Kernel(32, 32, 4, 2), Kernel(32, 32, 8, 2), Kernel(32, 64, 8, 2)),
}
_kernels: dict[tuple[Any, ...], Kernel | None] = {}  # key: device, dtype, heads, head size, terms


def speed_up_deberta(module: nn.Module, is_first_enough: bool = False) -> None:
    """Speed up each DeBERTa-v2 encoder within `module`, by changing its class.

    Weights and their names do not change. An encoder whose outputs would differ from transformers',
    or that has no relative attention, keeps its class. On a GPU, the fastest kernel of attention is
    measured. The module must be on the device where it will run. `is_first_enough` means that only
    each row's first token of the last states is read; it is always set for transformers' sequence
    classifiers.
    """
    for encoder in module.modules():
        if type(encoder) is DebertaV2Encoder and encoder.relative_attention:
            # Only the class changes: building another module would rename or copy the weights.
            encoder.__class__ = DisentangledEncoder
            fast = cast(DisentangledEncoder, encoder)
            if _agrees_with_transformers(fast):
                fast.is_first_enough = is_first_enough
                fast.attention_type = _fastest_attention(fast)
            else:
                encoder.__class__ = DebertaV2Encoder
                logger.warning("DeBERTa's forward is kept: the faster one differs from it")
    for classifier in module.modules():
        if type(classifier) is DebertaV2ForSequenceClassification:
            encoder = cast(Any, classifier.deberta).encoder
            encoder.is_first_enough = True  # the pooler reads only the first token


def _agrees_with_transformers(encoder: DisentangledEncoder) -> bool:
    """Tell whether the encoder's first layers have the outputs of transformers' code in float64."""
    first = _first_layers(encoder).to("cpu", torch.float64)
    states, mask = _random_rows(first, _CHECKED_LENGTHS)
    with torch.inference_mode():
        outputs = first(states, mask).last_hidden_state[mask.bool()]
        expected = DebertaV2Encoder.forward(first, states, mask).last_hidden_state[mask.bool()]
    return bool((outputs - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _first_layers(encoder: DisentangledEncoder) -> Any:
    first = copy.copy(encoder)
    first._modules = {**encoder._modules, "layer": encoder.layer[:_CHECKED_LAYERS]}
    return copy.deepcopy(first)


def _random_rows(
    encoder: DisentangledEncoder, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random states of texts of `lengths` tokens, (rows, width, size), and their mask."""
    weight = encoder.rel_embeddings.weight
    shape = (len(lengths), max(lengths), weight.shape[1])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return states.to(weight), mask.long().to(weight.device)


def _fastest_attention(encoder: DisentangledEncoder) -> type[DisentangledAttention]:
    """Return the faster class of attention for an encoder, measured once per key of `_kernels`."""
    weight = encoder.rel_embeddings.weight
    if weight.device.type not in FUSED_DEVICES:
        return DisentangledAttention
    attention = cast(Any, encoder.layer[0]).attention.self
    heads, size = attention.num_attention_heads, attention.attention_head_size
    terms = (projection is not None for projection in position_projections(attention))
    key = (weight.device, weight.dtype, heads, size, *terms)
    with exclusive_device(weight.device, weight.dtype):  # timed with the settings of real runs
        if key not in _kernels:
            _kernels[key] = _fastest_kernel(encoder, key)
    return DisentangledAttention if _kernels[key] is None else FusedAttention


def _fastest_kernel(encoder: DisentangledEncoder, key: tuple[Any, ...]) -> Kernel | None:
    """Return the fastest kernel for fused attention; None if `DisentangledAttention` is faster.

    `key` is a key of `_kernels`. On a GPU the choice is saved if no kernel raised an error, so that
    later processes compile and check only that kernel.
    """
    device, dtype, *shape = key
    if device.type != "cuda":
        return _try_kernels(encoder, key, [Kernel()], is_known=False)[0]
    memory, triton = CudaMemory(device), installed_versions("triton").get("triton", "")
    _, size, *_ = shape
    is_power = size >= 16 and not size & size - 1  # what Triton's tiles and products need
    candidates = [one for one in KERNELS[dtype.itemsize] if is_power or not one.is_own]
    about = {"kernel": str(shape), "precision": str(dtype), "triton": triton}
    about["candidates"] = str(candidates)  # later releases may have others
    file = MeasurementFile({**about, **machine(memory.name, memory.total_bytes)})
    known = file.read(lambda kept: [Kernel(*kernel) for kernel in kept["kernels"]])
    if known is not None:
        return _try_kernels(encoder, key, known, is_known=True)[0]
    fastest, is_certain = _try_kernels(encoder, key, candidates, is_known=False)
    if is_certain:
        file.write(kernels=[] if fastest is None else [fastest])
    return fastest


def _try_kernels(
    encoder: DisentangledEncoder, key: tuple[Any, ...], kernels: Sequence[Kernel], is_known: bool
) -> tuple[Kernel | None, bool]:
    """Compile and time kernels; return the fastest one, and whether all ran without an error.

    The kernel is None unless one has the outputs of `DisentangledAttention`, up to rounding, and is
    faster. With `is_known`, it need not be faster, because an earlier process has measured that.
    """
    started = time.perf_counter()
    states, mask = _random_rows(encoder, FUSED_LENGTHS)
    expected, plain_seconds = _time_attention(encoder, DisentangledAttention, states, mask)
    best_seconds = math.inf if is_known else plain_seconds
    most = FUSED_TOLERANCE if states.dtype == torch.float32 else FUSED_HALF_TOLERANCE
    fastest, have_all_run = None, True
    for kernel in kernels:
        _kernels[key] = kernel
        try:
            outputs, seconds = _time_attention(encoder, FusedAttention, states, mask)
        except Exception as err:  # compilers raise errors of any type
            if is_out_of_memory(err) or is_broken_device(err):
                raise
            reason = str(err).strip().partition("\n")[0]
            logger.info("DeBERTa's attention is not fused: %s: %s", type(err).__name__, reason)
            have_all_run = False
            continue
        finally:
            del _kernels[key]
        difference = rms(outputs - expected) / rms(expected)
        is_better = difference <= most and seconds < best_seconds
        if is_better:
            fastest, best_seconds = kernel, seconds
        logger.info(
            "DeBERTa's attention is %s: %.2g of the time, difference %.1e, %s",
            *("fused" if is_better else "not fused", seconds / plain_seconds, difference, kernel),
        )
    logger.info("tried in %.1f s", time.perf_counter() - started)
    return fastest, have_all_run


@torch.inference_mode()
def _time_attention(
    encoder: DisentangledEncoder,
    attention_type: type[DisentangledAttention],
    states: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Time the encoder's first layers with a class of attention.

    Returns the tokens' states, float32 (tokens, size), and the minimum seconds of a few runs.
    """
    import torch._dynamo.config
    import torch._inductor.config

    first = _first_layers(encoder)
    first.attention_type = attention_type
    lengths = mask.sum(1).cpu().numpy()
    seconds = []
    for _ in range(4):  # the first compiles
        with (
            first.running(lengths, mask.shape[1], mask.device),
            torch._inductor.config.patch(compile_threads=1),  # else one process per core
            torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS),
        ):
            started = time.perf_counter()
            outputs = first(states, mask).last_hidden_state[mask.bool()].float()
        float(outputs[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return outputs, min(seconds)


class FusedAttention(DisentangledAttention):
    """DeBERTa's attention by one kernel for all texts of a batch at once.

    The kernel is torch's flex_attention, or `kernels.attend` if that was measured to be faster.
    One object serves one batch. Tokens are padded to whole blocks, so that one compilation serves
    batches of every size. Pairs of blocks without a common text are skipped.
    """

    def __init__(self, layout: Layout, positions: RelativePositions) -> None:
        super().__init__(layout, positions)
        device = positions.by_distance.device
        numbers, counts, blocks = _text_blocks(layout.lengths)
        self._numbers = to_device(numbers, device)
        self._mask = _block_mask(
            to_device(counts, device), to_device(blocks, device), self._numbers
        )
        # Multiples of 16 keep rows aligned for tensor cores and vector loads, and spare Triton from
        # compiling again.
        self._occurring = slice(positions.first // 16 * 16, (positions.last // 16 + 1) * 16)
        self._indices = (positions.by_distance - self._occurring.start).int()
        # A tensor, because a Python number would be compiled into the kernel as a constant.
        farthest = len(positions.by_distance) // 2
        self._farthest = to_device(np.array(farthest, dtype=np.int32), device)
        self._blocks: dict[int, torch.Tensor] = {}  # by the number of queries in a block

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """Return states, (1, tokens, size), padded to whole blocks of `BLOCK_TOKENS` tokens."""
        return F.pad(states, (0, 0, 0, len(self._numbers) - states.shape[1]))

    def __call__(self, states: States, tables: PositionTables, scale: float) -> torch.Tensor:
        """Compute the result of `DisentangledAttention`, up to rounding, from the same arguments.

        The tokens of `states` and the result are padded by `pad`, except queries of first tokens.
        """
        query, key, _ = states
        if query.shape[2] < key.shape[2]:
            return super().__call__(states, tables, scale)
        tables = tables.part(slice(None), self._occurring)
        terms = [
            None if table is None else torch.bmm(part[0], table.mT)
            for part, table in ((query, tables.keys), (key, tables.queries))
        ]
        has_terms = (term is not None for term in terms)
        shape = (query.device, query.dtype, query.shape[1], query.shape[3], *has_terms)
        kernel = _kernels.get(shape) or (KERNELS[query.itemsize][0] if query.is_cuda else Kernel())
        if kernel.is_own:
            from gpuclassify.inference.kernels import attend

            output = attend(states, terms, self._indices, self._own_blocks(kernel), scale, kernel)
        else:
            others = (self._indices, self._farthest, scale, self._mask)
            output = _compiled(kernel, query.is_cuda)(*states, *terms, *others)
        return output.transpose(1, 2).flatten(2)

    def _own_blocks(self, kernel: Kernel) -> torch.Tensor:
        """Return each block's first query, and its text's first token and end, int32 (blocks, 3).

        These are token offsets. A block has at most ``kernel.query_tokens`` queries, of one text.
        """
        rows = kernel.query_tokens
        if rows not in self._blocks:
            lengths = self.layout.lengths
            counts = -(-lengths // rows)
            before = np.cumsum(counts) - counts
            number = np.arange(counts.sum()) - np.repeat(before, counts)
            ends = np.repeat(np.cumsum(lengths), counts)
            starts = ends - np.repeat(lengths, counts)
            table = np.stack([starts + number * rows, starts, ends], axis=1).astype(np.int32)
            self._blocks[rows] = to_device(table, self._indices.device)
        return self._blocks[rows]


@functools.cache
def _compiled(kernel: Kernel, is_dynamic: bool) -> Any:
    """Return the function `_attend`, compiled with a kernel's options.

    It takes batches of any size if `is_dynamic`; torch 2.13 cannot compile that on a CPU.
    """
    attend = functools.partial(_attend, kernel.options())
    return torch.compile(attend, dynamic=is_dynamic, fullgraph=True)


def _attend(
    options: dict[str, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_terms: torch.Tensor | None,
    key_terms: torch.Tensor | None,
    indices: torch.Tensor,
    farthest: torch.Tensor,
    scale: float,
    mask: Any,
) -> torch.Tensor:
    """Run flex_attention with DeBERTa's relative-position terms added to the scores.

    Returns (1, heads, tokens, head size), the shape of `query`, `key` and `value`. `query_terms`
    and `key_terms` are (heads, tokens, positions), or None if the layer has no such term. `indices`
    maps a distance from key to query, plus `farthest`, to a position.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def add_terms(
        score: torch.Tensor,
        text: torch.Tensor,
        head: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
    ) -> Any:
        # Pairs of different texts may exceed the table; they are clamped here and masked later.
        distance = torch.minimum(torch.maximum(row - column, -farthest), farthest)
        position = indices[distance + farthest]
        if query_terms is not None:
            score = score + query_terms[head, row, position]
        if key_terms is not None:
            score = score + key_terms[head, column, position]
        return score

    cut: Any = options
    return flex_attention(query, key, value, add_terms, mask, scale, kernel_options=cut)


def _text_blocks(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide packed tokens into blocks of `BLOCK_TOKENS`, and find each query block's key blocks.

    These are all blocks with tokens of a text that the query block has tokens of.

    Parameters
    ----------
    lengths : ndarray of int64, shape (texts,)
        Tokens of each text, in the order of the tokens.

    Returns
    -------
    numbers : ndarray of int32, shape (padded tokens,)
        Index of each token's text. Padding at the end is a text of its own.
    counts : ndarray of int32, shape (1, 1, blocks)
        Number of key blocks for each query block.
    blocks : ndarray of int32, shape (1, 1, blocks, blocks)
        Indices of the key blocks; only the first `counts` of each row are used.
    """
    tokens = lengths.sum()
    blocks = max(FEWEST_BLOCKS, -(-tokens // BLOCK_TOKENS))
    filled = np.append(lengths, blocks * BLOCK_TOKENS - tokens)
    numbers = np.repeat(np.arange(len(filled), dtype=np.int32), filled)
    ends = np.cumsum(filled)
    starts = ends - filled
    first = starts[numbers[::BLOCK_TOKENS]] // BLOCK_TOKENS
    last = (ends[numbers[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]] - 1) // BLOCK_TOKENS
    columns = np.arange(len(first))
    blocks = np.minimum(first[:, None] + columns, len(first) - 1)
    counts = last - first + 1
    return numbers, counts.astype(np.int32)[None, None], blocks.astype(np.int32)[None, None]


def _block_mask(counts: torch.Tensor, blocks: torch.Tensor, numbers: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def is_same_text(
        text: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> Any:
        return numbers[row] == numbers[column]

    return BlockMask.from_kv_blocks(
        counts,
        blocks,
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=is_same_text,
        compute_q_blocks=False,  # needed for training only
    )
