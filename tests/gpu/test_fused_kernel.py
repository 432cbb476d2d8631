"""Kernels as compilers make them for a GPU, without the GPU: their code, and what it computes."""

import contextlib
import copy
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo import device_interface
from torch._dynamo.utils import counters
from torch.nn import functional as F

from gpuclassify.inference.packed import fused_attention
from gpuclassify.inference.packed.disentangled import (
    DisentangledAttention,
    PositionTables,
    RelativePositions,
    _relative_positions,
)
from gpuclassify.inference.packed.fused_attention import (
    KERNELS,
    FusedAttention,
    Kernel,
    _text_blocks,
)
from gpuclassify.inference.packed.layout import Layout
from tests.gpu.fake_cuda import GPU, fake_cuda

triton = pytest.importorskip("triton")

pytestmark = [pytest.mark.rapids, pytest.mark.timeout(600)]

HEADS, SIZE, BUCKETS = 12, 64, 512  # of DeBERTa-v3-base
OWN = [kernel for kernel in KERNELS[2] if kernel.is_own]
SHARED_BYTES = 99 * 1024  # of a block on sm_86 and sm_89; sm_80 and sm_90 have more
BATCHES = [
    [512] * 16 + [384, 300, 129, 128, 60, 7, 1],
    [512] * 9,
    [3],
    [129, 128, 127] * 20,
    [1],
    [500] * 130,
    [128],
    [64, 64],
    [1] * 300,
]


class H100:
    """What a compiler asks of a device."""

    major, minor, name, uuid = 9, 0, "NVIDIA H100", "0"
    gcnArchName = ""  # noqa: N815 - torch's name
    multi_processor_count, warp_size, regs_per_multiprocessor = 132, 32, 65536
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    total_memory, L2_cache_size = 80 * 2**30, 50 * 2**20
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448


class Driver:
    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return GPU


@contextlib.contextmanager
def compiler_for_h100(codes):
    """Within it, torch compiles for a GPU; code goes to the list, and running it gives numbers."""
    from torch._inductor import graph
    from torch._inductor.fx_passes import joint_graph, post_grad

    def stand_in(lowering):
        code = lowering.codegen()[0]
        codes.append(getattr(code, "value", code))

        def call(inputs):
            tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
            return [next(torch.empty_like(one) for one in tensors if one.ndim == 4)]

        return SimpleNamespace(call=call, __file__="", key="", runtime_code=None)

    def patched(holder, **values):
        for name, value in values.items():
            stack.enter_context(mock.patch.object(holder, name, value, create=True))

    def properties(device=None):
        return H100

    worker = device_interface.CudaInterface.Worker
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch") and "has_triton" in vars(module):
                patched(module, has_triton=lambda *_: True)
        patched(torch.cuda, get_device_properties=properties, _is_compiled=lambda: True)
        for module in (torch.cuda, torch.cuda.random):
            patched(module, get_rng_state=lambda *_: torch.zeros(1), set_rng_state=lambda *_: None)
        patched(
            torch._C,
            _cuda_getDevice=lambda: 0,
            _cuda_isCurrentStreamCapturing=lambda: False,
            _cuda_getCurrentRawStream=lambda device: 0,
            _cuda_exchangeDevice=lambda device: 0,
            _cuda_maybeExchangeDevice=lambda device: 0,
            _cuda_setDevice=lambda device: None,
            _cuda_getDeviceCount=lambda: 1,
            _cuda_getCompiledVersion=lambda: 13000,
        )
        patched(torch.version, cuda="13.0")
        # These make tensors on a real device.
        for module in (joint_graph, post_grad):
            patched(module, lazy_init=lambda *_, **__: None)
        patched(worker, get_device_properties=staticmethod(properties))
        patched(worker, current_device=staticmethod(lambda: 0))
        patched(
            device_interface.CudaInterface,
            get_device_properties=staticmethod(properties),
            get_compute_capability=staticmethod(lambda device=None: 90),
        )
        patched(graph.GraphLowering, compile_to_module=stand_in)
        patched(triton.runtime.driver, _active=Driver())
        yield


def attend(lengths, dtype, heads=HEADS, size=SIZE):
    """One layer's attention over a batch of these lengths, on the fake GPU."""
    layout = Layout(np.array(lengths), max(lengths), GPU)
    width = max(max(lengths), 2)
    by_distance = torch.empty(2 * width - 1, dtype=torch.int64, device=GPU)
    reach = min(width, 160)
    positions = RelativePositions(by_distance, BUCKETS // 2 - reach, BUCKETS // 2 + reach)
    attention = FusedAttention(layout, positions)
    tokens = attention.pad(torch.empty(1, sum(lengths), 1, device=GPU)).shape[1]
    states = [
        torch.empty(1, tokens, heads, size, dtype=dtype, device=GPU).transpose(1, 2)
        for _ in range(3)
    ]
    table = torch.empty(heads, BUCKETS, size, dtype=dtype, device=GPU)
    return attention(tuple(states), PositionTables(table, table), 0.07)


def compile_kernels(batches, dtype, kernel=None, **shape):
    """The codes that torch makes for batches, and how many graphs it compiles."""
    codes = []
    torch._dynamo.reset()
    fused_attention._compiled.cache_clear()
    chosen = {dtype.itemsize: (kernel or KERNELS[dtype.itemsize][0],)}
    with (
        fake_cuda(is_watched=False),
        compiler_for_h100(codes),
        mock.patch.dict(fused_attention.KERNELS, chosen),
        torch._inductor.config.patch(compile_threads=1, force_disable_caches=True),
        torch.inference_mode(),
    ):
        before = counters["stats"]["unique_graphs"]
        for lengths in batches:
            output = attend(lengths, dtype, **shape)
            assert output.is_cuda
        graphs = counters["stats"]["unique_graphs"] - before
    return codes, graphs


def triton_function(code, folder):
    """The one kernel within a code: Triton's function, and what the compiler fixed for it."""
    [(name, source)] = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL)
    heuristics = re.compile(r"@triton_heuristics\.\w+\((.*?)\n\)\n@triton\.jit", re.DOTALL)
    fixed = heuristics.search(source)[1]
    meta = re.search(r"triton_meta=(\{.*?\}),\ninductor_meta", fixed, re.DOTALL)[1]
    numbers = {
        option: int(re.search(rf"{option}=(\d+)", fixed)[1])
        for option in ("num_warps", "num_stages")
    }
    path = folder / f"{name}.py"  # Triton reads a function's source from its file
    path.write_text(heuristics.sub("@triton.jit", source))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    described = eval(textwrap.dedent(meta), {"DeviceProperties": lambda **values: values})
    return getattr(module, name), described, numbers


def resources(code, capability, folder):
    """Registers, bytes of spills and of shared memory of torch's kernel."""
    return compiled(*triton_function(code, folder), capability, folder)


def own_kernel(kernel, dtype, has_terms):
    """The function of the project's own kernel, and what is fixed of it in DeBERTa-v3-base."""
    from gpuclassify.inference.kernels import _attend

    number = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    states = ("query", "key", "value", "query_terms", "key_terms", "output")
    tables = ("indices", "blocks")
    numbers = ("tokens", "positions", "farthest", "token_stride", "head_stride")
    kinds = {
        **dict.fromkeys(states, f"*{number}"), **dict.fromkeys(tables, "*i32"),
        **dict.fromkeys(numbers, "i32"), "scale": "fp32",
    }  # fmt: skip
    constants = {
        "head_size": SIZE, "block_rows": kernel.query_tokens, "block_columns": kernel.key_tokens,
        "has_query_terms": has_terms[0], "has_key_terms": has_terms[1],
    }  # fmt: skip
    order = [name for name in _attend.arg_names if name not in constants]
    aligned = [_attend.arg_names.index(n) for n in order if n not in ("scale", "farthest")]
    meta = {
        "signature": {name: kinds[name] for name in order},
        "constants": constants,
        "configs": [{(index,): [["tt.divisibility", 16]] for index in aligned}],
    }
    return _attend, meta, {"num_warps": kernel.warps, "num_stages": kernel.stages}


def compiled(function, meta, numbers, capability, folder):
    """Registers, bytes of spills and of shared memory of Triton's function."""
    constants = meta["constants"]
    source = triton.compiler.ASTSource(
        fn=function,
        signature=meta["signature"] | dict.fromkeys(constants, "constexpr"),
        constexprs={(function.arg_names.index(name),): one for name, one in constants.items()},
        attrs={name: one for config in meta["configs"] for name, one in config.items()},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    done = triton.compile(source, target=target, options=numbers)
    (folder / "kernel.ptx").write_text(done.asm["ptx"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
    told = subprocess.run(
        [tools / "ptxas", "-v", f"-arch={architecture}", folder / "kernel.ptx", "-o", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", told)
    registers = int(re.search(r"Used (\d+) registers", told)[1])
    return registers, sum(map(int, spills)), done.metadata.shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_graph_serves_batches_of_every_size(dtype):
    codes, graphs = compile_kernels(BATCHES, dtype)

    assert (len(codes), graphs) == (1, 1)


def test_a_graph_more_is_found(monkeypatch):
    monkeypatch.setattr(fused_attention, "FEWEST_BLOCKS", 1)

    assert compile_kernels(BATCHES, torch.bfloat16)[1] > 1


@pytest.mark.parametrize("has_terms", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_own_kernel_hardly_spills(dtype, has_terms, tmp_path):
    for kernel in OWN:
        made = own_kernel(kernel, dtype, has_terms)
        for capability in (80, 86, 89, 90):
            _, spilled_bytes, shared_bytes = compiled(*made, capability, tmp_path)
            assert spilled_bytes <= 16, (kernel, capability)  # a few registers, of thousands
            assert shared_bytes <= SHARED_BYTES, (kernel, capability)


def row_kernel(name, dtype, size, has_gelu=True):
    """A kernel of rows of `size` numbers, and what is fixed of it."""
    from gpuclassify.inference import kernels

    number = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    function = getattr(kernels, name)
    kinds = dict.fromkeys(("states", "residual", "weight", "bias", "output"), f"*{number}")
    kinds |= {"rounded": "*fp8e4nv", "scales": "*fp32", "epsilon": "fp32", "most": "fp32"}
    kinds |= {"size": "i32"}
    constants = {"columns": triton.next_power_of_2(size), "has_gelu": has_gelu}
    constants = {key: one for key, one in constants.items() if key in function.arg_names}
    order = [key for key in function.arg_names if key not in constants]
    aligned = [function.arg_names.index(key) for key in order if key not in ("epsilon", "most")]
    meta = {
        "signature": {key: kinds[key] for key in order},
        "constants": constants,
        "configs": [{(index,): [["tt.divisibility", 16]] for index in aligned}],
    }
    return function, meta, {"num_warps": 4, "num_stages": 3}  # Triton's defaults


@pytest.mark.parametrize("size", [384, 768, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_of_rows_do_not_spill(dtype, size, tmp_path):
    for name, capabilities in (("_add_and_norm", (80, 90)), ("_round_rows", (89, 90))):
        for capability in capabilities:
            compiled(*row_kernel(name, dtype, size, has_gelu=False), capability, tmp_path)
            made = row_kernel(name, dtype, size)
            _, spilled_bytes, shared_bytes = compiled(*made, capability, tmp_path)
            assert spilled_bytes == 0, (name, capability)
            assert shared_bytes < 1024, (name, capability)
            code = (tmp_path / "kernel.ptx").read_text()
            assert re.search(r"ld\.global\.v[24]", code), (name, capability)  # 8 bytes or more
    assert "cvt.rn.satfinite.e4m3x2" in code  # to the nearest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_kernel_spills_and_each_fits_into_every_gpu(dtype, tmp_path, record_property):
    for kernel in (one for one in KERNELS[dtype.itemsize] if not one.is_own):
        [code], _ = compile_kernels(BATCHES[:1], dtype, kernel)
        for capability in (80, 86, 89, 90):
            registers, spilled_bytes, shared_bytes = resources(code, capability, tmp_path)
            record_property(f"{kernel} sm_{capability} registers", registers)
            assert spilled_bytes == 0, (kernel, capability)
            assert shared_bytes <= SHARED_BYTES, (kernel, capability)


def test_spills_are_found(tmp_path):
    [code], _ = compile_kernels(BATCHES[:1], torch.bfloat16, Kernel(128, 128, 4, 3))

    _, spilled_bytes, shared_bytes = resources(code, 90, tmp_path)
    assert spilled_bytes > 1_000
    assert shared_bytes > SHARED_BYTES


INTERPRETED = [
    [48, 40, 40, 33, 7, 1],  # odd lengths, a text of one token, padding
    [129, 127, 128],  # texts that end at blocks and beyond them
    [1],
    [1] * 130,
    [300],
]


def interpret(folder, batches):
    """Largest differences from the plain formula of the kernel that Triton's interpreter runs."""
    heads, size, places = 2, 32, 40
    code = (folder / "code.py").read_text()
    kernel, _, _ = triton_function(code, folder)
    scale = float(re.search(r"SM_SCALE : tl.constexpr = ([\d.]+)", code)[1])
    block = int(re.search(r"BLOCK_M : tl.constexpr = (\d+)", code)[1])
    torch.manual_seed(0)
    for lengths in batches:
        width = max(*lengths, 2)
        numbers, counts, blocks = map(torch.from_numpy, _text_blocks(np.array(lengths)))
        tokens = len(numbers)
        query, key, value = torch.randn(3, tokens, heads * size)
        of_queries, of_keys = torch.randn(2, heads, tokens, places)
        by_distance = torch.randint(0, places, (2 * width - 1,), dtype=torch.int32)
        farthest = torch.tensor(width - 1, dtype=torch.int32)
        output, unused = torch.zeros(tokens, heads * size), torch.zeros(1)
        kernel[(-(-tokens // block), 1, heads)](
            *(query, key, value, unused, unused, counts, blocks, unused, unused, farthest),
            *(by_distance, of_queries, of_keys, numbers, output),
            *(tokens, counts.shape[-1], places),
        )
        q, k, v = (one.view(tokens, heads, size).transpose(0, 1) for one in (query, key, value))
        row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
        distances = (row - column).clamp(1 - width, width - 1) + width - 1
        place = by_distance[distances].long()
        scores = q @ k.mT * scale + of_queries[:, row, place] + of_keys[:, column, place]
        scores = scores.masked_fill(numbers[:, None] != numbers, -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)
        yield (output - expected)[: sum(lengths)].abs().max().item()


def interpret_own(kernel, batches):
    """Largest differences of attention by the own kernel from `DisentangledAttention`.

    All tensors have the layout that layers give them, and positions are DeBERTa's.
    """
    heads, size, buckets = 2, 32, 16
    torch.manual_seed(0)
    for lengths, has_terms in itertools.product(batches, [(1, 1), (1, 0), (0, 1), (0, 0)]):
        layout = Layout(np.array(lengths), max(lengths), torch.device("cpu"))
        positions = _relative_positions(
            max(*lengths, 2), buckets, 64, 2 * buckets, torch.device("cpu")
        )
        attention = FusedAttention(layout, positions)
        packed = attention.pad(torch.randn(1, sum(lengths), 3 * heads * size))
        states = [
            part.unflatten(-1, (heads, size)).transpose(1, 2) for part in packed.chunk(3, dim=-1)
        ]
        tables = PositionTables(
            *(torch.randn(heads, 2 * buckets, size) if has else None for has in has_terms)
        )
        shape = (packed.device, packed.dtype, heads, size, *map(bool, has_terms))
        with mock.patch.dict(fused_attention._kernels, {shape: kernel}):
            found = attention(states, tables, 0.1)
        rows = [state[:, :, : sum(lengths)] for state in states]
        expected = DisentangledAttention(layout, positions)(rows, tables, 0.1)
        yield (found[:, : sum(lengths)] - expected).abs().max().item()


def interpret_rows():
    """Largest differences of the kernels of rows from their formulas in float64, relative."""
    from gpuclassify.inference.kernels import add_and_norm, round_rows

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tolerance = max(1e-6, torch.finfo(dtype).eps)
        for size in (16, 100, 768):
            norm = torch.nn.LayerNorm(size, eps=1e-7).to(dtype).requires_grad_(False)
            torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
            states, residual = (3 * torch.randn(2, 2, 5, size)).to(dtype)
            states = states.transpose(0, 1)  # not contiguous
            residual = residual.transpose(0, 1)
            total = states.double() + residual.double()
            exact = copy.deepcopy(norm).double()(total)
            found = add_and_norm(states, residual, norm)
            assert found.dtype == dtype
            yield ((found - exact).abs() / (1 + exact.abs())).max().item() / tolerance
            for has_gelu in (False, True):
                rows = torch.randn(7, size) * torch.logspace(-4, 3, 7)[:, None]
                rows[3] = 0
                rows = rows.to(dtype)
                # The interpreter does not round to 8 bits as a GPU does: 16 show the formula.
                numbers, factors = round_rows(rows, torch.float16, has_gelu)
                exact = F.gelu(rows.double()) if has_gelu else rows.double()
                most = exact.abs().amax(1, keepdim=True)
                assert (
                    numbers.float().abs().amax(1).gt(65_000).tolist()
                    == [True] * 3 + [False] + [True] * 3
                )
                found = numbers.double() * factors
                yield ((found - exact).abs() / most.clamp(min=1e-12)).max().item() / 1e-3
    rows = torch.randn(4, 16)
    rows[1, 3], rows[2, 5] = torch.nan, -torch.inf
    numbers, factors = round_rows(rows, torch.float8_e4m3fn, has_gelu=False)
    assert factors.isfinite()[:, 0].tolist() == [True, False, False, True]


def interpreted(*arguments):
    """The differences that this module prints when Triton's interpreter runs its kernels."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_fused_kernel", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    return [float(line) for line in told.stdout.splitlines()]


@pytest.mark.parametrize("kernel", KERNELS[4], ids=str)
def test_the_kernel_gives_what_the_formula_says(kernel, tmp_path):
    [code], _ = compile_kernels(BATCHES[:1], torch.float32, kernel, heads=2, size=32)
    (tmp_path / "code.py").write_text(code)
    differences = interpreted(tmp_path)
    assert len(differences) == len(INTERPRETED)
    assert max(differences) < 1e-5


@pytest.mark.parametrize("number", range(len(OWN)))
def test_the_own_kernel_gives_what_attention_without_it_gives(number):
    differences = interpreted("own", number)
    assert len(differences) == 4 * len(INTERPRETED)
    assert max(differences) < 1e-5


def test_kernels_of_rows_give_what_their_formulas_say():
    ratios = interpreted("rows")  # of differences and tolerances
    assert len(ratios) == 27
    assert max(ratios) < 1


if __name__ == "__main__":  # Triton asks when it is imported whether to interpret
    if sys.argv[1] == "rows":
        made = interpret_rows()
    elif sys.argv[1] == "own":
        made = interpret_own(OWN[int(sys.argv[2])], INTERPRETED)
    else:
        made = interpret(Path(sys.argv[1]), INTERPRETED)
    for difference in made:
        sys.stdout.write(f"{difference}\n")
