"""The options that commands of jobs share, and the settings that they mean."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import click

from gpuclassify.commands.settings import JobSettings, families
from gpuclassify.settings.options import DTYPES, LOADERS

MODEL, ROWS, DUPLICATES, FILES = "Classifiers", "Columns and rows", "Duplicates", "Files"
TRAINING, BUCKETS = "Training", "Buckets"
REPORT = "Report"
LABELLED = "[LABEL=]NUMBER"  # of an argument that may be a dict
CLUSTER = "Cluster"  # the group of options that a plan has no use for
GROUPS = (MODEL, ROWS, DUPLICATES, BUCKETS, TRAINING, FILES, REPORT, CLUSTER, "Settings", "Options")


class Argument(NamedTuple):
    """An argument of classifiers that has an option of its own.

    One that is not shared by all classifiers may begin with the name of the one that it means.
    """

    name: str
    group: str
    help: str
    metavar: str | None = None
    kind: Any = None
    is_shared: bool = False

    @property
    def flag(self) -> str:
        """As it is given."""
        return f"--{self.name.replace('_', '-')}"


ARGUMENTS = (
    Argument("model", MODEL, "Hub name or directory. Default: the published model.", "NAME"),
    Argument("heads", MODEL, "Directory or Hub name of a head on embeddings, and the name of its "
             "columns; repeatable.", "NAME=PATH", dict),
    Argument("backbone", MODEL, "Hub name or directory of what embeds for heads. Default: what "
             "they were trained on.", "NAME"),
    Argument("base_model", MODEL, "Hub name or directory of the backbone, where the model does "
             "not tell its sizes.", "NAME"),
    Argument("revision", MODEL, "Branch, tag or commit of the model."),
    Argument("strict", MODEL, "Refuse a model whose labels are not the classifier's.", None, bool,
             True),
    Argument("cache_dir", MODEL, "Where downloads are kept.", "DIRECTORY", None, True),
    Argument("text_field", MODEL, "Column of the text. Default: text.", "COLUMN", None, True),
    Argument("text_template", MODEL, "What the model is given of columns of strings, such as "
             "'{url}\\n\\n{text}'; \\n is a new line.", "TEMPLATE",
             lambda text: text.replace("\\n", "\n"), True),
    Argument("max_chars", MODEL, "Characters of a text that the model sees.", None, int, True),
    Argument("max_seq_length", MODEL, "Tokens of a text that the model sees.", None, int, True),
    Argument("batch_size", MODEL, "Most rows of a batch. Default: automatic.", None, int, True),
    Argument("dtype", MODEL, "Default: the fastest that does well.", None, click.Choice(DTYPES),
             True),
    Argument("device", MODEL, "auto, cpu, mps, cuda or cuda:N. Default: auto.", None, None, True),
    Argument("loader", MODEL, "Default: sorted.", None, click.Choice(LOADERS), True),
    Argument("label_field", ROWS, "Output column of the label.", "COLUMN"),
    Argument("score_field", ROWS, "Output column of the scores.", "COLUMN"),
    Argument("confidence_field", ROWS, "Output column of the label's probability.", "COLUMN"),
    Argument("labels_field", ROWS, "Output column of all labels that score their threshold, of a "
             "multi-label model.", "COLUMN"),
    Argument("thresholds", ROWS, "Least score of a label of --labels-field. Default: 0.5.",
             LABELLED, float),
    Argument("score_format", ROWS, "list or struct: the scores of several labels in id order, or "
             "by name. Default: list.", "NAME"),
    Argument("overwrite", ROWS, "Replace columns that exist.", None, bool, True),
    Argument("filter_by", ROWS, "Keep only rows with this label; repeatable.", "[HEAD=]LABEL",
             list),
    Argument("min_score", ROWS, "Keep only rows that score at least this, for a label or by a head "
             "alone.", LABELLED, float),
    Argument("min_confidence", ROWS, "Keep only rows whose label is at least this probable, 0 to "
             "1.", "[HEAD=]NUMBER", float),
    Argument("keep_field", ROWS, "Drop no rows, and write to this column whether each would be "
             "kept.", "COLUMN"),
)  # fmt: skip


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_WORDS = f"{__name__}.words"


class GroupedOption(click.Option):
    """An option with a group in the help."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


class JobCommand(click.Command):
    """A command whose help shows options in groups, except for the `hidden_group`."""

    hidden_group = ""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command's name, and keep them for `command_line`."""
        context.meta[_WORDS] = tuple(args)
        return super().parse_args(context, args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, and options that belong to none last."""
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record and isinstance(parameter, click.Option):
                own = parameter.group if isinstance(parameter, GroupedOption) else "Options"
                groups[own].append(record)
        for group, records in groups.items():
            if records and group != self.hidden_group:
                with formatter.section(group):
                    formatter.write_dl(records)


class LocalCommand(JobCommand):
    """A command that takes options of a cluster, and starts none."""

    hidden_group = CLUSTER


grouped_option = functools.partial(click.option, cls=GroupedOption)
COLUMN = {"metavar": "COLUMN"}


def option_table(group: str, table: Mapping[str, Mapping[str, Any]]) -> Decorator:
    """The options of a group: the names of each, as ``--set others``, and its attributes."""
    return _all_of(grouped_option(*k.split(), group=group, **own) for k, own in table.items())


def _all_of(options: Iterable[Decorator]) -> Decorator:
    """Several options as one decorator of a `JobCommand`."""
    listed = [*options]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(listed):
            command = option(command)
        return command

    return decorate


run_options = _all_of([
    click.option(
        "--restart/--resume", default=False,
        help="Start over and remove what earlier runs wrote, or continue, which is the default.",
    ),
    click.option(
        "--verify", type=click.Choice(["digest", "size"]), default="digest", show_default=True,
        help="How to see whether parts of earlier runs are still as they were written: by the "
        "digests of their files, which reads them, or by sizes alone.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON."),
])  # fmt: skip


def _setting_options(groups: Collection[str]) -> Iterator[Decorator]:
    for own in fields(JobSettings):
        if (group := own.metadata["group"]) in groups:
            attributes = dict(own.metadata["option"])
            flag = f"--{own.name.replace('_', '-')}"
            short = attributes.pop("short", None)
            if choices := attributes.pop("choices", None):
                attributes["type"] = click.Choice(choices)
            elif str(own.type).startswith(("list", "dict")):
                flag, attributes["multiple"] = flag.removesuffix("s"), True
            elif own.type == "bool":
                attributes |= {"is_flag": True, "default": None}
            elif own.type in ("int", "int | None"):
                attributes["type"] = int
            names = [flag, own.name] if short is None else [short, flag, own.name]
            yield grouped_option(*names, group=group, **attributes)


def _argument_options() -> Iterator[Decorator]:
    for argument in ARGUMENTS:
        kind: dict[str, Any] = {"type": argument.kind}
        if not argument.is_shared:
            kind = {"multiple": True}
        elif argument.kind is bool:
            kind = {"is_flag": True, "default": None}
        kind |= {"help": argument.help, "metavar": argument.metavar, "group": argument.group}
        yield grouped_option(argument.flag, argument.name, **kind)


cluster_options = _all_of(_setting_options({CLUSTER}))
file_options = _all_of(_setting_options({FILES, CLUSTER}))
job_options = _all_of([
    *_setting_options({MODEL, ROWS, FILES, REPORT, CLUSTER}),
    *_argument_options(),
    option_table(MODEL, {
        "--set others": {"metavar": "NAME=VALUE", "multiple": True, "help": "Any other argument "
                         "of the classifier; VALUE is JSON, or a text. Repeatable."},
    }),
    option_table("Settings", {
        "--config": {"metavar": "FILE", "help": "Read settings from a YAML file; options of the "
                     "command line win."},
        "--dump-config": {"metavar": "FILE", "help": "Write the settings to a YAML file, and "
                          "stop."},
    }),
])  # fmt: skip


def command_line(context: click.Context) -> str:
    """The command that makes the same job again, without secrets and without starting over."""
    from gpuclassify.jobs.storage import redacted

    words, name = [], ""
    for word in context.meta[_WORDS]:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if (option or name) == "--cluster-option" and value:  # may hold what a cloud asks for
            value = f"{value.partition('=')[0]}=..."
        if option != "--restart":
            words.append(f"{option}{equals}{redacted(value)}")
        name = "" if equals else option
    return shlex.join(["gpuclassify", context.info_name or "", *words])


def split_paths(paths: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Input and output; with a config file that names the input, the output alone will do."""
    if "-" in paths:
        raise ValueError(
            "'-' is no path: a job reads its input in parts and goes on after an interruption, "
            "which needs files. (A file of this name is ./-) `gpuclassify preview -` reads a few "
            "texts from standard input"
        )
    *inputs, output = paths or (None,)
    if not inputs and not given.get("config") and (paths or "config" not in given):
        got = f"got one path, {output!r}: " if paths else ""
        raise ValueError(f"{got}name the input, and then the output: INPUT... OUTPUT")
    return {"input": inputs, "output": output}


def read_settings(given: Mapping[str, Any], **paths: Any) -> JobSettings | None:
    """The config file's settings, with those of the command line in their place.

    Parameters
    ----------
    given : mapping
        Values of `job_options`.
    **paths
        ``input`` and ``output``, as far as the command line names them. Without ``output`` the
        settings are those of a plan.

    Returns
    -------
    JobSettings or None
        None if they were written to a file (``--dump-config``), which was all that was wanted.

    Raises
    ------
    TypeError, ValueError
        See `gpuclassify.commands.settings.JobSettings.of`.
    """
    from gpuclassify.commands.settings import dump_settings, load_settings

    values = load_settings(given["config"]) if given["config"] else {}
    values |= {name: path for name, path in paths.items() if path}
    _add_given(values, given)
    classifiers = [dict(settings) for settings in values.get("classifiers") or []]
    names = [settings.get("classifier") for settings in classifiers]
    for family, arguments in zip(names, classifiers, strict=True):
        for argument in ARGUMENTS:
            value = given[argument.name]
            if not argument.is_shared:
                value = _value(argument, _own(argument.flag, value, family, names), family)
            if value is not None and _is_meant(argument, family, names):
                arguments[argument.name] = value
        others = _own("--set", given["others"], family, names)
        arguments.update(named_values("--set", "truncated_field=is_cut", others))
    values["classifiers"] = classifiers
    settings = JobSettings.of(values, is_plan="output" not in paths)
    if not given["dump_config"]:
        return settings
    dump_settings(settings, given["dump_config"])
    return None


def read_file_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `file_options` by the names of settings, with their defaults.

    Raises
    ------
    ValueError
        A value is no NAME=VALUE or COLUMN=TYPE.
    """
    groups = {FILES, CLUSTER}
    own = [own for own in fields(JobSettings) if own.metadata["group"] in groups]
    values = {each.name: each.default for each in own}
    _add_given(values, given)
    return values


def _add_given(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Put the values of options in the place of those of a file."""
    for own in fields(JobSettings):
        value = given.get(own.name)
        if value is None or value == ():
            continue
        if own.name == "types":
            form = "COLUMN=TYPE, such as price=double"
            kinds = dict(_named("--type", form, value, str.rpartition))
            values["types"] = {**(values.get("types") or {}), **kinds}
        elif own.name == "cluster_options":
            options = named_values("--cluster-option", "memory_limit=8GB", value)
            values["cluster_options"] = {**(values.get("cluster_options") or {}), **options}
        elif own.name == "classifiers":
            values["classifiers"] = [{"classifier": name} for name in value]
        else:
            values[own.name] = list(value) if isinstance(value, tuple) else value


def _own(option: str, values: Iterable[str], family: Any, names: Sequence[Any]) -> list[str]:
    """Those of an option's values that mean the classifier `family`, without its name."""
    own = []
    for value in values:
        owner, colon, rest = value.partition(":")
        if colon and owner in names:
            own += [rest] if owner == family else []
        elif len(names) == 1:
            own.append(value)
        else:
            raise ValueError(
                f"{option} {value!r} could mean any of {', '.join(map(str, names))}: say which, "
                f"as in {option} {names[0]}:{value}"
            )
    return own


def _is_meant(argument: Argument, family: Any, names: Sequence[Any]) -> bool:
    """Whether an argument is one of this classifier, or of none, which is then its to refuse.

    What all share may mean nothing to some: fastText has no batches.
    """
    known = families()
    having = [
        name
        for name in names
        if name in known and argument.name in inspect.signature(known[name]).parameters
    ]
    return not (argument.is_shared and having) or family in having


def _value(argument: Argument, values: list[str], family: Any) -> Any:
    """The argument that the values of its option mean; None if there are none."""
    if not values:
        return None
    if argument.kind is dict:
        return dict(_named(argument.flag, "NAME=PATH, such as edu=heads/edu", values))
    if argument.kind is list and family == "heads":
        by_head: dict[str, list[str]] = {}
        for head, label in _named(argument.flag, "HEAD=LABEL, such as topic=News", values):
            by_head.setdefault(head, []).append(label)
        return by_head
    if argument.kind is list:
        decisions = {"true": True, "false": False}  # the guard's labels
        if family == "instruction-data-guard" and {v.lower() for v in values} <= set(decisions):
            return [decisions[value.lower()] for value in values]
        return values
    if argument.kind is float and all("=" in value for value in values):
        pairs = [(value, *value.rpartition("=")[::2]) for value in values]
        return {label: _number(argument, number, value) for value, label, number in pairs}
    if len(values) > 1:
        raise ValueError(f"{argument.flag} is given {len(values)} times")
    return _number(argument, values[0], values[0]) if argument.kind is float else values[0]


def named_values(option: str, example: str, settings: Iterable[str]) -> dict[str, Any]:
    """Arguments that have no option of their own, from NAME=VALUE."""
    given = {}
    for name, text in _named(option, f"NAME=VALUE, such as {example}", settings):
        try:
            given[name.replace("-", "_")] = json.loads(text)
        except (ValueError, RecursionError):
            given[name.replace("-", "_")] = text
    return given


def _named(
    option: str, form: str, settings: Iterable[str], cut: Callable[..., Any] = str.partition
) -> Iterator[tuple[str, str]]:
    """Names and values, from NAME=VALUE."""
    for setting in settings:
        name, equals, value = cut(setting, "=")
        if not equals or not name:
            raise ValueError(f"{option} {setting!r}: pass {form}")
        yield name, value


def _number(argument: Argument, text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        hint = ", or LABEL=NUMBER" if argument.metavar == LABELLED else ""
        raise ValueError(f"{argument.flag} {given!r}: pass a number{hint}") from err
