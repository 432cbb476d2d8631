"""The options that commands of jobs share, and the settings that they mean."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import click

from gpuclassify.commands.settings import (
    CLUSTER,
    FILES,
    MODEL,
    REPORT,
    ROWS,
    JobSettings,
    find_family,
)
from gpuclassify.settings.checks import kinds_of
from gpuclassify.settings.options import ClassifierOptions
from gpuclassify.settings.signatures import explanations

DUPLICATES, TRAINING, BUCKETS = "Duplicates", "Training", "Buckets"
GROUPS = (MODEL, ROWS, DUPLICATES, BUCKETS, TRAINING, FILES, REPORT, CLUSTER, "Settings", "Options")
_SEVERAL = (list, tuple, dict, Sequence, Collection)  # whose options may be repeated
_WORDS = f"{__name__}.words"
# How values of arguments of classifiers are written.
PATHS, LABELS, NUMBER, LABELLED = "NAME=PATH", "[HEAD=]LABEL", "[HEAD=]NUMBER", "[LABEL=]NUMBER"
TEXTS, TEMPLATE = "TEXT,TEXT", "TEMPLATE"
PROMPT_FILE = "prompt_file"


class Argument(NamedTuple):
    """An argument of classifiers that has an option of its own.

    One that is not shared by all classifiers may begin with the name of the one that it means.
    """

    name: str
    group: str = MODEL
    metavar: str | None = None
    is_shared: bool = False
    help: str | None = None  # of one that means another thing to each, or is not in all

    @property
    def flag(self) -> str:
        """As it is given."""
        return f"--{self.name.replace('_', '-')}"

    def option(self) -> GroupedOption:
        """The option, of which several are taken where classifiers do not share it."""
        own: dict[str, Any] = {} if self.is_shared else {"multiple": True, "type": None}
        if self.metavar:
            own["metavar"] = self.metavar
        if self.metavar == TEMPLATE:
            own["type"] = lambda text: text.replace("\\n", "\n")
        if self.help:
            return GroupedOption([self.flag], group=self.group, help=self.help, **own)
        return option_of(ClassifierOptions, self.name, self.group, **own)


ARGUMENTS = (
    Argument("model", MODEL, "NAME", help="Hub name or directory. Default: the published model."),
    Argument("heads", MODEL, PATHS, help="Directory or Hub name of a head on embeddings, and the "
             "name of its columns; repeatable."),
    Argument("backbone", MODEL, "NAME", help="Hub name or directory of what embeds for heads. "
             "Default: what they were trained on."),
    Argument("base_model", MODEL, "NAME"),
    Argument("revision"),
    Argument("prompt", MODEL, TEMPLATE, help="Question to a language model, with columns in "
             "braces, such as 'An advertisement?\\n\\n{text}'."),
    Argument(PROMPT_FILE, MODEL, "FILE", help="Text file with the --prompt; line breaks at its end "
             "are left out."),
    Argument("answers", MODEL, TEXTS, help="What the model may answer to --prompt; repeatable, for "
             "answers with commas."),
    Argument("labels", MODEL, TEXTS, help="Labels of the model in the order of its outputs, where "
             "they are meant to be other than the classifier's; repeatable, for labels with "
             "commas."),
    Argument("strict", is_shared=True),
    Argument("cache_dir", MODEL, "DIRECTORY", is_shared=True),
    Argument("text_field", is_shared=True),
    Argument("text_template", MODEL, TEMPLATE, is_shared=True),
    *(Argument(name, is_shared=True) for name in ("max_chars", "max_seq_length", "batch_size")),
    *(Argument(name, is_shared=True) for name in ("dtype", "device", "loader")),
    Argument("label_field", ROWS),
    Argument("score_field", ROWS),
    Argument("confidence_field", ROWS),
    Argument("labels_field", ROWS),
    Argument("thresholds", ROWS, LABELLED),
    Argument("score_format", ROWS, "list|struct"),
    Argument("overwrite", ROWS, is_shared=True),
    Argument("filter_by", ROWS, LABELS),
    Argument("min_score", ROWS, LABELLED),
    Argument("min_confidence", ROWS, NUMBER),
    Argument("keep_field", ROWS),
)  # fmt: skip


class GroupedOption(click.Option):
    """An option with a group in the help."""

    def __init__(self, *names: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


class JobCommand(click.Command):
    """A command whose help shows options in groups, except for the `hidden_group`.

    What `options` gives is made when it is needed, because a library may be imported for it.
    """

    hidden_group = ""

    def __init__(
        self, *args: Any, options: Callable[[], Iterable[click.Option]] = tuple, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self._options = options

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        """The command's arguments and options."""
        made, self._options = self._options(), tuple
        self.params += made
        return super().get_params(context)

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


def options_of(
    target: Any,
    group: str,
    /,
    *names: str,
    has_defaults: bool = False,
    **attributes: Mapping[str, Any],
) -> list[GroupedOption]:
    """Options of arguments; by name `attributes` of `option_of` that some have beside others."""
    return [
        option_of(target, name, group, has_default=has_defaults, **attributes.get(name, {}))
        for name in names
    ]


def option_of(
    target: Any,
    name: str,
    group: str = "Options",
    *,
    has_default: bool = False,
    **attributes: Any,
) -> GroupedOption:
    """The option of an argument of a class or function, as its signature and docstring tell.

    One that is not given is None, unless it `has_default`. Of the `attributes` of `click.Option`,
    those stand that are given; ``flags`` are what it is called.
    """
    is_plain = isinstance(target, type) and not is_dataclass(target)
    hints = get_type_hints(target.__init__ if is_plain else target)
    kinds = kinds_of(hints[name])
    is_many = any(get_origin(kind) in _SEVERAL for kind in kinds)
    own: dict[str, Any] = {"default": None}
    if get_origin(kinds[0]) is Literal:
        own["type"] = click.Choice(get_args(kinds[0]))
    elif kinds == (bool,):
        own["is_flag"] = True
    elif kinds in ((int,), (float,)):
        own["type"] = kinds[0]
    elif is_many:
        own["multiple"] = True
    if name.endswith("_field") or name == "by":
        own["metavar"] = "COLUMN"
    default = inspect.signature(target).parameters[name].default
    if has_default and default is inspect.Parameter.empty:
        own["required"] = True
    elif has_default:
        own["default"] = default
    flag = f"--{name.replace('_', '-')}"
    own |= {"flags": [flag.removesuffix("s") if is_many else flag]} | attributes
    if "help" not in own:
        own["help"] = _help(target, name, is_many)
    if type(default) in (int, float, str) and default and "efault" not in own["help"]:
        own["help"] = f"{own['help']} Default: {default}.".lstrip()
    return GroupedOption([*own.pop("flags"), name], group=group, **own)


def _help(target: Any, name: str, is_many: bool) -> str:
    """The first sentence of what a docstring says of an argument, and the default."""
    explained = explanations(*getattr(target, "__mro__", [target]))[name].partition(": ")[2]
    first, *others = re.split(r"(?<=\.) (?=[A-Z\"])", explained)
    first = re.sub(r"; (None|a dict)\b.*(?=\.)", "", first)  # which only Python can pass
    told = [f"{first[:-1]}; repeatable." if is_many else first]
    told += [other for other in others if other.startswith("Default:")]
    flags = re.compile(r"(?<!`)`(\w+)`(?!`)")
    text = flags.sub(lambda found: f"--{found[1].replace('_', '-')}", " ".join(told))
    return text.replace("``", "")


def run_options() -> list[GroupedOption]:
    """How a job is run."""
    return [
        GroupedOption(
            ["--restart/--resume"], default=False,
            help="Start over and remove what earlier runs wrote, or continue, which is the "
            "default."),
        GroupedOption(
            ["--verify"], type=click.Choice(["digest", "size"]), default="digest",
            show_default=True,
            help="How to see whether parts of earlier runs are still as they were written: by the "
            "digests of their files, which reads them, or by sizes alone."),
        GroupedOption(["--json", "as_json"], is_flag=True, help="Print the summary as JSON."),
    ]  # fmt: skip


def setting_options(*groups: str) -> list[GroupedOption]:
    """Options of settings of jobs."""
    return [
        option_of(JobSettings, own.name, group, **own.metadata["option"])
        for own in fields(JobSettings)
        if (group := own.metadata["group"]) in groups
    ]


def file_options() -> list[GroupedOption]:
    """Files in and out, the cluster, and how a job is run."""
    return [*setting_options(FILES, CLUSTER), *run_options()]


def job_options() -> list[GroupedOption]:
    """What a job of classifiers does."""
    return [
        *setting_options(MODEL, ROWS, FILES, REPORT, CLUSTER),
        *(argument.option() for argument in ARGUMENTS),
        other_settings(MODEL, "argument of the classifier"),
        GroupedOption(
            ["--config"], group="Settings", metavar="FILE",
            help="Read settings from a YAML file; options of the command line win."),
        GroupedOption(
            ["--dump-config"], group="Settings", metavar="FILE",
            help="Write the settings to a YAML file, and stop."),
    ]  # fmt: skip


def other_settings(group: str, what: str) -> GroupedOption:
    """The option for all that has none."""
    told = f"Any other {what}; VALUE is JSON, or a text. Repeatable."
    names = ["--set", "others"]
    return GroupedOption(names, group=group, metavar="NAME=VALUE", multiple=True, help=told)


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

    `paths` are ``input`` and ``output``, of which a plan has no output. None if the settings were
    written to a file (``--dump-config``), which was all that was wanted.
    """
    from gpuclassify.commands.settings import dump_settings, load_settings

    values = load_settings(given["config"]) if given["config"] else {}
    values |= {name: path for name, path in paths.items() if path}
    values = given_settings(given, values)
    classifiers = [dict(settings) for settings in values.get("classifiers", ())]
    names = [settings.get("classifier") for settings in classifiers]
    for family, arguments in zip(names, classifiers, strict=True):
        for argument in ARGUMENTS:
            value = given[argument.name]
            if not argument.is_shared:
                value = _value(argument, _own(argument.flag, value, family, names), family)
            if value is not None and _is_meant(argument, family, names):
                arguments[argument.name] = value
        if PROMPT_FILE in arguments:
            if _own("--prompt", given["prompt"], family, names):
                raise ValueError("--prompt and --prompt-file are two prompts: pass one of them")
            arguments["prompt"] = read_prompt(arguments.pop(PROMPT_FILE))
        others = _own("--set", given["others"], family, names)
        arguments.update(named_values("--set", "truncated_field=is_cut", others))
    values["classifiers"] = classifiers
    settings = JobSettings.of(values, is_plan="output" not in paths)
    if not given["dump_config"]:
        return settings
    dump_settings(settings, given["dump_config"])
    return None


def given_settings(
    given: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Settings of a job that options give, in the place of `values` of a file."""
    values = dict(values or {})
    for own in fields(JobSettings):
        value = given.get(own.name)
        if value is None or value == ():
            continue
        if own.name == "types":
            form = "COLUMN=TYPE, such as price=double"
            kinds = dict(_named("--type", form, value, str.rpartition))
            values["types"] = {**values.get("types", {}), **kinds}
        elif own.name == "cluster_options":
            options = named_values("--cluster-option", "memory_limit=8GB", value)
            values["cluster_options"] = {**values.get("cluster_options", {}), **options}
        elif own.name == "classifiers":
            values["classifiers"] = [{"classifier": name} for name in value]
        else:
            values[own.name] = list(value) if isinstance(value, tuple) else value
    return values


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
    having = [name for name in names if argument.name in _parameters(name)]
    return not (argument.is_shared and having) or family in having


def _parameters(family: Any) -> Collection[str]:
    """The classifier's arguments; none if nothing is called so, which is told when it is made."""
    with contextlib.suppress(ValueError):
        return inspect.signature(find_family(family)).parameters
    return ()


def _value(argument: Argument, values: list[str], family: Any) -> Any:
    """The argument that the values of its option mean; None if there are none."""
    if not values:
        return None
    if argument.metavar == PATHS:
        return dict(_named(argument.flag, "NAME=PATH, such as edu=heads/edu", values))
    if argument.metavar == LABELS and family == "heads":
        by_head: dict[str, list[str]] = {}
        for head, label in _named(argument.flag, "HEAD=LABEL, such as topic=News", values):
            by_head.setdefault(head, []).append(label)
        return by_head
    if argument.metavar == LABELS:
        decisions = {"true": True, "false": False}  # the guard's labels
        if family == "instruction-data-guard" and {v.lower() for v in values} <= set(decisions):
            return [decisions[value.lower()] for value in values]
        return values
    if argument.metavar == TEXTS:
        texts = values[0].split(",") if len(values) == 1 else values
        return [text.strip() for text in texts]
    is_number = argument.metavar in (NUMBER, LABELLED)
    if is_number and all("=" in value for value in values):
        pairs = [(value, *value.rpartition("=")[::2]) for value in values]
        return {label: _number(argument, number, value) for value, label, number in pairs}
    if len(values) > 1:
        raise ValueError(f"{argument.flag} is given {len(values)} times")
    return _number(argument, values[0], values[0]) if is_number else values[0]


def read_prompt(path: str) -> str:
    """The prompt in a text file; ValueError if there is none."""
    try:
        prompt = Path(path).read_text(encoding="utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"the prompt {path} cannot be read: {reason}") from err
    if not prompt.strip():
        raise ValueError(f"the prompt {path} is empty: write a question with {{text}} in it")
    return prompt


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
