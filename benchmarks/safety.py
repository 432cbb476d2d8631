"""How fast is AegisClassifier against plain ``generate`` on whole prompts?

``python -m benchmarks.safety --help`` lists the options; README.md says what is measured.
"""

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness import (
    DisagreementError,
    Run,
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.inputs import LENGTHS, docstrings, texts_of_lengths
from gpuclassify import AegisClassifier
from gpuclassify.workers.run_context import collected_stats
from tests.replicas import SafetyModels, safety_template, sample_texts, write_safety_models

QUESTION = "safety"
BASELINES = ("plain generate", "plain generate, merged")
SUBJECT = "AegisClassifier"
CODES = tuple(f"O{number}" for number in range(1, 14))
LABELS = ("unknown", "safe", *CODES)
MAX_NEW_TOKENS = 100
HEADS, RANK = 8, 16
LONGEST_TOKENS = 1_500  # of a document: neither side has to cut one
WARM_UP_DOCUMENTS = 2


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options, heads=HEADS, rank=RANK, dtype="float32", weights="random")
    head["versions"]["peft"] = version("peft")
    with tempfile.TemporaryDirectory() as folder:
        template = long_template(options.category_words)
        models = write_models(Path(folder, "models"), template, options)
        result = head | measure(models, template, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=16, help="web documents (16)")
    parser.add_argument(
        "--category-words",
        type=int,
        default=90,
        help="of each category of the prompt (90: the prompt is as long as the published one)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="of plain generate (8; known tools: 64, on GPUs)"
    )
    parser.add_argument("--hidden-size", type=int, default=256, help="of the decoder (256)")
    parser.add_argument("--layers", type=int, default=4, help="of the decoder (4)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights (1)")
    return parse(parser, arguments, hidden_size=64, layers=2, category_words=2)


def long_template(category_words: int) -> str:
    """Return the small models' safety prompt with as many more words in each category."""
    texts = iter(sample_texts(13, seed=3, min_words=category_words, max_words=category_words))
    return re.sub(
        r"^[ \t]*O\d+:.*$",
        lambda line: f"{line[0]}\n    - {' '.join(next(texts).split())}",
        safety_template(),
        flags=re.MULTILINE,
    )


def write_models(directory: Path, template: str, options: argparse.Namespace) -> SafetyModels:
    """Write a decoder and its adapters, whose answers are fitted to the prompt."""
    return write_safety_models(
        directory,
        seed=options.seed,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=HEADS,
        rank=RANK,
        texts=docstrings()[:500],
        template=template,
    )


@dataclass
class Outcome:
    """Labels and work of a variant's latest run.

    Attributes
    ----------
    labels : list of str
    decode_steps : int
        Forwards that continued answers after a batch's first one.
    tokens_run : int
        Of prompts and answers, padding and drafts included, without a prefix that was run once.
    others : dict
        What only this variant has.
    """

    labels: list[str] = field(default_factory=list)
    decode_steps: int = 0
    tokens_run: int = 0
    others: dict[str, Any] = field(default_factory=dict)


class PlainGenerate:
    """The known recipe: ``generate`` on whole prompts, padded on the left, in order of length.

    The model is held in memory.
    """

    def __init__(
        self, models: SafetyModels, template: str, options: argparse.Namespace, is_merged: bool
    ) -> None:
        self._template, self._options = template, options
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(models.base, padding_side="left")
        self._tokenizer.pad_token = self._tokenizer.unk_token
        base = AutoModelForCausalLM.from_pretrained(models.base, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, models.defensive)
        self._model = (model.merge_and_unload() if is_merged else model).eval().to(options.device)
        self.outcome = Outcome()

    def run(self, texts: Sequence[str]) -> np.ndarray:
        """Return the labels of the texts, one-hot float (documents, labels)."""
        self.outcome = Outcome(labels=[""] * len(texts))
        ids = self._tokenizer(prompts_of(self._template, texts))["input_ids"]
        longest_first = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
        for start in range(0, len(ids), self._options.batch_size):
            rows = longest_first[start : start + self._options.batch_size]
            answers = self._generate([ids[row] for row in rows])
            for row, answer in zip(rows, answers, strict=True):
                self.outcome.labels[row] = published_label(answer)
        return one_hot(self.outcome.labels)

    @torch.inference_mode()
    def _generate(self, ids: list[list[int]]) -> list[str]:
        batch = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        width = batch["input_ids"].shape[1]
        whole = self._model.generate(
            **batch.to(self._options.device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        self.outcome.decode_steps += whole.shape[1] - width - 1
        self.outcome.tokens_run += len(ids) * (whole.shape[1] - 1)
        return self._tokenizer.batch_decode(whole[:, width:], skip_special_tokens=True)


class Aegis:
    """AegisClassifier in a process that has just started.

    Every run loads the decoder and the adapter, runs the prefix and has seen no answer before.
    """

    def __init__(self, models: SafetyModels, template: str, options: argparse.Namespace) -> None:
        self._classifier = AegisClassifier(
            model=str(models.defensive),
            base_model=str(models.base),
            template=template,
            device=options.device,
            autocast=False,
        )
        self.outcome = Outcome()

    def run(self, texts: Sequence[str]) -> np.ndarray:
        """Return the labels of the texts, one-hot float (documents, labels)."""
        started = time.perf_counter()
        self._classifier.teardown()
        self._classifier.setup()
        loading_seconds = time.perf_counter() - started
        with collected_stats() as runs:
            labels = self._classifier(pd.DataFrame({"text": texts}))["aegis_pred"].tolist()
        (stats,) = runs
        others = {
            "loading_seconds": loading_seconds,
            "prefix_tokens_share": stats.prefix_tokens / stats.tokens,
            "batches": stats.batches,
        }
        self.outcome = Outcome(labels, stats.decode_steps, stats.padded_tokens, others)
        return one_hot(labels)


def prompts_of(template: str, texts: Sequence[str]) -> list[str]:
    """Return the prompt with each of the texts in its place."""
    return [template.replace("User: \n", f"User: {text}\n") for text in texts]


def published_label(answer: str) -> str:
    """Parse an answer by the known tools' rule: safe, one category exactly, or unknown."""
    first, *others = answer.split("\n")
    if first.strip() == "safe":
        return "safe"
    if first.strip() != "unsafe" or not others:
        return "unknown"
    code = others[0].strip()
    return code if code in CODES else "unknown"


def one_hot(labels: Sequence[str]) -> np.ndarray:
    """Encode labels as one-hot float (documents, labels) in the order of `LABELS`."""
    return (np.asarray(labels)[:, None] == np.asarray(LABELS)).astype(float)


def measure(models: SafetyModels, template: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time every variant, and count what each ran."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models.base)
    lengths = LENGTHS["web"].sample(options.documents)
    texts = texts_of_lengths([min(length, LONGEST_TOKENS) for length in lengths], tokenizer)
    recipes = {
        BASELINES[0]: PlainGenerate(models, template, options, is_merged=False),
        BASELINES[1]: PlainGenerate(models, template, options, is_merged=True),
        SUBJECT: Aegis(models, template, options),
    }
    run = run_recipes(recipes, texts, options.repeats)
    prompt_tokens = [len(ids) for ids in tokenizer(prompts_of(template, texts))["input_ids"]]
    return {
        "documents": len(texts),
        "template_tokens": len(tokenizer(template)["input_ids"]),
        "median_prompt_tokens": float(np.median(prompt_tokens)),
        "prompt_tokens": sum(prompt_tokens),
        "labels": dict(Counter(recipes[SUBJECT].outcome.labels).most_common()),
        "variants": {
            name: findings(run, name, recipe.outcome, prompt_tokens)
            for name, recipe in recipes.items()
        },
        "speed_up": {name: run.speed_up(SUBJECT, name) for name in BASELINES},
    }


def run_recipes(recipes: dict[str, Any], texts: list[str], repeats: int) -> Run:
    """Time the recipes; DisagreementError tells for how many documents labels differ."""
    few = texts[:WARM_UP_DOCUMENTS]
    variants = [
        Variant(name, run=lambda r=recipe: r.run(texts), warm_up=lambda r=recipe: r.run(few))
        for name, recipe in recipes.items()
    ]
    try:
        return run_interleaved(variants, repeats, tolerance=0)
    except DisagreementError as error:
        latest = [recipe.outcome.labels for recipe in recipes.values()]
        complete = [labels for labels in latest if len(labels) == len(texts)]
        differing = sum(len(set(labels)) > 1 for labels in zip(*complete, strict=True))
        raise DisagreementError(
            f"{error} (labels differ for {differing} of {len(texts)} documents; with other "
            "weights, --seed, near-ties fall elsewhere)"
        ) from error


def findings(run: Run, name: str, outcome: Outcome, prompt_tokens: list[int]) -> dict[str, Any]:
    """Return times of a variant, and tokens and steps of its last run."""
    seconds = run.median_seconds(name)
    return {
        **run.times(name),
        "documents_per_second": len(prompt_tokens) / seconds,
        "prompt_tokens_per_second": sum(prompt_tokens) / seconds,
        "tokens_run": outcome.tokens_run,
        "decode_steps": outcome.decode_steps,
        **outcome.others,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    labels = ", ".join(f"{label} {count}" for label, count in result["labels"].items())
    lines = [
        f"{result['documents']} documents; prompts of {result['median_prompt_tokens']:.0f} tokens "
        f"(median), {result['template_tokens']} without a document; the same labels: {labels}",
        f"{'median s':>36}{'min - max':>18}{'docs/s':>9}{'tokens run':>12}{'steps':>7}"
        f"{'other cores':>13}",
    ]
    for name, found in result["variants"].items():
        spread = f"{min(found['seconds']):.2f} - {max(found['seconds']):.2f}"
        lines.append(
            f"  {name:24}{found['median_seconds']:10.2f}{spread:>18}"
            f"{found['documents_per_second']:9.2f}{found['tokens_run']:12d}"
            f"{found['decode_steps']:7d}{max(found['other_cores']):13.1f}"
        )
    for name, ratio in result["speed_up"].items():
        lines.append(f"  {SUBJECT} is {ratio['ratio_of_medians']:.2f} times as fast as {name}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
