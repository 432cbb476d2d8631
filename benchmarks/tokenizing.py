"""How many tokens a second does tokenizing give: on the host by cores, and on a GPU?

``python -m benchmarks.tokenizing --help`` lists the options; README.md says what is measured.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Run,
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.models import TINY_SIZES, Shape, write_model
from benchmarks.texts import LENGTHS, docstrings, texts_of_lengths
from gpuclassify.cluster.sizing import usable_cores
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.tokenizing.token_batch import TokenBatch

QUESTION = "tokenizing"
GPU = "gpu"
MAX_TOKENS = 512
TRIES = 3
SHORT_CHARS, LONG_CHARS = 5_000, 1_000_000
LENGTH_DOCUMENTS = 200
MANY_CORES = 16  # as there are about to each GPU of a large machine


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options, max_tokens=MAX_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        directory = options.tokenizer
        if directory is None:
            directory = str(write_model(Path(folder, "model"), Shape("bert", **TINY_SIZES)))
        texts = texts_of_lengths(LENGTHS["web"].sample(options.documents), load(directory))
        result = head | measure(texts, directory, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=4_000, help="web documents (4000)")
    parser.add_argument(
        "--tokenizer", help="directory of a WordPiece tokenizer; else one of a thousand pieces"
    )
    parser.add_argument(
        "--cores", type=int, nargs="+", default=_powers(usable_cores()), help="of the tokenizer"
    )
    return parse(parser, arguments, cores=[1])  # each has a process of its own


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most there are."""
    return sorted({*(1 << n for n in range(most.bit_length()) if 1 << n <= most), most})


def load(directory: str) -> Any:
    """A tokenizer that nobody else uses."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def measure(texts: list[str], directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times of every variant, and what they say of many cores."""
    hosts = {cores: HostProcess(cores, directory, texts) for cores in options.cores}
    variants = [
        Variant(f"host, {cores} cores", run=host.run, warm_up=host.run)
        for cores, host in hosts.items()
    ]
    if options.device.startswith("cuda"):
        gpu = GpuTokenizing(directory, texts)
        variants.append(Variant(GPU, run=gpu.run, warm_up=gpu.run))
    try:
        run = run_interleaved(variants, options.repeats, tolerance=0.0)
        cpu_seconds, python_seconds = hosts[min(hosts)].cpu_seconds()
    finally:
        for host in hosts.values():
            host.close()
    whole, model_tokens = count_tokens(texts, directory)
    counts = {
        "documents": len(texts),
        "text_bytes": sum(len(text.encode()) for text in texts),
        "text_tokens": whole,
        "model_tokens": model_tokens,
    }
    found = {variant.name: findings(run, variant.name, counts) for variant in variants}
    if options.device.startswith("cuda"):
        found[GPU]["host_fallback_documents"] = gpu.host_count
    return counts | {
        "variants": found,
        "ceiling": ceiling(cpu_seconds, python_seconds, model_tokens),
        "lengths": measure_lengths(directory),
    }


def findings(run: Run, name: str, counts: dict[str, int]) -> dict[str, Any]:
    """Times and rates of one variant."""
    seconds = run.median_seconds(name)
    return run.times(name) | {
        "model_tokens_per_second": counts["model_tokens"] / seconds,
        "text_bytes_per_second": counts["text_bytes"] / seconds,
    }


def ceiling(cpu_seconds: float, python_seconds: float, tokens: int) -> dict[str, float]:
    """What a core gives, and `MANY_CORES`: they share the library's work, and Python's not.

    Parameters
    ----------
    cpu_seconds, python_seconds : float
        A core's time for all texts, and that part of it which is Python's.
    tokens : int
        That a model gets to see.
    """
    library_seconds = cpu_seconds - python_seconds
    return {
        "library_cpu_seconds": library_seconds,
        "python_cpu_seconds": python_seconds,
        "model_tokens_per_second_and_core": tokens / cpu_seconds,
        "cores": MANY_CORES,
        "model_tokens_per_second": tokens / (library_seconds / MANY_CORES + python_seconds),
    }


def tokenizer_speed(texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Documents and real tokens a second of the host's tokenizer alone, by all its threads.

    No way that tokenizes on the host can be faster.

    Parameters
    ----------
    texts : sequence of str
    tokenizer : transformers tokenizer
        That nobody else uses.
    """
    tokenize = TextTokenizer(tokenizer, MAX_TOKENS, counts_rest=False)
    return timed(lambda: tokenize(texts), len(texts))[1]


def timed(tokenize: Callable[[], Any], documents: int) -> tuple[Any, dict[str, Any]]:
    """Tokens with `offsets`, as `tokenize` gives them, and how fast it does."""
    timings = []
    for _ in range(TRIES):
        started = time.perf_counter()
        tokens = tokenize()
        timings.append(time.perf_counter() - started)
    count, seconds = int(tokens.offsets[-1]), min(timings)
    return tokens, {
        "seconds": timings,
        "tokens": count,
        "documents_per_second": documents / seconds,
        "tokens_per_second": count / seconds,
    }


def measure_lengths(directory: str) -> dict[str, Any]:
    """Seconds of the processor for a short and a long document, both cut to `MAX_TOKENS`."""
    words = " ".join(docstrings())
    text = words * (1 + LONG_CHARS // len(words))
    tokenize = TextTokenizer(load(directory), MAX_TOKENS, counts_rest=False)
    seconds: dict[int, list[float]] = {SHORT_CHARS: [], LONG_CHARS: []}
    for _ in range(TRIES):
        for chars, own in seconds.items():
            texts = [text[:chars]] * LENGTH_DOCUMENTS
            started = time.process_time()
            tokenize(texts)
            own.append((time.process_time() - started) / LENGTH_DOCUMENTS)
    short, long = map(min, seconds.values())
    return {
        "short_chars": SHORT_CHARS,
        "long_chars": LONG_CHARS,
        "short_seconds": short,
        "long_seconds": long,
        "time_ratio": long / short,
    }


def count_tokens(texts: list[str], directory: str) -> tuple[int, int]:
    """Tokens of all texts, and those of them that a model gets to see."""
    tokens = TextTokenizer(load(directory), MAX_TOKENS)(texts)
    return int(tokens.whole_lengths.sum()), int(tokens.lengths.sum())


def summary(tokens: TokenBatch) -> np.ndarray:
    """What variants must agree in: length, whether it is cut, a sum over ids and places of a text.

    Returns
    -------
    ndarray of float64, shape (texts, 3)
    """
    ids = tokens.ids if tokens.is_on_host else tokens.ids.cpu().numpy()
    places = np.arange(len(ids)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
    sums = np.add.reduceat(ids * (places % 251 + 1.0), tokens.offsets[:-1])
    return np.stack([tokens.lengths, tokens.seen_share < 1, sums], axis=1).astype(np.float64)


class HostProcess:
    """The host's tokenizer in a process of its own, which fixes how many cores it uses.

    Parameters
    ----------
    cores : int
    directory : str
    texts : list of str
    """

    def __init__(self, cores: int, directory: str, texts: list[str]) -> None:
        self._pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(cores, directory, texts),
        )

    def run(self) -> np.ndarray:
        """What `summary` says of all texts, tokenized as a mapper has it done."""
        return self._pool.submit(_summary).result()

    def cpu_seconds(self) -> tuple[float, float]:
        """Time of cores for all texts, and for that part of it which is Python's.

        Python's is the caller's thread: the library works on threads of its own. Other programs
        make both somewhat slower, and do not count.
        """
        return self._pool.submit(_cpu_seconds).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


_texts: list[str] = []
_tokenizer: TextTokenizer


def _start(cores: int, directory: str, texts: list[str]) -> None:
    global _texts, _tokenizer
    os.environ["RAYON_NUM_THREADS"] = str(cores)  # read when the library is first used
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    _texts = texts
    _tokenizer = TextTokenizer(load(directory), MAX_TOKENS, counts_rest=False)


def _summary() -> np.ndarray:
    return summary(_tokenizer(_texts))


def _cpu_seconds() -> tuple[float, float]:
    found = []
    for _ in range(TRIES):
        started = time.process_time(), time.thread_time()
        _tokenizer(_texts)
        found.append((time.process_time() - started[0], time.thread_time() - started[1]))
    return min(found)  # what is added because of others is no part of the work


class GpuTokenizing:
    """cuDF's tokenizer over a column that is on the GPU, with the host's for what it leaves.

    Parameters
    ----------
    directory : str
    texts : list of str
    """

    def __init__(self, directory: str, texts: list[str]) -> None:
        import cudf

        from gpuclassify.tokenizing.gpu_wordpiece import DeviceTexts, gpu_tokenizer

        self._host = TextTokenizer(load(directory), MAX_TOKENS)
        self._gpu = gpu_tokenizer(self._host)
        self._texts = DeviceTexts(cudf.Series(texts))
        self.host_count = 0

    def run(self) -> np.ndarray:
        """What `summary` says of all texts."""
        from gpuclassify.tokenizing.gpu_wordpiece import tokenize_texts

        tokens, self.host_count = tokenize_texts(self._texts, self._gpu, self._host)
        return summary(tokens)


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    lines = [
        f"{result['documents']} documents, {result['text_bytes'] / 1e6:.1f} MB, "
        f"{result['text_tokens']:,} tokens, of which a model sees {result['model_tokens']:,}",
        f"{'median s':>28}{'model tokens/s':>17}{'MB/s':>8}",
    ]
    for name, found in result["variants"].items():
        lines.append(
            f"  {name:16}{found['median_seconds']:10.2f}{found['model_tokens_per_second']:17,.0f}"
            f"{found['text_bytes_per_second'] / 1e6:8.1f}"
        )
    ceiling = result["ceiling"]
    lines.append(
        f"  one core gives {ceiling['model_tokens_per_second_and_core']:,.0f} model tokens/s; "
        f"{ceiling['cores']} that share the library's work and not Python's give at most "
        f"{ceiling['model_tokens_per_second']:,.0f}"
    )
    lengths = result["lengths"]
    lines.append(
        f"  a document of {lengths['long_chars']:,} characters takes {lengths['time_ratio']:.2f} "
        f"times as long as one of {lengths['short_chars']:,}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
