"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import click

from gpuclassify.commands.settings import (
    CLUSTER,
    FILES,
    NOTES,
    REPORT,
    SELECTION,
    JobSettings,
    families,
    family_name,
    find_family,
)
from gpuclassify.settings.checks import check_names, kinds_of, setting_names
from gpuclassify.settings.options import LABELLED, MODEL, ROWS, TEMPLATE, TEXTS
from gpuclassify.settings.signatures import explanations

if TYPE_CHECKING:
    from gpuclassify.jobs.input.readers import FileReader

DUPLICATES, TRAINING, BUCKETS = "Duplicates", "Training", "Buckets"
TEST_ITEMS = "Test items"
GROUPS = (
    *(MODEL, SELECTION, ROWS, DUPLICATES, TEST_ITEMS, BUCKETS, TRAINING, NOTES),
    *(FILES, REPORT, CLUSTER, "Settings", "Options"),
)
_SEVERAL = (list, tuple, dict, Sequence, Collection)  # types with repeatable options
_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
_WORDS = f"{__name__}.words"
PROMPT_FILE, COLUMN = "prompt_file", "COLUMN"
ON_ERROR_HELP = (
    "How to handle files, lines and rows that cannot be read: stop, or leave them out and count "
    "them. What --annotations list as left out never stops the command."
)
# Settings of `JobSettings` for reading files and their rows.
READING = (
    *("fields", "types", "surrogates", "on_error"),
    *("annotations", "annotations_complete"),
)


class ColumnName(click.ParamType):
    """Click type for options whose value is the name of a column, which must not be empty."""

    name = COLUMN

    def convert(self, value: Any, *context: Any) -> Any:
        """Return the value unchanged; fail with click's usage error if it is an empty text."""
        return self.fail("'' is no column: name one", *context) if value == "" else value


class GroupedOption(click.Option):
    """Click option that the help lists under the heading `group`.

    A shared option applies to all classifiers of the command. The value of an option that is not
    shared may begin with the name of one classifier, as in ``domain:Games``.
    """

    def __init__(
        self, *names: Any, group: str = "Options", is_shared: bool = True, **attributes: Any
    ) -> None:
        if attributes.get("metavar") == COLUMN and attributes.get("type") is None:
            attributes["type"] = ColumnName()
        super().__init__(*names, **attributes)
        self.group, self.is_shared = group, is_shared


class JobCommand(click.Command):
    """Click command whose help lists options under headings.

    Options under the heading `hidden_group` are accepted, but not listed. The function `options` is
    called only when this command is used, because it may import a large library.
    """

    hidden_group = ""

    def __init__(
        self, *args: Any, options: Callable[[], Iterable[click.Option]] = tuple, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self._options = options

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        """Return the command's arguments and options; the first call makes the options."""
        options, self._options = self._options(), tuple
        self.params += options
        return super().get_params(context)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, and store its words, which the function `command_line` reads."""
        context.meta[_WORDS] = tuple(args)
        return super().parse_args(context, args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's options into its help, under the heading of each option's group."""
        parameters = self.get_params(context)
        own = [getattr(option, "group", "Options") for option in parameters]
        first = [group for group in own if group not in GROUPS]  # headings that recipes added
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in (*first, *GROUPS)}
        for parameter in parameters:
            record = parameter.get_help_record(context)
            if record and isinstance(parameter, click.Option):
                group_name = parameter.group if isinstance(parameter, GroupedOption) else "Options"
                groups[group_name].append(record)
        for group, records in groups.items():
            if records and group != self.hidden_group:
                with formatter.section(group):
                    formatter.write_dl(records)


class LocalCommand(JobCommand):
    """Click command that starts no cluster: it accepts cluster options, but its help hides them."""

    hidden_group = CLUSTER


def options_of(
    target: object,
    group: str,
    /,
    *names: str,
    has_defaults: bool = False,
    **attributes: Mapping[str, Any],
) -> list[GroupedOption]:
    """Make a command-line option for each named argument of a class or function.

    `group` is the heading of the options in the help. With `has_defaults`, an option that is not
    passed has its argument's default, and is required if there is none. `attributes` maps an
    argument's name to further arguments of `option_of`.
    """
    return [
        option_of(target, name, group, has_default=has_defaults, **attributes.get(name, {}))
        for name in names
    ]


def option_of(
    target: Any,
    name: str,
    group: str | None = None,
    *,
    has_default: bool = False,
    **attributes: Any,
) -> GroupedOption:
    """Make a command-line option from an argument's type, default and docstring.

    An option that is not passed is None, () if it is repeatable or, with `has_default`, the
    argument's default; the option is then required if the argument has no default. `attributes` are
    arguments of `click.Option` that override the derived ones; ``flags`` are the option's names.
    """
    declared = {f.name: f.metadata for f in fields(target)} if is_dataclass(target) else {}
    metadata: Mapping[str, Any] = declared.get(name, {})
    is_plain = isinstance(target, type) and not is_dataclass(target)
    hints = _hints(target.__init__ if is_plain else target)
    kinds = kinds_of(hints[name])
    is_many = any(get_origin(kind) in _SEVERAL for kind in kinds)
    settings: dict[str, Any] = {"default": None}
    if get_origin(kinds[0]) is Literal:
        settings["type"] = click.Choice(get_args(kinds[0]))
    elif kinds == (bool,):
        settings["is_flag"] = True
    elif kinds in ((int,), (float,)):
        settings["type"] = kinds[0]
    elif is_many:
        settings["multiple"] = True
    if name.endswith("_field") or name == "by":
        settings["metavar"] = COLUMN
    default = inspect.signature(target).parameters[name].default
    if has_default and default is inspect.Parameter.empty:
        settings["required"] = True
    elif has_default:
        settings["default"] = default
    flag = f"--{name.replace('_', '-')}"
    settings |= {"flags": [flag.removesuffix("s") if is_many else flag]}
    settings |= {**metadata.get("option", {}), **attributes}
    if isinstance(settings.get("type"), tuple):
        settings["type"] = click.Choice(settings["type"])
    if "help" not in settings:
        settings["help"] = _help(target, name, is_many)
    if type(default) in (int, float, str) and default and "efault" not in settings["help"]:
        settings["help"] = f"{settings['help']} Default: {default}.".lstrip()
    settings.pop("form", None)  # used by `_value`
    if settings.get("required"):
        del settings["default"]  # click would take any default for a passed value
    group = group or metadata.get("group", "Options")
    return GroupedOption([*settings.pop("flags"), name], group=group, **settings)


def _help(target: object, name: str, is_many: bool) -> str:
    """Return an option's help: the first sentence of its argument's docs, and the default."""
    explained = explanations(*getattr(target, "__mro__", [target]))[name].partition(": ")[2]
    first, *others = re.split(r"(?<=\.) (?=[A-Z\"])", explained)
    first = re.sub(r"; (None|a dict)\b.*(?=\.)", "", first)  # values that only Python code can pass
    sentences = [f"{first[:-1]}; repeatable." if is_many else first]
    sentences += [other for other in others if other.startswith("Default:")]
    flags = re.compile(r"(?<!`)`(\w+)`(?!`)")
    text = flags.sub(lambda name_match: f"--{name_match[1].replace('_', '-')}", " ".join(sentences))
    return text.replace("``", "")


def run_options() -> list[GroupedOption]:
    """Make the options that all commands for jobs share, such as --restart and --verify."""
    return [
        GroupedOption(
            ["--restart/--resume"], default=False,
            help="Remove the output of earlier runs and start over, or continue, which is "
            "the default."),
        GroupedOption(
            ["--verify"], type=click.Choice(["digest", "size"]), default="digest",
            show_default=True,
            help="How to check that parts of earlier runs are unchanged: by the digests of "
            "their files, which reads them, or by sizes only."),
        GroupedOption(
            ["--accept-changed-code"], is_flag=True,
            help="Continue although the code of a stage, or the version of a library that "
            "computes its results, has changed, if you know that the results are the same."),
        GroupedOption(["--json", "as_json"], is_flag=True, help="Print the summary as JSON."),
    ]  # fmt: skip


def setting_options(*groups: str) -> list[GroupedOption]:
    """Make options for the settings of `JobSettings` under headings such as "Files"."""
    return [
        option_of(JobSettings, own.name)
        for own in fields(JobSettings)
        if own.metadata.get("group") in groups
    ]


def reading_options(*, has_fields: bool = False) -> list[GroupedOption]:
    """Make the options for reading input files, with --field if `has_fields`."""
    words = "Read only these columns and those that other options name; repeatable. Default: all."
    attributes: dict[str, dict[str, Any]]
    attributes = {"fields": {"help": words}, "on_error": {"help": ON_ERROR_HELP}}
    names = READING if has_fields else READING[1:]
    return [option_of(JobSettings, name, **attributes.get(name, {})) for name in names]


def reader_from_options(
    inputs: Iterable[str], options: dict[str, Any], needed: Iterable[str | None] = ()
) -> FileReader:
    """Make the reader of the files `inputs` from the values of a command's options.

    The options of `reading_options` are removed from `options`, except for ``on_error``, which
    becomes "raise" if it is None. Columns in `needed` are read even if --field does not name them.
    """
    names = [name for name in READING if name != "on_error"]
    values = settings_from_options({name: options.pop(name, None) for name in names})
    options["on_error"] = options["on_error"] or "raise"
    settings = JobSettings(input=[*inputs], **values)
    return settings.reader(settings.fields and [*settings.fields, *filter(None, needed)])


def annotate_option() -> GroupedOption:
    """Make the option --annotate, to write only the new columns of a command, and no text."""
    return next(option for option in setting_options(NOTES) if option.name == "annotate")


def file_options() -> list[GroupedOption]:
    """Make the options for input and output files, for the cluster, and for running a job."""
    return [*setting_options(FILES, CLUSTER), *run_options()]


def classifier_options() -> dict[str, GroupedOption]:
    """Make the options for settings of classifiers and --prompt-file, by parameter name."""
    options: dict[str, GroupedOption] = {}
    for family in families().values():
        for declared in fields(family.Options):
            if declared.init and "group" in declared.metadata and declared.name not in options:
                options[declared.name] = _classifier_option(family.Options, declared)
    options[PROMPT_FILE] = GroupedOption(
        ["--prompt-file"], group=MODEL, metavar="FILE", multiple=True, is_shared=False,
        help="Text file with the --prompt; line breaks at its end are dropped.")  # fmt: skip
    return options


def _classifier_option(options: Any, declared: Field[Any]) -> GroupedOption:
    """Make the option for the field `declared` of a classifier's class of settings, `options`.

    Unless the field's metadata has ``is_shared`` (see `GroupedOption`), only flags, integers and
    choices are shared.
    """
    kinds = kinds_of(_hints(options)[declared.name])
    is_plain = kinds in ((bool,), (int,)) or get_origin(kinds[0]) is Literal
    attributes: dict[str, Any] = {"is_shared": is_plain, **declared.metadata["option"]}
    if not attributes["is_shared"]:
        attributes |= {"multiple": True, "type": None}
    if float in kinds:
        attributes.setdefault("metavar", "NUMBER")
    if attributes.get("metavar") == TEMPLATE:
        attributes["type"] = lambda text: text.replace("\\n", "\n")
    attributes.setdefault("flags", [f"--{declared.name.replace('_', '-')}"])
    return option_of(options, declared.name, **attributes)


def job_options() -> list[GroupedOption]:
    """Make the options of `classify` and similar commands, for settings of jobs and classifiers."""
    return [
        *setting_options(MODEL, ROWS, FILES, REPORT, CLUSTER),
        *classifier_options().values(),
        other_settings(MODEL, "argument of the classifier"),
        *config_options(),
    ]


def config_options() -> list[GroupedOption]:
    """Make --config and --dump-config, which read and write a YAML file of settings."""
    return [
        GroupedOption(
            ["--config"], group="Settings", metavar="FILE",
            help="Read settings from a YAML file; options of the command line win."),
        GroupedOption(
            ["--dump-config"], group="Settings", metavar="FILE",
            help="Write the settings to a YAML file, and stop."),
    ]  # fmt: skip


def other_settings(group: str, what: str) -> GroupedOption:
    """Make the option --set NAME=VALUE, for settings that have no option of their own.

    `what` is the help's name for such a setting, and `group` the heading.
    """
    text = f"Any other {what}; VALUE is JSON, or a text. Repeatable."
    names = ["--set", "others"]
    return GroupedOption(names, group=group, metavar="NAME=VALUE", multiple=True, help=text)


def command_line(context: click.Context) -> str:
    """Return the shell command that continues the job of the running command.

    Secrets and options for one run only, such as --restart, are left out.
    """
    from gpuclassify.jobs.stores.names import redacted

    words, name = [], ""
    for word in context.meta[_WORDS]:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if (option or name) == "--cluster-option" and value:  # may hold a cloud's credentials
            value = f"{value.partition('=')[0]}=..."
        if option not in ("--restart", "--accept-changed-code"):  # these are for one run
            words.append(f"{option}{equals}{redacted(value)}")
        name = "" if equals else option
    return shlex.join(["gpuclassify", context.info_name or "", *words])


def split_paths(paths: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Split a command's paths into ``input``, a list, and ``output``, the last path.

    With --config in `options`, paths may be in the settings file instead; a missing output is None.
    """
    if "-" in paths:
        raise ValueError(
            "'-' is no path: a job reads its input in parts and can continue after an "
            "interruption, which needs files. (Pass a file of this name as ./-) "
            "`gpuclassify preview -` reads a few texts from standard input"
        )
    *inputs, output = paths or (None,)
    if not inputs and not options.get("config") and (paths or "config" not in options):
        got = f"got one path, {output!r}: " if paths else ""
        raise ValueError(f"{got}name the input, and then the output: INPUT... OUTPUT")
    return {"input": inputs, "output": output}


def read_settings(options: Mapping[str, Any], **paths: Any) -> JobSettings | None:
    """Read a job's settings from the file of --config and the command line, which overrides it.

    `paths` are ``input`` and ``output``; without the argument ``output``, none is required. With
    --dump-config, the settings are written to a file, and the result is None.
    """
    from gpuclassify.commands.settings import dump_settings, load_settings, refuse_code

    values = load_settings(options["config"]) if options["config"] else {}
    refuse_code(values, options["config"])
    values |= {name: path for name, path in paths.items() if path not in (None, [])}
    values = settings_from_options(options, values)
    classifiers = [dict(settings) for settings in values.get("classifiers", ())]
    names = [settings.get("classifier") for settings in classifiers]
    for family, arguments in zip(names, classifiers, strict=True):
        arguments |= _arguments(options, family, names)
        if PROMPT_FILE in arguments:
            if _values_for("--prompt", options["prompt"], family, names):
                raise ValueError("--prompt and --prompt-file are two prompts: pass one of them")
            arguments["prompt"] = read_prompt(arguments.pop(PROMPT_FILE))
        others = _values_for("--set", options["others"], family, names)
        arguments.update(named_values("--set", "truncated_field=is_cut", others))
    values["classifiers"] = classifiers
    settings = JobSettings.of(values, is_plan="output" not in paths)
    if not options["dump_config"]:
        return settings
    dump_settings(settings, options["dump_config"])
    return None


def read_recipe(
    options: Mapping[str, Any],
    own: Mapping[str, Any],
    also: Collection[str] = (),
    **paths: Any,
) -> tuple[JobSettings, dict[str, Any]] | None:
    """Read the settings of a job and of its recipe from the file of --config and the options.

    A recipe is a kind of job, such as a deduplication, with settings of its own: `own` has the
    values of their options. `also` has the names of job settings that only the file may have, and
    `paths` are ``input`` and ``output``. With --dump-config, the settings are written to a file,
    and the result is None.
    """
    from gpuclassify.commands.settings import dump_settings, load_settings, refuse_code

    values = load_settings(options["config"], own) if options["config"] else {}
    refuse_code(values, options["config"])
    values |= {name: path for name, path in paths.items() if path not in (None, [])}
    recipe = {name: values.pop(name) for name in own if name in values}
    known = ["input", "output", *options, *own, *also]
    check_names("the command has", "setting", values, known)
    recipe |= {n: [*v] if isinstance(v, tuple) else v for n, v in own.items() if _is_passed(v)}
    settings = JobSettings.of(settings_from_options(options, values), needs_stages=False)
    if not options["dump_config"]:
        return settings, recipe
    dump_settings(settings, options["dump_config"], recipe)
    return None


def _is_passed(value: Any) -> bool:
    return value is not None and value != () and value is not False


def settings_from_options(
    options: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of a job by name: values of a file, overridden by the options.

    Options with the values None and () were not passed. ``types`` and ``cluster_options`` of both
    are merged by name.
    """
    values = dict(values or {})
    for name in setting_names(JobSettings):
        value = options.get(name)
        if value is None or value == ():
            continue  # not passed, or not an option of the command
        if name == "types":
            form = "COLUMN=TYPE, such as price=double"
            types = dict(_named("--type", form, value, str.rpartition))
            values["types"] = {**values.get("types", {}), **types}
        elif name == "cluster_options":
            added = named_values("--cluster-option", "memory_limit=8GB", value)
            values["cluster_options"] = {**values.get("cluster_options", {}), **added}
        elif name == "classifiers":
            values["classifiers"] = [{"classifier": family_name(family)} for family in value]
        else:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


def _values_for(
    option: str,
    values: Iterable[str],
    family: object,
    names: Sequence[Any],
    meant: Sequence[Any] | None = None,
) -> list[str]:
    """Select an option's values for the classifier named `family`; prefixes (domain:) are removed.

    `names` are all classifiers of the command, and `meant` the classifiers that accept the option
    (None: all). A value without a prefix needs a single name in `meant`; else ValueError is raised.
    """
    meant = names if meant is None else meant
    own = []
    for value in values:
        owner, colon, rest = value.partition(":")
        owner = owner if owner in names else family_name(owner)
        if colon and owner in names:
            own += [rest] if owner == family else []
        elif len(meant) == 1:
            own += [value] if family in meant else []
        else:
            raise ValueError(
                f"{option} {value!r} could mean any of {', '.join(map(str, meant))}: name one, "
                f"as in {option} {meant[0]}:{value}"
            )
    return own


def _arguments(options: Mapping[str, Any], family: Any, names: Sequence[Any]) -> dict[str, Any]:
    """Return the settings of the classifier named `family`, from the values of a command's options.

    `names` are all classifiers of the command. A shared option applies to each of them that accepts
    it. If none does, all get it, so that they raise an error.
    """
    arguments: dict[str, Any] = {}
    settings = [_settings_of(name) for name in names]
    own = settings[names.index(family)]
    for name, option in classifier_options().items():
        having = [other for other, known in zip(names, settings, strict=True) if name in known]
        having, value = having or [*names], options[name]
        if not option.is_shared:
            texts = _values_for(option.opts[0], value, family, names, having)
            value = _value(option, texts, *own.get(name, (str, "")))
        elif isinstance(value, tuple):
            value = [*value] if len(value) > 1 else next(iter(value), None)
        if value is not None and (family in having or not option.is_shared):
            arguments[name] = value
    return arguments


def _settings_of(family: Any) -> dict[str, tuple[Any, str]]:
    """Map each setting of the classifier named `family` to its type hint and its option's form.

    The form says how to write the option's value, such as "LABEL=TEXT"; it is "" for plain values.
    Returns {} for an unknown name, because an error is raised later, when the classifier is made.
    """
    with contextlib.suppress(ValueError):
        options = find_family(family).Options
        forms = {f.name: f.metadata.get("option", {}).get("form", "") for f in fields(options)}
        return {name: (_hints(options)[name], forms[name]) for name in setting_names(options)}
    return {}


def _value(option: GroupedOption, texts: list[str], hint: Any, form: str) -> Any:
    """Convert the texts passed for an option to a setting of the type hint `hint`.

    None if there are no texts. With a `form`, such as "LABEL=TEXT", they become a dict, or a list
    if none has "=" and `hint` allows a list. Without a form, `hint` decides.
    """
    if not texts:
        return None
    flag, kinds = option.opts[0], kinds_of(hint)
    by_name = [kinds_of(get_args(kind)[1]) for kind in kinds if get_origin(kind) is Mapping]
    may_be_list = any(get_origin(kind) is Sequence for kind in kinds)
    if form and not (may_be_list and not any("=" in text for text in texts)):
        pairs = [*_named(flag, form, texts)]
        if any(get_origin(kind) is Collection for kind in by_name[0]):
            return {name: [text for other, text in pairs if other == name] for name, _ in pairs}
        return dict(pairs)
    if bool in kinds:  # decisions of a guard
        return [{"true": True, "false": False}.get(text.lower(), text) for text in texts]
    if option.metavar == TEXTS:
        texts = texts[0].split(",") if len(texts) == 1 else texts
        return [text.strip() for text in texts]
    if any(get_origin(kind) in _SEVERAL for kind in kinds):
        return texts
    is_number = float in {*kinds, *itertools.chain(*by_name)}
    if is_number and all("=" in text for text in texts):
        labels = [label for label, _ in _named(flag, "", texts, str.rpartition)]
        return {label: _number(option, text) for label, text in zip(labels, texts, strict=True)}
    if len(texts) > 1:
        raise ValueError(f"{flag} was passed {len(texts)} times: pass it once")
    return _number(option, texts[0]) if is_number else texts[0]


def read_prompt(path: str) -> str:
    """Read the prompt for a language model from a text file, without line breaks at its end."""
    try:
        prompt = Path(path).read_text(encoding="utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"the prompt {path} cannot be read: {reason}") from err
    if not prompt.strip():
        raise ValueError(f"the prompt {path} is empty: write a question with {{text}} in it")
    return prompt


def named_values(option: str, example: str, settings: Iterable[str]) -> dict[str, Any]:
    """Parse the NAME=VALUE texts of an option to a dict of values by name.

    A value is parsed as JSON, or else is the text itself. Hyphens in names become underscores.
    """
    parsed = {}
    for name, text in _named(option, f"NAME=VALUE, such as `{example}`", settings):
        try:
            parsed[name.replace("-", "_")] = json.loads(text)
        except (ValueError, RecursionError):
            parsed[name.replace("-", "_")] = text
    return parsed


def _named(
    option: str, form: str, settings: Iterable[str], cut: Callable[..., Any] = str.partition
) -> Iterator[tuple[str, str]]:
    """Yield name and value of each text, split at "=" by `cut`; an error asks for `form`."""
    for setting in settings:
        name, equals, value = cut(setting, "=")
        if not equals or not name:
            raise ValueError(f"{option} {setting!r}: pass {form}")
        yield name, value


def _number(option: GroupedOption, text: str) -> float:
    try:
        return float(text.rpartition("=")[2])
    except ValueError as err:
        hint = ", or LABEL=NUMBER" if option.metavar == LABELLED else ""
        raise ValueError(f"{option.opts[0]} {text!r}: pass a number{hint}") from err
