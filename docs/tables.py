"""Tables and reference of the documentation, from declarations and committed results.

``make tables`` writes tables into pages, between ``<!-- table: NAME -->`` and ``<!-- end -->``, and
signatures with docstrings below ``<!-- reference: NAMES -->``. The site replaces the latter by
Sphinx's own reference.
"""

import collections
import functools
import inspect
import json
import pkgutil
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from house import LAYERS

from gpuclassify.classifiers.published import CATALOGUE
from gpuclassify.classifiers.questions.prompt_classifier import PromptOptions
from gpuclassify.classifiers.signals.signals import SETS
from gpuclassify.commands.cli import main
from gpuclassify.commands.models import default_columns, labels_by_column, length_read
from gpuclassify.commands.options import GROUPS
from gpuclassify.commands.settings import families
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.options import (
    ClassifierOptions,
    LabelOptions,
    ModelOptions,
    PairOptions,
    ScoreOptions,
    TextOptions,
)
from gpuclassify.settings.signatures import NEXT_SECTION, explanations

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DOCS = Path(__file__).parent
MARK = re.compile(
    r"^<!-- (table|reference): ([\w. -]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL
)
MARK_LINE = re.compile(r"^<!--\s*(?:table|reference|end)\b.*", re.MULTILINE)
MOST_SHOWN = 12  # arguments of a signature; longer ones are shown as ...
LONGEST_DEFAULT = 60  # characters of a default that is shown
SHARING = 3  # an option of at least this many commands is listed once
# Classes of options, and the arguments that they declare for several classes of mappers.
OPTIONS = {
    TextOptions: "Of all mappers",
    ModelOptions: "Of all classifiers and of the embedder",
    PairOptions: "Of all that read pairs of texts as well",
    LabelOptions: "Of all that give labels",
    ScoreOptions: "Of all that give labels and scores",
    ClassifierOptions: "Of all that give probabilities",
    PromptOptions: "Of questions to language models",
}
# A setting as help() shows it, in one paragraph.
SETTING = re.compile(
    r"^(\w+)( \(.*?\))?: (.*?)(?=^\w+(?: \(.*?\))?: |\Z)", re.MULTILINE | re.DOTALL
)
COMMENT = re.compile(r"^<!--.*?-->\n*", re.MULTILINE | re.DOTALL)
EXIT_CODES = re.compile(
    r"^  Exit codes: .*?\n\n", re.MULTILINE | re.DOTALL
)  # they are at the top of the page
BASELINE, SUBJECT = "pipeline held", "gpuclassify"
# Published models by the shape that was measured for them.
SHAPES = {
    "deberta": ("domain", "multilingual-domain", "quality", "content-type"),
    "bert": ("fineweb-edu", "fineweb-mixtral-edu", "fineweb-nemotron-edu"),
}


def fill(text: str, page: str) -> str:
    """Return the page with today's tables, directives in place of references, and no comments."""

    def directives(mark: re.Match[str]) -> str:
        return f"```{{eval-rst}}\n{_directives(mark[2])}```" if mark[1] == "reference" else mark[0]

    return COMMENT.sub("", written(MARK.sub(directives, text), page))


def written(text: str, page: str) -> str:
    """Return the page with today's tables and references, and relative links to results.

    Raises ValueError for a mark that is not written as above, because its content would stay empty.
    """
    up = "../" * (page.count("/") + 1)
    seen: dict[tuple[str, str], str] = {}

    def made(mark: re.Match[str]) -> str:
        begin, *others, end = MARK_LINE.findall(mark[0])
        if others:
            raise ValueError(f"{page}: {begin} has no <!-- end --> before {others[0]}")
        if mark[1] == "table":
            content = TABLES[mark[2]]().replace("RESULTS/", f"{up}benchmarks/results/").strip()
        else:
            content = "".join(describe(name, seen) for name in mark[2].split()).rstrip("\n")
        return f"{begin}\n\n{content}\n\n{end}"

    if unread := MARK_LINE.findall(MARK.sub("", text)):
        raise ValueError(
            f"{page}: {unread[0]} is no mark: write <!-- table: NAME --> or "
            "<!-- reference: NAMES --> on a line, and <!-- end --> on a later one"
        )
    return MARK.sub(made, text)


def describe(name: str, seen: dict[tuple[str, str], str]) -> str:
    """Return signature and docstring of a Python name, as a fence; see `_own_settings`."""
    found = pkgutil.resolve_name(name)
    signature, empty = inspect.signature(found), inspect.Parameter.empty
    bare = [own.replace(annotation=empty) for own in signature.parameters.values()]
    signature = signature.replace(parameters=bare, return_annotation=empty)
    shown = "(*, ...)" if len(bare) > MOST_SHOWN else signature
    explained = _own_settings(found, seen).replace("  # doctest: +SKIP", "")
    return f"```none\n{found.__name__}{shown}\n\n{explained}\n```\n"


def _own_settings(found: Any, seen: dict[tuple[str, str], str]) -> str:
    """Return a docstring without settings that the page of arguments or a class above explains.

    `seen` has the classes by the names and texts of the settings that they explain on this page.
    """
    explained = inspect.getdoc(found) or ""
    head, title, rest = explained.partition("Parameters\n----------\n")
    settings, *after = NEXT_SECTION.split(rest, maxsplit=1)
    entries = SETTING.findall(settings)
    if not inspect.isclass(found) or not entries:
        return explained
    shared = shared_settings(settings) if issubclass(found, TextMapper) else set()
    defaults = getattr(found, "defaults", {})
    values = ((name, repr(value)) for name, value in defaults.items() if name in shared)
    shown = [
        f"{name}={value if len(value) <= LONGEST_DEFAULT else '...'}" for name, value in values
    ]
    own, as_above = "", collections.defaultdict(list)
    for name, choices, text in entries:
        owner = seen.setdefault((name, " ".join(text.split())), found.__name__)
        if name not in shared and owner == found.__name__:
            own += f"{name}{choices}: {text}"
        elif name not in shared:
            as_above[owner].append(name)
    notes = [f"Defaults of its own: {', '.join(shown)}"] if shown else []
    notes += [f"Settings as in {owner}: {', '.join(names)}" for owner, names in as_above.items()]
    parts = [head.rstrip(), *notes, *([f"{title}{own.rstrip()}"] if own else []), *after]
    return "\n\n".join(parts)


def shared_settings(settings: str) -> set[str]:
    """Return the names of settings that the page of arguments explains in the same words."""
    return {
        name
        for name, choices, text in SETTING.findall(settings)
        if f"{choices}: {' '.join(text.split())}" in _shared_texts().get(name, ())
    }


@functools.cache
def _shared_texts() -> dict[str, set[str]]:
    texts: dict[str, set[str]] = {}
    for options in OPTIONS:
        for name, text in explanations(options).items():
            texts.setdefault(name, set()).add(text)
    return texts


def _directives(names: str) -> str:
    """Return Sphinx's autodoc directives for all these names."""
    lines = ""
    for name in names.split():
        found, owner = pkgutil.resolve_name(name), pkgutil.resolve_name(name.rpartition(".")[0])
        kind = "method" if inspect.isclass(owner) else "function"
        lines += f".. auto{'class' if inspect.isclass(found) else kind}:: {name}\n"
    return lines


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield the path of each page, its text, and its text with today's tables."""
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        yield path, text, written(text, path.relative_to(DOCS).with_suffix("").as_posix())


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def classifiers() -> str:
    """Return a table of the published classifiers: purpose, columns and licence."""
    return table(
        ["class", "purpose", "new columns", "licence of the weights"],
        (
            [
                f"[`{owner.__qualname__}`](../reference/labels.md#{name})<br>`{_model_of(owner)}`",
                owner.purpose,
                _columns(owner),
                _licence(owner),
            ]
            for name, owner in families().items()
        ),
    )


def published() -> str:
    """Return a table of the catalogue of published checkpoints."""
    return table(
        ["name", "purpose", "new columns", "reads", "licence of the weights", "cite"],
        (
            [
                f"`{own.name}{(own.variants and f'-{own.variant}') or ''}`<br>`{own.model}`",
                own.purpose + (own.note and f" ({own.note})"),
                _named(own),
                length_read(own.defaults),
                _licence(own),
                f"<{own.cite}>" if own.cite.startswith("https") else own.cite,
            ]
            for own in CATALOGUE
        ),
    )


def words_of_names() -> str:
    """Return a list of the values of words in capitals, in names of the catalogue."""
    return "\n".join(
        f"* `{own.name}-{own.variant}`: {', '.join(f'`{word}`' for word in own.variants)}"
        for own in CATALOGUE
        if own.variants
    )


def _model_of(owner: Any) -> str:
    """Return the name of the published model, or of the argument that names one."""
    parameters = inspect.signature(owner).parameters
    named = [f"{name}=" for name in ("model", "heads") if name in parameters]
    return owner.defaults.get("model") or next(iter(named), "none")


def _licence(owner: Any) -> str:
    return owner.licence + (", gated" if owner.is_gated else "")


def _columns(owner: Any) -> str:
    if _model_of(owner).endswith("="):
        return "those of the model"
    return _named(owner)


def _named(owner: Any) -> str:
    names = [f"`{name}`" for name in default_columns(owner)]
    more = [f"and {len(names) - 4} more"] if len(names) > 4 else []
    return "<br>".join([*names[:4], *more])


def lengths() -> str:
    """Return a table of the text lengths and speeds of the published classifiers."""
    speeds = {
        family: f"{_variant(shape, SUBJECT)['real_tokens_per_second']:,.0f} tokens/s"
        for shape, members in SHAPES.items()
        for family in members
    }
    return table(
        ["classifier", "characters", "tokens", "measured on 2 CPU cores"],
        (
            [
                f"`{name}`",
                f"{owner.defaults['max_chars']:,}" if owner.defaults.get("max_chars") else "all",
                owner.defaults.get("max_seq_length") or "all that the model can",
                speeds.get(name, "not yet"),
            ]
            for name, owner in families().items()
        ),
    )


def labels() -> str:
    """Return sections with the model, columns and labels of every family."""
    return "\n".join(_family(name, owner) for name, owner in families().items())


def _family(name: str, owner: Any) -> str:
    model = owner.defaults.get("model")
    facts = [
        ["class", f"[`{owner.__qualname__}`](classifiers.md#{owner.__qualname__.lower()})"],
        ["model", f"`{_model_of(owner)}`"],
        ["licence of the weights", _licence(owner)],
    ]
    if model:
        columns = "<br>".join(f"`{name}` ({kind})" for name, kind in default_columns(owner).items())
        facts.append(["columns", columns])
    known = ", ".join(f"`{label}`" for label in owner.published_labels)
    of_model = "those of the model" if "label_field" in owner.defaults else "none"
    given = inspect.signature(owner).parameters.get("labels")
    of_model = "those of `labels=`" if given and given.default is given.empty else of_model
    by_column = {
        f"labels of `{column}`": ", ".join(f"`{label}`" for label in labels)
        for column, labels in labels_by_column(owner).items()
        if not column.endswith("_secondary")  # which are those of the first
    }
    facts += by_column.items() if by_column else [["labels", known or of_model]]
    return f"## `{name}`\n\n{table(['', ''], facts)}\n"


def arguments() -> str:
    """Return the arguments of the mappers, by the class of options that declares them."""
    return "\n".join(f"## {title}\n\n{_settings(kind)}\n" for kind, title in OPTIONS.items())


def _settings(kind: type) -> str:
    parameters = inspect.signature(kind).parameters
    return table(
        ["argument", "default", "meaning"],
        (
            [f"`{name}`", f"`{_default(parameters[name])}`", text.lstrip(": ").replace("|", "\\|")]
            for name, text in explanations(kind).items()
        ),
    )


def _default(parameter: Any) -> str:
    return repr(parameter.default) if parameter.default != "" else "the class's own"


def commands() -> str:
    """Return the help of every command, followed by the options that several commands share."""
    main_context = click.Context(main, info_name=main.name)
    contexts = {
        name: click.Context(command, main_context, name)
        for name in main.list_commands(main_context)
        if (command := main.get_command(main_context, name))
    }
    options = {name: _options(context) for name, context in contexts.items()}
    counts = collections.Counter(option for own in options.values() for option in own)
    shared = [option for option, count in counts.items() if count >= SHARING]
    sections = [_command(contexts[name], own, shared) for name, own in options.items()]
    listed = "\n".join(f"### {group}\n\n{_listed(group, shared)}\n" for group in _groups(shared))
    return "\n".join([*sections, f"## Options of several commands\n\n{listed}"])


def _options(context: click.Context) -> list[tuple[str, tuple[str, str]]]:
    """Return pairs of a group and a help record, for the options of a command."""
    hidden = getattr(context.command, "hidden_group", "")
    return [
        (group, record)
        for parameter in context.command.get_params(context)
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context))
        if (group := getattr(parameter, "group", "Options")) != hidden
    ]


def _command(context: click.Context, options: list[Any], shared: list[Any]) -> str:
    """Return the usage, text and own options of a command, and links to its shared options."""
    formatter = context.make_formatter()
    context.command.format_usage(context, formatter)
    context.command.format_help_text(context, formatter)
    own = [option for option in options if option not in shared]
    for group in _groups(own):
        with formatter.section(group):
            formatter.write_dl([record for name, record in own if name == group])
    common = [option for option in options if option in shared]
    also = "".join(
        f"* [{group}](#{group.lower().replace(' ', '-')}): "
        + ", ".join(
            f"`{record[0].split(' ')[0].rstrip(',')}`" for name, record in common if name == group
        )
        + "\n"
        for group in _groups(common)
    )
    text = EXIT_CODES.sub("", formatter.getvalue()).strip()
    return f"## {context.info_name}\n\n```none\n{text}\n```\n\nShared options:\n\n{also}"


def _groups(options: Iterable[Any]) -> list[str]:
    groups = {group for group, _ in options}
    return [group for group in GROUPS if group in groups]


def _listed(group: str, options: Iterable[Any]) -> str:
    """Return the help of a group's options, as a fence."""
    formatter = click.HelpFormatter()
    formatter.write_dl([record for name, record in options if name == group])
    return f"```none\n{formatter.getvalue()}```"


def layers() -> str:
    """Return a numbered list of the layers of the package."""
    return "\n".join(
        f"{height}. {', '.join(f'`{room}`' for room in sorted(layer))}"
        for height, layer in enumerate(LAYERS, 1)
    )


def throughput() -> str:
    """Return a table of speeds against Hugging Face's recipe, with a row per result."""
    return table(
        [
            "model, documents",
            "recipe, tokens/s",
            "gpuclassify, tokens/s",
            "times",
            "share of the matmul peak",
            "result",
        ],
        (
            [
                f"{_model(result)}, {corpus['documents']} {kind}",
                f"{ways[BASELINE]['real_tokens_per_second']:.0f}",
                f"{ways[SUBJECT]['real_tokens_per_second']:.0f}",
                f"**{corpus['speed_up'][BASELINE]['ratio_of_medians']:.1f}**",
                f"{ways[BASELINE]['share_of_peak']:.0%} → {ways[SUBJECT]['share_of_peak']:.0%}",
                _link(path),
            ]
            for path, result, kind, corpus in _corpora("throughput")
            for ways in [corpus["variants"]]
        ),
    )


def on_a_gpu() -> str:
    """Return a table of speeds on GPUs, with precision, error and the seconds of every round."""

    def quoted(found: dict[str, Any]) -> float:
        """Return the median of three or more rounds; of fewer the fastest, as they have none."""
        rounds = found["seconds"]
        return statistics.median(rounds) if len(rounds) > 2 else min(rounds)

    return table(
        [
            "model, documents; GPU, torch, day",
            "way",
            "precision",
            "error",
            "seconds of each round",
            "tokens/s",
            "share of the matmul peak",
            "speedup by gpuclassify",
            "result",
        ],
        (
            [
                f"{_model(result)}, {corpus['documents']} {kind}; {result['gpu']['name']}, "
                f"{result['versions']['torch']}, {result['finished'][:10]}",
                way,
                found["dtype"],
                f"{found['difference']:.0e}",
                ", ".join(f"{seconds:.2f}" for seconds in found["seconds"]),
                f"{corpus['real_tokens'] / quoted(found):,.0f}",
                f"{found['share_of_peak'] * found['median_seconds'] / quoted(found):.0%}",
                f"{quoted(found) / quoted(corpus['variants'][SUBJECT]):.1f}",
                _link(path),
            ]
            for path, result, kind, corpus in _corpora("device")
            for way, found in corpus["variants"].items()
        ),
    )


def tokens() -> str:
    """Return a table of microseconds per text, by kind of tokenizer and text."""
    ways = ("cold", "steady", SUBJECT, "gigatoken")
    return table(
        [
            "kind, texts, threads",
            "tokenizers, us a text",
            "cold",
            "steady",
            "warm",
            "gigatoken",
            "result",
        ],
        (
            [
                f"{name}, {result['settings']['threads']}",
                f"{case['variants']['tokenizers']['us_a_text']:.0f}",
                *(_times(case["variants"], way) for way in ways),
                _link(path),
            ]
            for path, result in _results("tokens")
            for name, case in result["cases"].items()
        ),
    )


def spans() -> str:
    """Return a table of finding spans, against transformers' pipeline."""
    peer = "pipeline, sorted batches"
    return table(
        ["model, texts", "pipeline, s", "gpuclassify, s", "times", "peak memory, MB", "result"],
        (
            [
                f"{_model(result)}, {result['texts']} {result['settings']['lengths']}",
                *(f"{result['variants'][way]['median_seconds']:.1f}" for way in (peer, SUBJECT)),
                f"{result['speed_up'][peer]['ratio_of_medians']:.2f}",
                " → ".join(
                    f"{result['footprints'][way]['peak_resident_bytes'] / 1e6:.0f}"
                    for way in (peer, SUBJECT)
                ),
                _link(path),
            ]
            for path, result in _results("spans")
        ),
    )


def decontamination() -> str:
    """Return a table of planted test items that were found, and of speeds."""
    rows = []
    for path, result in _results("decontamination"):
        for family, counts in result["families"].items():
            kind = "found" if counts["is_planted"] else "falsely found"
            rows.append([family, f"{counts['contaminated']} of {counts['documents']} {kind}"])
        for items, build in result["builds"].items():
            bytes_an_ngram = f"{build['bytes_an_ngram']:.0f} bytes an n-gram"
            rows.append([f"an index of {items}", f"{build['seconds']:.0f} s, {bytes_an_ngram}"])
        time = result["variants"][SUBJECT]["us_a_document"]
        rows.append([f"a document of 5 kB, one core ({_link(path)})", f"{time:.0f} us"])
    return table(["what", "result"], rows)


def annotations() -> str:
    """Return a table of annotating and selecting, against rewriting."""
    rows = []
    for path, result in _results("annotations"):
        writing, zipped = result["writing"], result["zip"]
        for name, seconds in writing["seconds"].items():
            rows.append([name, f"{writing['bytes'][name] / 1e6:,.0f} MB in {seconds:.1f} s"])
        for name, selection in result["selections"].items():
            ours, plain = (min(selection["seconds"][way]) for way in ("select", "pyarrow"))
            rows.append([f"select {name}", f"{ours:.1f} s; a script of pyarrow: {plain:.1f} s"])
        times = [zipped["variants"][way]["median_seconds"] for way in ("together", "apart")]
        what = f"{zipped['rows']:,} rows of {zipped['sets']} sets ({_link(path)})"
        rows.append([what, "{:.1f} s side by side, {:.1f} s one after another".format(*times)])
    return table(["what", "result"], rows)


def choices() -> str:
    """Return a table of drawing samples, planning mixtures and finding thresholds."""
    rows = []
    for path, result in _results("samples"):
        for name, rounds in result["ways"].items():
            seconds = statistics.median(run["seconds"] for run in rounds)
            memory = max(run["peak_bytes"] for run in rounds)
            what = f"`sample` of {result['settings']['rows']:,} rows, {name}"
            rows.append([what, f"{seconds:.1f}", f"{memory / 1e6:.0f}", _link(path)])
        mixes = result["mixes"]
        seconds = statistics.median(run["seconds"]["plan"] for run in mixes)
        memory = max(run["peak_bytes"] for run in mixes)
        what = f"`Mix.plan` of {mixes[0]['rows']:,} rows, {mixes[0]['cells']} cells"
        rows.append([what, f"{seconds:.1f}", f"{memory / 1e6:.0f}", _link(path)])
    for path, result in _results("thresholds"):
        for name, variant in result["variants"].items():
            what = f"`Thresholds.fit` of {result['rows']:,} rows, {name}"
            seconds, memory = variant["median_seconds"], result["peak_bytes"]
            rows.append([what, f"{seconds:.1f}", f"{memory / 1e6:.0f}", _link(path)])
    return table(["what", "seconds", "peak memory of the process, MB", "result"], rows)


def _times(variants: dict[str, Any], way: str) -> str:
    """Return the time per text of a way, and its speedup over `tokenizers`."""
    if way not in variants:
        return ""
    time = variants[way]["us_a_text"]
    return f"{time:.0f} ({variants['tokenizers']['us_a_text'] / time:.1f} times)"


def other_ways() -> str:
    """Return a table of other ways to batch, from the results of `throughput`."""
    return table(
        ["model, documents", "way", "tokens/s", "speedup by gpuclassify", "result"],
        (
            [
                f"{_model(result)}, {corpus['documents']} {kind}",
                way,
                f"{found['real_tokens_per_second']:.0f}",
                f"{corpus['speed_up'][way]['ratio_of_medians']:.2f}",
                _link(path),
            ]
            for path, result, kind, corpus in _corpora("throughput")
            for way, found in corpus["variants"].items()
            if way not in (BASELINE, SUBJECT)
        ),
    )


def engines() -> str:
    """Return a table of engines for CPUs on the same weights."""
    return table(
        [
            "model",
            "engine",
            "tokens/s",
            "times the recipe",
            "share of the matmul peak",
            "error",
            "result",
        ],
        (
            [
                _model(result),
                f"{way}, float32" if way == SUBJECT else way,
                f"{found['real_tokens_per_second']:,.0f}",
                f"{corpus['variants'][BASELINE]['median_seconds'] / found['median_seconds']:.1f}",
                "" if found["share_of_peak"] is None else f"{found['share_of_peak']:.0%}",
                f"{found['difference']:.0e}",
                _link(path),
            ]
            for path, result, _, corpus in _corpora("engines")
            for way, found in corpus["variants"].items()
        ),
    )


def int8() -> str:
    """Return a table of int8 against bfloat16, with a row per model."""

    def formatted(found: dict[str, Any], name: str, form: str) -> list[str]:
        return ["" if value is None else format(value, form) for value in found[name].values()]

    return table(
        [
            "model",
            "int8 over bfloat16",
            "labels changed by bfloat16",
            "by int8",
            "mean difference of bfloat16",
            "of int8",
            "result",
        ],
        (
            [
                name,
                f"{found['int8_over_bfloat16']:.2f}",
                *formatted(found, "changed_labels", ".1%"),
                *formatted(found, "mean_difference", ".2g"),
                _link(path),
            ]
            for path, result in _results("int8")
            for name, found in result["models"].items()
        ),
    )


def precision() -> str:
    """Return a table of differences from float32, with a row for each model."""

    def each(found: dict[str, Any], name: str, form: str) -> str:
        values = [found[dtype][name] for dtype in ("bfloat16", "float16", "float8")]
        return "" if None in values else ", ".join(format(value, form) for value in values)

    return table(
        [
            "model",
            "weights",
            "mean difference",
            "largest difference",
            "labels that move",
            "scores that cross a threshold",
            "texts computed again",
            "result",
        ],
        (
            [
                name,
                found["weights"],
                each(found, "mean_difference", ".1e"),
                each(found, "largest_difference", ".1e"),
                each(found, "moved_labels", ".1%"),
                each(found, "crossed", ".1%"),
                each(found, "recomputed", ".1%"),
                _link(path),
            ]
            for path, result in _results("precision")
            for name, found in result["models"].items()
        ),
    )


def footprints() -> str:
    """Return a table of peak memory and of seconds to the first answers."""
    return table(
        ["model", "way", "seconds to the first 8 answers", "peak memory", "result"],
        (
            [
                _model(result),
                "recipe" if way == BASELINE else way,
                f"{found['first_seconds']:.1f}",
                f"{found['peak_resident_bytes'] / 1e9:.1f} GB",
                _link(path),
            ]
            for path, result, _, corpus in _corpora("throughput")
            for way, found in corpus["footprints"].items()
        ),
    )


def deduplication() -> str:
    """Return a table of fuzzy deduplication, against peers."""
    return table(
        [
            "way",
            "seconds",
            "peak memory",
            "documents kept",
            "times our verified seconds",
            "result",
        ],
        (
            [
                way,
                f"{found['median_seconds']:.1f}",
                f"{found['peak_resident_bytes'] / 1e6:,.0f} MB",
                f"{found['kept']:,}",
                f"{found['median_seconds'] / ways['gpuclassify, verified']['median_seconds']:.1f}",
                _link(path),
            ]
            for path, _, _, corpus in _corpora("deduplication")
            for ways in [corpus["variants"]]
            for way, found in ways.items()
        ),
    )


def precision_of_removal() -> str:
    """Return a table of the share of removed documents that are similar to a kept one."""
    return table(
        ["way", "removed", "at least 0.8 alike in words", "result"],
        (
            [
                way,
                f"{found['precision']['removed']:,}",
                f"{found['precision']['words']['0.8']:.1%}",
                _link(path),
            ]
            for path, result in _results("deduplication")
            for bands, ways in result["recall"].items()
            if "x" in bands
            for way, found in ways.items()
        ),
    )


def safety() -> str:
    """Return a table of AegisClassifier, against plain generate."""
    return table(
        ["way", "seconds", "documents/s", "times", "result"],
        (
            [
                way,
                f"{found['median_seconds']:.1f}",
                f"{found['documents_per_second']:.2f}",
                f"{result['speed_up'][way]['ratio_of_medians']:.1f}"
                if way in result["speed_up"]
                else "",
                _link(path),
            ]
            for path, result in _results("safety")
            for way, found in result["variants"].items()
        ),
    )


def questions() -> str:
    """Return a table of questions against plain transformers, and four criteria against one."""
    parts = {
        "choice": "yes or no behind an instruction of 500 tokens",
        "answer": "the taxonomy's ten lines, against `generate`",
        "criteria": "four criteria behind one document, against one",
    }
    return table(
        ["question", "documents", "way", "seconds", "memory", "times", "result"],
        (
            [
                what,
                result[part]["documents"],
                way,
                f"{found['median_seconds']:.1f}",
                f"{result['memory'][way]['peak_resident_bytes'] / 1e6:,.0f} MB"
                if part == "choice"
                else "",
                f"{result[part]['speed_up'][way]['ratio_of_medians']:.2f}"
                if way in result[part]["speed_up"]
                else "",
                _link(path),
            ]
            for path, result in _results("questions")
            for part, what in parts.items()
            for way, found in result[part]["variants"].items()
        ),
    )


def trunks() -> str:
    """Return a table of several classifiers on one trunk, against one of them."""
    return table(
        ["classifiers", "layers in common", "documents", "way", "seconds", "times one", "result"],
        (
            [
                name,
                found["shared_layers"],
                found["documents"],
                way,
                f"{times['median_seconds']:.1f}",
                f"{found['cost'][way]['ratio_of_medians']:.2f}" if way in found["cost"] else "",
                _link(path),
            ]
            for path, result in _results("trunks")
            for name, found in result["found"].items()
            for way, times in found["variants"].items()
        ),
    )


def workers() -> str:
    """Return a table of the default number of workers, while other programs are busy."""
    return table(
        ["model", "load", "default", "speed against the best other number", "result"],
        (
            [
                _model(result),
                f"{result['settings']['busy']} busy programs",
                result["default"],
                f"{result['default_against_best']['ratio_of_medians']:.2f}",
                _link(path),
            ]
            for path, result in _results("workers")
        ),
    )


def fasttext() -> str:
    """Return a table of fastText in gpuclassify, against its library."""
    return table(
        ["model", "way", "documents/s", "documents a core second", "times the library", "result"],
        (
            [
                f"`{result['settings']['model']}`",
                way,
                f"{found['rows_per_second']:,.0f}",
                f"{found['rows_per_core_second']:,.0f}",
                f"{found['rows_per_core_second'] / library:.2f}",
                _link(path),
            ]
            for path, result in _results("fasttext")
            for library in [result["variants"]["the library"]["rows_per_core_second"]]
            for way, found in result["variants"].items()
        ),
    )


def heads() -> str:
    """Return a table of several heads on one embedding, against a pass per head."""
    return table(
        ["way", "seconds", "times one head", "result"],
        (
            [
                f"{way} ({result['settings']['heads']} heads)",
                f"{result['variants'][way]['median_seconds']:.1f}",
                f"{cost['ratio_of_medians']:.2f}",
                _link(path),
            ]
            for path, result in _results("heads")
            for way, cost in result["cost"].items()
        ),
    )


def training() -> str:
    """Return a table of training heads, against embedding the same texts alone."""
    return table(
        ["annotated texts", "kind", "seconds", "times embedding them", "result"],
        (
            [
                f"{result['documents']:,}",
                f"`{kind}`",
                f"{result['variants'][kind]['median_seconds']:.1f}",
                f"{times:.2f}",
                _link(path),
            ]
            for path, result in _results("training")
            for kind, times in result["times_embedding"].items()
        ),
    )


def scale() -> str:
    """Return a table of the speed and memory growth of a job over many documents."""
    return table(
        [
            "documents",
            "documents/s",
            "seconds a million",
            "farthest from the median",
            "in yardsticks",
            "growth of client and workers",
            "result",
        ],
        (
            [
                f"{result['rows']:,}",
                f"{result['rows_per_second']:,.0f}",
                f"{min(pace['seconds']):.1f} to {max(pace['seconds']):.1f}",
                f"{pace['largest_deviation']:.0%}",
                f"{pace['largest_deviation_in_yardsticks']:.0%}",
                " and ".join(f"{grown[part] / 1e6:.0f} MB" for part in ("client", "workers")),
                _link(path),
            ]
            for path, result in _results("scale")
            for pace, grown in [(result["pace"], result["memory_growth"])]
        ),
    )


FAULTS = {
    "end": "ends",
    "end-twice": "ends, and so does the next run",
    "full": "disk is full",
    "error": "I/O error",
    "damage": "damaged files",
}


def faults() -> str:
    """Return a table of outcomes of injected faults, with a row per command."""
    *_, (path, result) = _results("faults")
    outcomes = {(found["case"], found["mode"]): found for found in result["outcomes"]}
    return table(
        ["command", "changes of files", *FAULTS.values(), "refused, with a cure", "left over"],
        (
            [
                f"[`{case}`](RESULTS/{path.name})",
                f"{own[0]['changes']:,}",
                *(
                    f"{found['healed'] + found['refused']:,} of {found['points']:,}"
                    for found in own
                ),
                *(f"{sum(found[name] for found in own):,}" for name in ("refused", "leftovers")),
            ]
            for case in dict.fromkeys(case for case, _ in outcomes)
            for own in [[outcomes[case, mode] for mode in FAULTS]]
        ),
    )


def _results(question: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(RESULTS.glob(f"{question}-*.json")):
        yield path, json.loads(path.read_text(encoding="utf-8"))


def _corpora(question: str) -> Iterator[tuple[Path, dict[str, Any], str, dict[str, Any]]]:
    """Yield path, result, and name and figures of each corpus."""
    for path, result in _results(question):
        for kind, corpus in result["corpora"].items():
            yield path, result, kind, corpus


def _variant(shape: str, way: str) -> dict[str, Any]:
    """Return the figures of a way in the newest result for a shape, on web documents."""
    found = [
        corpus["variants"][way]
        for _, result, kind, corpus in _corpora("throughput")
        if result["settings"]["model"] == shape and kind == "web"
    ]
    return found[-1]


def _model(result: dict[str, Any]) -> str:
    names = {"bert": "BERT-base", "deberta": "DeBERTa-v3-base", "minilm": "MiniLM"}
    return names[result["settings"]["model"]]


def _link(path: Path) -> str:
    return f"[JSON](RESULTS/{path.name})"


def signals() -> str:
    """Return a table of the signals of texts, with their sources and definitions."""
    return table(
        ["signal", "definition"],
        (
            row
            for name, own in SETS.items()
            for row in (
                [f"**`{name}`**", own.source],
                *([f"`{column}`", signal.definition] for column, signal in own.signals.items()),
            )
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    "classifiers": classifiers,
    "published": published,
    "published-words": words_of_names,
    "lengths": lengths,
    "labels": labels,
    "arguments": arguments,
    "commands": commands,
    "layers": layers,
    "throughput": throughput,
    "gpu": on_a_gpu,
    "tokens": tokens,
    "spans": spans,
    "signals": signals,
    "decontamination": decontamination,
    "annotations": annotations,
    "choices": choices,
    "other-ways": other_ways,
    "footprints": footprints,
    "engines": engines,
    "int8": int8,
    "precision": precision,
    "deduplication": deduplication,
    "precision-of-removal": precision_of_removal,
    "questions": questions,
    "trunks": trunks,
    "safety": safety,
    "workers": workers,
    "fasttext": fasttext,
    "heads": heads,
    "training": training,
    "scale": scale,
    "faults": faults,
}

if __name__ == "__main__":
    for path, text, today in pages():
        if today != text:
            path.write_text(today, encoding="utf-8")
