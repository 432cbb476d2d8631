"""What can this device do, before anything of gpuclassify runs on it? Needs torch alone.

``python -m benchmarks.gpu.probe --output FOLDER`` writes ``probe.json``: versions and the host,
ceilings of products and copies, attention on shapes that it has not seen before, and the two
kernels of torch that texts of different lengths want. A part that fails leaves its error there.
"""

import argparse
import functools
import inspect
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from benchmarks import write_json

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "pandas", "pyarrow", "dask")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, HEAD_SIZE = 12, 64
SMI = ("nvidia-smi", "--format=csv", "--query-gpu=name,driver_version,memory.total,clocks.max.sm")


class Sizes(NamedTuple):
    """Sizes of all measurements: for a GPU, or so small that a CPU takes seconds."""

    matrix: int
    copied_bytes: int
    rows: int
    repeats: int


GPU, CPU = Sizes(8_192, 2**31, 64, 20), Sizes(512, 2**24, 2, 3)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run all parts, and write what they found so far after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with smaller sizes (cuda)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the result")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    sizes = GPU if device.type == "cuda" else CPU
    result: dict[str, Any] = {"question": "probe", "device": str(device)} | sizes._asdict()
    options.output.mkdir(parents=True, exist_ok=True)
    path: Path = options.output / "probe.json"
    for part in (machine, products, copies, fresh_shapes, varlen, flex):
        try:
            with torch.inference_mode():
                result[part.__name__] = part(device, sizes)
        except Exception:
            result[part.__name__] = {"error": traceback.format_exc()}
        print(part.__name__, json.dumps(result[part.__name__], indent=1), flush=True)
        write_json(path, result)
    return path


def machine(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Describe versions, cores, memory, and the driver's account of the GPUs and of their cores."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    found["versions"] = {}
    for name in PACKAGES:
        try:
            found["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["cores"], found["usable_cores"] = os.cpu_count(), sorted(os.sched_getaffinity(0))
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        found["cudnn"] = torch.backends.cudnn.version()
        found["gpu"] = str(torch.cuda.get_device_properties(device))
        found["driver"] = [_printed(SMI), _printed(("nvidia-smi", "topo", "-m"))]
    return found


def _printed(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def products(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Measure TFLOP/s of a product of square matrices of random numbers, by precision."""
    found = {}
    for dtype in DTYPES:
        left, right = torch.randn(2, sizes.matrix, sizes.matrix, device=device, dtype=dtype)
        run = functools.partial(torch.matmul, left, right)
        found[str(dtype)] = 2 * sizes.matrix**3 / _seconds(run, device, sizes.repeats) / 1e12
    return found


def copies(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Measure GB/s on the device (read and written bytes, by type), and to it from the host."""
    found = {}
    for dtype in (*DTYPES, torch.int64):
        source = torch.zeros(sizes.copied_bytes // dtype.itemsize, device=device, dtype=dtype)
        target = torch.empty_like(source)
        run = functools.partial(target.copy_, source)
        found[str(dtype)] = 2 * sizes.copied_bytes / _seconds(run, device, sizes.repeats) / 1e9
    if device.type == "cuda":
        target = torch.empty(sizes.copied_bytes // 8, device=device, dtype=torch.uint8)
        for name, pinned in (("from pageable memory", False), ("from pinned memory", True)):
            source = torch.zeros(len(target), dtype=torch.uint8, pin_memory=pinned)
            run = functools.partial(target.copy_, source)
            found[name] = len(target) / _seconds(run, device, sizes.repeats) / 1e9
    return found


def fresh_shapes(device: torch.device, sizes: Sizes) -> dict[str, list[list[float]]]:
    """Time the first and second masked attention on eight new shapes, with and without cuDNN."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, list[list[float]]] = {}
    for name, is_on in (("cuDNN on", True), ("cuDNN off", False)):
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        try:
            found[name] = [
                _attention_seconds(sizes.rows, 101 + 37 * n, dtype, device) for n in range(8)
            ]
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
    return found


def _attention_seconds(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[float]:
    query, key, value = torch.randn(3, rows, HEADS, width, HEAD_SIZE, device=device, dtype=dtype)
    ends = torch.linspace(width // 2, width, rows, device=device).long()
    mask = (torch.arange(width, device=device) < ends[:, None])[:, None, None]
    run = functools.partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask)
    return [_once(run, device), _once(run, device)]


def varlen(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Check the parameters and answers of attention over texts end to end, and time it."""
    from torch.nn.attention.varlen import varlen_attn

    found: dict[str, Any] = {"parameters": list(inspect.signature(varlen_attn).parameters)}
    if device.type != "cuda":
        return found | {"left_out": "it needs a GPU"}
    query, key, value = torch.randn(
        (3, sizes.rows, HEADS, 512, HEAD_SIZE), device=device, dtype=torch.bfloat16
    )
    ends = torch.arange(0, sizes.rows + 1, device=device, dtype=torch.int32) * 512
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    options = {"scale": HEAD_SIZE**-0.5, "window_size": (-1, -1)}
    run = functools.partial(varlen_attn, *rows, ends, ends, 512, 512, **options)
    found["first_seconds"] = _once(run, device)
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(0, 1)
    found["largest_difference"] = (run().float() - expected.float()).abs().max().item()
    return found | {"seconds": _seconds(run, device, sizes.repeats)}


def flex(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Compare attention with a bias by distance, compiled and by torch's other operations.

    The bias is that of DeBERTa, read from two products within the kernel.
    """
    from torch.nn.attention.flex_attention import flex_attention

    width, dtype = 512, torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (sizes.rows, HEADS, width, HEAD_SIZE)
    query, key, value = torch.randn(3, *shape, device=device, dtype=dtype)
    by_query, by_key = torch.randn(2, *shape[:2], width, width, device=device, dtype=dtype)
    places = torch.arange(width, device=device)
    table = (torch.arange(1 - width, width, device=device) // 2 + width // 2).to(torch.int32)

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        place = table[q - k + width - 1]
        return score + by_query[b, h, q, place] + by_key[b, h, k, place]

    def plain() -> torch.Tensor:
        index = table[places[:, None] - places + width - 1].long().expand_as(by_query)
        bias = by_query.gather(-1, index) + by_key.gather(-1, index.mT).mT
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    compiled = torch.compile(lambda: flex_attention(query, key, value, score_mod=biased))
    found = {"compile_seconds": _once(compiled, device)}
    found["largest_difference"] = (compiled().float() - plain().float()).abs().max().item()
    found["seconds"] = _seconds(compiled, device, sizes.repeats)
    return found | {"plain_seconds": _seconds(plain, device, sizes.repeats)}


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the least seconds of `repeats` calls, after one that is not counted."""
    _once(run, device)
    return min(_once(run, device) for _ in range(repeats))


def _once(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
