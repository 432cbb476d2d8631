"""How fast are questions to a decoder against plain transformers, and what do more of them cost?

``python -m benchmarks.questions --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks import SUBJECT
from benchmarks.footprint import Request, measure_footprint
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, MAX_TOKENS, docstrings, texts_of_lengths
from benchmarks.ways import WARM_UP_DOCUMENTS, Way
from gpuclassify import PromptClassifier, TaxonomyClassifier
from gpuclassify.classifiers.questions.taxonomy import TAXONOMY
from tests.replicas.chat_models import write_chat_model

QUESTION = "questions"
PARTS = ("choice", "answer", "criteria", "memory")
BASELINE = "plain transformers"
ONE, FOUR = "one criterion", "four criteria"
# By name: the architecture and its sizes, but for the number of layers. The last layer weighs as
# much as nine others.
COMMON_SIZES = {
    "vocab_size": 151_936,
    "tie_word_embeddings": False,  # so that the last layer can be fitted
    "initializer_range": 0.05,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4_864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "hidden_size": 1_024,
            "intermediate_size": 3_072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}
ANSWERS = ("yes", "no")
INSTRUCTION_TOKENS = DOCUMENT_TOKENS = 500  # of the part choice, and of the part criteria
CRITERION_TOKENS = 30
NEW_TOKENS = 51  # of Essential AI's answers
TOLERANCE = 1e-4  # of a probability


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    architecture, sizes = DECODERS[options.model]
    sizes = COMMON_SIZES | sizes | {"num_hidden_layers": options.layers}
    if options.smoke:
        small = {"hidden_size": 336, "intermediate_size": 64, "vocab_size": 2_000}
        sizes |= small | ({"head_dim": 24} if "head_dim" in sizes else {})
    head = begin(options, sizes=sizes, dtype="float32", weights="random")
    with tempfile.TemporaryDirectory() as folder:
        words = [*docstrings()[:500], *(",skip" for _ in range(500))]
        directory = str(write_chat_model(Path(folder, "model"), architecture, words, **sizes))
        measures = {
            "choice": measure_choice,
            "answer": measure_answer,
            "criteria": measure_criteria,
            "memory": measure_memory,
        }
        result = head | {name: measures[name](directory, options) for name in options.parts}
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=12, help="web documents (12)")
    parser.add_argument("--model", choices=tuple(DECODERS), default=next(iter(DECODERS)))
    parser.add_argument("--layers", type=int, default=6, help="of the decoder (6)")
    parser.add_argument("--batch-size", type=int, default=4, help="of plain transformers (4)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    return parse(parser, arguments, documents=4, layers=2)


def measure_choice(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time a choice behind a long instruction, by transformers and by gpuclassify."""
    return _times(_choice_recipes(directory, options), web_texts(directory, options), options)


def _choice_recipes(directory: str, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    (instruction,) = texts_of_lengths([INSTRUCTION_TOKENS], plain_tokenizer(directory), seed=1)
    prompt = _in_template(instruction) + "\n\n{text}"
    settings = {"directory": directory, "prompt": prompt, "device": options.device}
    return {
        BASELINE: functools.partial(plain_shares, **settings, batch_size=options.batch_size),
        SUBJECT: functools.partial(our_shares, **settings),
    }


def _in_template(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def web_texts(directory: str, options: argparse.Namespace) -> list[str]:
    """Return web documents, cut at 512 tokens as in throughput."""
    lengths = [min(length, MAX_TOKENS) for length in LENGTHS["web"].sample(options.documents)]
    return texts_of_lengths(lengths, plain_tokenizer(directory))


def _times(
    recipes: dict[str, Callable[..., np.ndarray]], texts: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Time ways to answer about texts, which must agree."""
    variants = [
        Variant(
            name,
            run=functools.partial(recipe, texts),
            warm_up=functools.partial(recipe, texts[:WARM_UP_DOCUMENTS]),
        )
        for name, recipe in recipes.items()
    ]
    run = run_interleaved(variants, options.repeats, TOLERANCE)
    first, *_, last = recipes
    return {
        "documents": len(texts),
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in recipes},
        "speed_up": {first: run.speed_up(last, first)},
    }


@functools.lru_cache(maxsize=1)
def plain_model(directory: str, device: str) -> Any:
    """Load the decoder once, and keep it as a long job does."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval().to(device)


@functools.lru_cache(maxsize=1)
def plain_tokenizer(directory: str) -> Any:
    """Return a tokenizer that pads on the left."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.unk_token
    return tokenizer


def sorted_batches(
    tokenizer: Any, messages: Sequence[list[dict[str, str]]], batch_size: int
) -> Iterator[tuple[list[int], Any]]:
    """Yield rows with their prompts, longest first and padded on the left."""
    prompts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    longest_first = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    for start in range(0, len(ids), batch_size):
        rows = longest_first[start : start + batch_size]
        chosen = {"input_ids": [ids[row] for row in rows]}
        yield rows, tokenizer.pad(chosen, return_tensors="pt")


@torch.inference_mode()
def plain_shares(
    texts: Sequence[str], directory: str, prompt: str, batch_size: int, device: str
) -> np.ndarray:
    """Return the answers' probabilities by all last-position logits, (documents, answers)."""
    model, tokenizer = plain_model(directory, device), plain_tokenizer(directory)
    first_tokens = [tokenizer(one, add_special_tokens=False)["input_ids"][0] for one in ANSWERS]
    shares = np.empty((len(texts), len(ANSWERS)))
    messages = [[{"role": "user", "content": prompt.format(text=text)}] for text in texts]
    for rows, batch in sorted_batches(tokenizer, messages, batch_size):
        logits = model(**batch.to(device), logits_to_keep=1).logits[:, -1]
        shares[rows] = logits[:, first_tokens].softmax(1).cpu().numpy()
    return shares


@functools.lru_cache(maxsize=4)
def _classifier(kind: type[PromptClassifier], directory: str, device: str, **settings: Any) -> Any:
    return kind(model=directory, device=device, autocast=False, **settings)


def our_shares(texts: Sequence[str], directory: str, prompt: str, device: str) -> np.ndarray:
    """Return the answers' probabilities by `PromptClassifier`, (documents, answers)."""
    settings = {"prompt": prompt, "answers": ANSWERS, "score_field": "shares"}
    classifier = _classifier(PromptClassifier, directory, device, **settings)
    return np.stack(classifier(pd.DataFrame({"text": texts}))["shares"])


def measure_answer(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time Essential AI's ten lines of answer, by transformers and by gpuclassify."""
    texts = web_texts(directory, options)
    fitted = fit_answers(Path(directory), texts, options)
    settings = {"directory": fitted, "device": options.device}
    recipes = {
        BASELINE: functools.partial(generated_codes, **settings, batch_size=options.batch_size),
        SUBJECT: functools.partial(our_codes, **settings),
    }
    return _times(recipes, texts, options)


def _taxonomy_messages(texts: Sequence[str]) -> list[list[dict[str, str]]]:
    return [
        [{"role": "system", "content": "taxonomy"}, {"role": "user", "content": text}]
        for text in texts
    ]


def draw_answer(draw: np.random.Generator) -> str:
    """Draw an answer as Essential AI's model writes it; half of the fields have no second label."""

    def ranked(options: int) -> int:  # labels are as frequent as words
        weights = 1 / np.arange(1, options + 1)
        return int(draw.choice(options, p=weights / weights.sum()))

    lines = [f"{500 + ranked(100)}.{draw.integers(100, 1_000)},skip"]
    for first, labels in TAXONOMY.values():
        second = "skip" if draw.random() < 0.5 else first + ranked(len(labels))
        lines.append(f"{first + ranked(len(labels))},{second}")
    return "\n".join(lines)


@torch.inference_mode()
def fit_answers(directory: Path, texts: Sequence[str], options: argparse.Namespace) -> str:
    """Fit the decoder's last layer, so that it answers about each text in the published form."""
    model, tokenizer = plain_model(str(directory), options.device), plain_tokenizer(str(directory))
    states, tokens, draw = [], [], np.random.default_rng(0)
    for _, batch in sorted_batches(tokenizer, _taxonomy_messages(texts), 1):
        own = []
        while not 0 < len(own) <= NEW_TOKENS:
            own = tokenizer(draw_answer(draw), add_special_tokens=False)["input_ids"]
            own.append(tokenizer.eos_token_id)
        whole = torch.cat([batch["input_ids"], torch.tensor([own])], 1).to(options.device)
        states.append(model.base_model(input_ids=whole).last_hidden_state[0, -len(own) - 1 : -1])
        tokens += own
    used, columns = np.unique(tokens, return_inverse=True)
    wanted = torch.nn.functional.one_hot(torch.tensor(columns), len(used)).double() * 10
    rows = torch.linalg.lstsq(torch.cat(states).double().cpu(), wanted, driver="gelsd").solution
    model.lm_head.weight.data[torch.tensor(used)] = rows.T.to(model.lm_head.weight)
    fitted = directory.with_name("fitted")
    model.save_pretrained(fitted)
    tokenizer.save_pretrained(fitted)
    return str(fitted)


@torch.inference_mode()
def generated_codes(
    texts: Sequence[str], directory: str, batch_size: int, device: str
) -> np.ndarray:
    """Return the codes of the labels that are generated, (documents, fields); -1 for none."""
    model, tokenizer = plain_model(directory, device), plain_tokenizer(directory)
    answers = [""] * len(texts)
    for rows, batch in sorted_batches(tokenizer, _taxonomy_messages(texts), batch_size):
        whole = model.generate(
            **batch.to(device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        new = whole[:, batch["input_ids"].shape[1] :]
        for row, answer in zip(
            rows, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True
        ):
            answers[row] = answer
    return np.array([_codes(answer.replace("\n", ",").split(",")) for answer in answers])


def _codes(values: Sequence[str]) -> list[float]:
    return [-1.0 if value in ("skip", "Abstain") else float(value) for value in values]


def our_codes(texts: Sequence[str], directory: str, device: str) -> np.ndarray:
    """Return the codes of the labels by `TaxonomyClassifier`, (documents, fields); -1 for none."""
    classifier = _classifier(TaxonomyClassifier, directory, device)
    found = classifier(pd.DataFrame({"text": texts}))
    columns = [found["eai_fdc"], found["eai_fdc_secondary"]]
    for name, (first, labels) in TAXONOMY.items():
        code_of = {label: str(code) for code, label in enumerate(labels, first)}
        for suffix in ("", "_secondary"):
            columns.append(found[f"eai_{name}{suffix}"].replace(code_of))
    return np.array([_codes(row) for row in zip(*columns, strict=True)])


def measure_criteria(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time one criterion and four behind each document."""
    tokenizer = plain_tokenizer(directory)
    texts = texts_of_lengths([DOCUMENT_TOKENS] * options.documents, tokenizer)
    rules = texts_of_lengths([CRITERION_TOKENS] * 4, tokenizer, seed=2)
    recipes = {
        name: functools.partial(
            first_criterion,
            directory=directory,
            device=options.device,
            rules=tuple(rules[:count]),
        )
        for name, count in ((FOUR, 4), (ONE, 1))
    }
    return _times(recipes, texts, options)


def first_criterion(
    texts: Sequence[str], directory: str, device: str, rules: Sequence[str]
) -> np.ndarray:
    """Return the probability that a text meets the first of the criteria, (documents, 1)."""
    criteria = tuple((f"criterion{number}", rule) for number, rule in enumerate(rules))
    settings = {"prompt": "{text}\n\n{criterion}", "answers": ANSWERS, "criteria": criteria}
    classifier = _classifier(PromptClassifier, directory, device, **settings)
    return classifier(pd.DataFrame({"text": texts}))[["criterion0"]].to_numpy()


def measure_memory(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory and time of the choice in a process of its own, for each way."""
    texts = tuple(web_texts(directory, options))
    ways = {
        name: Way(name, functools.partial(_of_frame, recipe))
        for name, recipe in _choice_recipes(directory, options).items()
    }
    return {
        name: measure_footprint(Request(way, texts, 1, directory, options.device, options.threads))
        for name, way in ways.items()
    }


def _of_frame(recipe: Callable[..., np.ndarray], frame: Any, *_: str) -> np.ndarray:
    return recipe(frame["text"].compute().tolist())


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = []
    for part in PARTS[:3]:
        if part in result:
            found = result[part]
            lines.append(
                f"{part}: {found['documents']} documents, the same answers within "
                f"{found['largest_difference']:.0e}"
            )
            for name, times in found["variants"].items():
                spread = f"{min(times['seconds']):.2f} - {max(times['seconds']):.2f}"
                lines.append(f"  {name:20}{times['median_seconds']:8.2f} s{spread:>18}")
            lines += [
                f"  {ratio['ratio_of_medians']:.2f} times the time"
                for ratio in found["speed_up"].values()
            ]
    lines += [
        f"memory of a new process, {name}: {found['peak_resident_bytes'] / 2**20:.0f} MiB at most"
        for name, found in result.get("memory", {}).items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    # What runs in a process of its own is pickled, and __main__ is another module there.
    from benchmarks import questions

    questions.main()
