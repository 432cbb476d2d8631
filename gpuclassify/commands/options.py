"""The options that commands of jobs share, and the settings that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from gpuclassify.jobs.settings import JobSettings, Setting
from gpuclassify.options import DTYPES, LOADERS

CLUSTER = "Cluster"  # the group of options that a plan has no use for
GROUPS = ("Classifiers", "Columns and rows", "Files", CLUSTER, "Settings", "Options")


@dataclass(frozen=True)
class Argument:
    """An argument of classifiers that has an option of its own.

    Attributes
    ----------
    name : str
    help : str
    metavar : str, optional
    kind : type or click.ParamType, optional
        Of the value. Default: text.
    is_shared : bool
        Whether all classifiers take it. Else it means one of them, and may begin with its name
        where there are several.
    is_list : bool
        Whether several values are one argument.
    group : str
    """

    name: str
    help: str
    metavar: str | None = None
    kind: Any = str
    is_shared: bool = False
    is_list: bool = False
    group: str = "Columns and rows"

    @property
    def option(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"


ARGUMENTS = (
    Argument("model", "Hub name or directory. Default: the published model.", "NAME",
             group="Classifiers"),
    Argument("base_model", "Hub name or directory of the backbone, where the model does not tell "
             "its sizes.", "NAME", group="Classifiers"),
    Argument("revision", "Branch, tag or commit of the model.", group="Classifiers"),
    Argument("cache_dir", "Where downloads are kept.", "DIRECTORY", is_shared=True,
             group="Classifiers"),
    Argument("text_field", "Column of the text. Default: text.", "COLUMN", is_shared=True,
             group="Classifiers"),
    Argument("max_chars", "Characters of a text that the model sees.", kind=int, is_shared=True,
             group="Classifiers"),
    Argument("max_seq_length", "Tokens of a text that the model sees.", kind=int, is_shared=True,
             group="Classifiers"),
    Argument("batch_size", "Most rows of a batch. Default: automatic.", kind=int, is_shared=True,
             group="Classifiers"),
    Argument("dtype", "Default: the fastest that does well.", kind=click.Choice(DTYPES),
             is_shared=True, group="Classifiers"),
    Argument("device", "auto, cpu, mps, cuda or cuda:N. Default: auto.", is_shared=True,
             group="Classifiers"),
    Argument("loader", "Default: sorted.", kind=click.Choice(LOADERS), is_shared=True,
             group="Classifiers"),
    Argument("label_field", "Output column of the label.", "COLUMN"),
    Argument("score_field", "Output column of the scores.", "COLUMN"),
    Argument("confidence_field", "Output column of the label's probability.", "COLUMN"),
    Argument("overwrite", "Replace columns that exist.", kind=bool, is_shared=True),
    Argument("filter_by", "Keep only rows with this label; repeatable.", "LABEL", is_list=True),
    Argument("min_score", "Keep only rows that score at least this.", "[LABEL=]NUMBER", float),
    Argument("min_confidence", "Keep only rows whose label is at least this probable, 0 to 1.",
             "NUMBER", float),
    Argument("keep_field", "Drop no rows, and write to this column whether each would be kept.",
             "COLUMN"),
)  # fmt: skip


class GroupedOption(click.Option):
    """An option with a group in the help."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


class JobCommand(click.Command):
    """A command whose help shows options in groups, except for the `hidden_group`."""

    hidden_group = ""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, and options that belong to none last."""
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record and isinstance(parameter, click.Option):
                own = parameter.group if isinstance(parameter, GroupedOption) else "Options"
                groups[own].append(record)
        for group, records in groups.items():
            if group != self.hidden_group:
                with formatter.section(group):
                    formatter.write_dl(records)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a job, for a `JobCommand`."""
    for option in reversed(list(_options())):
        command = option(command)
    return command


def _options() -> Iterator[Callable[[Any], Any]]:
    for own in fields(JobSettings):
        setting = Setting.of(own)
        if setting.group:
            choices = {"type": click.Choice(setting.choices)} if setting.choices else {}
            yield click.option(
                setting.option, own.name, cls=GroupedOption, group=setting.group,
                help=setting.help, metavar=setting.metavar, **setting.kind.option, **choices,
            )  # fmt: skip
    for argument in ARGUMENTS:
        kind: dict[str, Any] = {"multiple": True}
        if argument.is_shared:
            is_flag = argument.kind is bool
            kind = {"is_flag": True, "default": None} if is_flag else {"type": argument.kind}
        yield click.option(
            argument.option, argument.name, cls=GroupedOption, group=argument.group,
            help=argument.help, metavar=argument.metavar, **kind,
        )  # fmt: skip
    yield click.option(
        "--set", "others", multiple=True, metavar="NAME=VALUE", cls=GroupedOption,
        group="Classifiers", help="Any other argument of the classifier; VALUE is JSON, or a "
        "text. Repeatable.",
    )  # fmt: skip
    yield click.option(
        "--config", metavar="FILE", cls=GroupedOption, group="Settings",
        help="Read settings from a YAML file; options of the command line win.",
    )  # fmt: skip
    yield click.option(
        "--dump-config", metavar="FILE", cls=GroupedOption, group="Settings",
        help="Write the settings to a YAML file, and stop.",
    )  # fmt: skip


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
        See `gpuclassify.jobs.settings.JobSettings.of`.
    """
    from gpuclassify.jobs.settings_file import dump_settings, load_settings

    values = load_settings(given["config"]) if given["config"] else {}
    values |= {name: path for name, path in paths.items() if path}
    for own in fields(JobSettings):
        setting, value = Setting.of(own), given.get(own.name)
        if not setting.group or value is None or value == ():
            continue
        if own.name == "types":
            values["types"] = {**(values.get("types") or {}), **_types(value)}
        elif own.name == "cluster_options":
            options = _named_values("--cluster-option", "memory_limit=8GB", value)
            values["cluster_options"] = {**(values.get("cluster_options") or {}), **options}
        elif own.name == "classifiers":
            values["classifiers"] = [{"classifier": name} for name in value]
        else:
            values[own.name] = list(value) if isinstance(value, tuple) else value
    classifiers = [dict(settings) for settings in values.get("classifiers") or []]
    names = [settings.get("classifier") for settings in classifiers]
    for family, arguments in zip(names, classifiers, strict=True):
        for argument in ARGUMENTS:
            value = given[argument.name]
            if not argument.is_shared:
                value = _value(argument, _own(argument.option, value, family, names), family)
            if value is not None:
                arguments[argument.name] = value
        others = _own("--set", given["others"], family, names)
        arguments.update(_named_values("--set", "truncated_field=is_cut", others))
    values["classifiers"] = classifiers
    settings = JobSettings.of(values, is_plan="output" not in paths)
    if not given["dump_config"]:
        return settings
    dump_settings(settings, given["dump_config"])
    return None


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


def _value(argument: Argument, values: list[str], family: Any) -> Any:
    """The argument that the values of its option mean; None if there are none."""
    if not values:
        return None
    if argument.is_list:
        decisions = {"true": True, "false": False}  # the guard's labels
        if family == "instruction-data-guard" and {v.lower() for v in values} <= set(decisions):
            return [decisions[value.lower()] for value in values]
        return values
    if argument.name == "min_score" and all("=" in value for value in values):
        pairs = [(value, *value.rpartition("=")[::2]) for value in values]
        return {label: _number(argument, number, value) for value, label, number in pairs}
    if len(values) > 1:
        raise ValueError(f"{argument.option} is given {len(values)} times")
    return _number(argument, values[0], values[0]) if argument.kind is float else values[0]


def _named_values(option: str, example: str, settings: Iterable[str]) -> dict[str, Any]:
    """Arguments that have no option of their own, from NAME=VALUE."""
    given = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"{option} {setting!r}: pass NAME=VALUE, such as {example}")
        try:
            given[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            given[name.replace("-", "_")] = text
    return given


def _types(settings: Iterable[str]) -> dict[str, str]:
    """Types by columns, from COLUMN=TYPE."""
    given = {}
    for setting in settings:
        name, _, kind = setting.rpartition("=")
        if not name or not kind:
            raise ValueError(f"--type {setting!r}: pass COLUMN=TYPE, such as price=double")
        given[name] = kind
    return given


def _number(argument: Argument, text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        hint = ", or LABEL=NUMBER" if argument.name == "min_score" else ""
        raise ValueError(f"{argument.option} {given!r}: pass a number{hint}") from err
