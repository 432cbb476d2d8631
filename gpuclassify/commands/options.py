"""The options that commands of jobs share, and the settings that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.options import DTYPES, LOADERS

if TYPE_CHECKING:
    from gpuclassify.jobs.settings import JobSettings

# Options that mean one classifier, and may begin with its name where there are several.
OWN = (
    "model", "base_model", "revision", "label_field", "score_field", "confidence_field",
    "filter_by", "min_score", "min_confidence", "keep_field",
)  # fmt: skip
# Options that all classifiers take.
SHARED = (
    "cache_dir", "text_field", "max_chars", "max_seq_length", "batch_size", "dtype", "device",
    "loader", "overwrite",
)  # fmt: skip
LISTS, NUMBERS = ("filter_by",), ("min_score", "min_confidence")
JOB = (
    "fields", "format", "compression", "staging", "part_size", "backend", "on_error",
    "cluster", "workers", "scheduler",
)  # fmt: skip

CLUSTER = "Cluster"  # the group of options that a plan has no use for
_OPTIONS: dict[str, list[Callable[[Any], Any]]] = {
    "Classifiers": [
        click.option(
            "--classifier", "classifiers", multiple=True, metavar="FAMILY",
            help="See `gpuclassify models`; repeatable. Options that mean one of several begin "
            "with its name: --filter-by domain:Games.",
        ),
        click.option(
            "--model", multiple=True, metavar="NAME",
            help="Hub name or directory. Default: the published model.",
        ),
        click.option(
            "--base-model", multiple=True, metavar="NAME",
            help="Hub name or directory of the backbone, where the model does not tell its sizes.",
        ),
        click.option("--revision", multiple=True, help="Branch, tag or commit of the model."),
        click.option("--cache-dir", metavar="DIRECTORY", help="Where downloads are kept."),
        click.option("--text-field", metavar="COLUMN", help="Column of the text. Default: text."),
        click.option("--max-chars", type=int, help="Characters of a text that the model sees."),
        click.option("--max-seq-length", type=int, help="Tokens of a text that the model sees."),
        click.option("--batch-size", type=int, help="Most rows of a batch. Default: automatic."),
        click.option(
            "--dtype", type=click.Choice(DTYPES), help="Default: the fastest that does well."
        ),
        click.option("--device", help="auto, cpu, mps, cuda or cuda:N. Default: auto."),
        click.option("--loader", type=click.Choice(LOADERS), help="Default: sorted."),
        click.option(
            "--set", "others", multiple=True, metavar="NAME=VALUE",
            help="Any other argument of the classifier; VALUE is JSON, or a text. Repeatable.",
        ),
    ],
    "Columns and rows": [
        click.option(
            "--label-field", multiple=True, metavar="COLUMN", help="Output column of the label."
        ),
        click.option(
            "--score-field", multiple=True, metavar="COLUMN", help="Output column of the scores."
        ),
        click.option(
            "--confidence-field", multiple=True, metavar="COLUMN",
            help="Output column of the label's probability.",
        ),
        click.option("--overwrite", is_flag=True, default=None, help="Replace columns that exist."),
        click.option(
            "--filter-by", multiple=True, metavar="LABEL",
            help="Keep only rows with this label; repeatable.",
        ),
        click.option(
            "--min-score", multiple=True, metavar="[LABEL=]NUMBER",
            help="Keep only rows that score at least this.",
        ),
        click.option(
            "--min-confidence", multiple=True, metavar="NUMBER",
            help="Keep only rows whose label is at least this probable, 0 to 1.",
        ),
        click.option(
            "--keep-field", multiple=True, metavar="COLUMN",
            help="Drop no rows, and write to this column whether each would be kept.",
        ),
    ],
    "Files": [
        click.option(
            "--field", "fields", multiple=True, metavar="COLUMN",
            help="Read only these columns and the text; repeatable. Default: all.",
        ),
        click.option(
            "--type", "types", multiple=True, metavar="COLUMN=TYPE",
            help="Arrow type of a column of JSON lines that the files' beginnings, middles and "
            "ends may not tell, such as price=double; repeatable.",
        ),
        click.option("--format", type=click.Choice(["parquet", "jsonl"]), help="Default: parquet."),
        click.option(
            "--compression", metavar="NAME",
            help="zstd, snappy, gzip, lz4 or none; of JSON lines gzip or zstd.",
        ),
        click.option(
            "--staging", metavar="DIRECTORY",
            help="Where files are written before they are uploaded to an OUTPUT of hf://datasets/.",
        ),
        click.option("--part-size", help='Input of one task, such as "16MB". Default: automatic.'),
        click.option(
            "--backend", type=click.Choice(["pandas", "cudf"]),
            help="Frames that files are read as. Default: pandas.",
        ),
        click.option(
            "--on-error", type=click.Choice(["raise", "quarantine"]),
            help="What files, lines and rows do that cannot be read or scored: stop the job, or be "
            "left out and listed. Default: raise.",
        ),
    ],
    CLUSTER: [
        click.option(
            "--cluster", metavar="KIND",
            help="auto, gpu, cpu, slurm, coiled, or another kind that get_client starts. "
            "Default: auto, a worker for each GPU of this machine, or CPU workers.",
        ),
        click.option(
            "--cluster-option", "cluster_options", multiple=True, metavar="NAME=VALUE",
            help="Any further argument of get_client for the cluster; VALUE is JSON, or a text. "
            "Repeatable.",
        ),
        click.option("--workers", type=int, help="Workers that --cluster starts."),
        click.option(
            "--scheduler", metavar="ADDRESS|FILE",
            help="Address or scheduler file of a Dask cluster that is running.",
        ),
    ],
    "Settings": [
        click.option(
            "--config", metavar="FILE",
            help="Read settings from a YAML file; options of the command line win.",
        ),
        click.option(
            "--dump-config", metavar="FILE", help="Write the settings to a YAML file, and stop."
        ),
    ],
}  # fmt: skip
_GROUPS: dict[str, str] = {}  # of each option, by its name


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a job, for a `JobCommand`."""
    for group, options in reversed(_OPTIONS.items()):
        for option in reversed(options):
            command = option(command)
            _GROUPS[command.__click_params__[-1].name] = group  # type: ignore[attr-defined]
    return command


class JobCommand(click.Command):
    """A command whose help shows options of a job in groups, except for the `hidden_group`."""

    hidden_group = ""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, and options that belong to none last."""
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in (*_OPTIONS, "Options")}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record and isinstance(parameter, click.Option):
                groups[_GROUPS.get(parameter.name or "", "Options")].append(record)
        for group, records in groups.items():
            if group != self.hidden_group:
                with formatter.section(group):
                    formatter.write_dl(records)


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
    from gpuclassify.jobs.settings import JobSettings, dump_settings, load_settings

    values = load_settings(given["config"]) if given["config"] else {}
    values |= {name: path for name, path in paths.items() if path}
    for name in JOB:
        if given[name] is not None and given[name] != ():
            values[name] = list(given[name]) if name == "fields" else given[name]
    if given["types"]:
        values["types"] = {**(values.get("types") or {}), **_types(given["types"])}
    if given["cluster_options"]:
        options = _named_values("--cluster-option", "memory_limit=8GB", given["cluster_options"])
        values["cluster_options"] = {**(values.get("cluster_options") or {}), **options}
    if given["classifiers"]:
        values["classifiers"] = [{"classifier": name} for name in given["classifiers"]]
    classifiers = [dict(settings) for settings in values.get("classifiers") or []]
    values["classifiers"] = _with_arguments(classifiers, given)
    settings = JobSettings.of(values, is_plan="output" not in paths)
    if not given["dump_config"]:
        return settings
    dump_settings(settings, given["dump_config"])
    return None


def _with_arguments(
    classifiers: list[dict[str, Any]], given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Add the options of the command line to what they mean."""
    names = [settings.get("classifier") for settings in classifiers]
    for settings in classifiers:
        family = settings.get("classifier")
        settings.update({name: given[name] for name in SHARED if given[name] is not None})
        for option in OWN:
            own = _own(option, given[option], family, names)
            if own:
                settings[option] = _value(option, own, family)
        others = _own("set", given["others"], family, names)
        settings.update(_named_values("--set", "truncated_field=is_cut", others))
    return classifiers


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
            shown = option.replace("_", "-")
            raise ValueError(
                f"--{shown} {value!r} could mean any of {', '.join(map(str, names))}: say which, "
                f"as in --{shown} {names[0]}:{value}"
            )
    return own


def _value(option: str, values: list[str], family: Any) -> Any:
    if option in LISTS:
        return _labels(values, family)
    if option == "min_score" and all("=" in value for value in values):
        return {
            value.rpartition("=")[0]: _number("--min-score", value.rpartition("=")[2], value)
            for value in values
        }
    shown = f"--{option.replace('_', '-')}"
    if len(values) > 1:
        raise ValueError(f"{shown} is given {len(values)} times")
    return _number(shown, values[0]) if option in NUMBERS else values[0]


def _labels(texts: list[str], family: Any) -> list[Any]:
    """The labels to keep: those of the guard are true and false."""
    decisions = {"true": True, "false": False}
    if family == "instruction-data-guard" and {text.lower() for text in texts} <= set(decisions):
        return [decisions[text.lower()] for text in texts]
    return texts


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


def _number(option: str, text: str, given: str | None = None) -> float:
    try:
        return float(text)
    except ValueError as err:
        hint = ", or LABEL=NUMBER" if option == "--min-score" else ""
        raise ValueError(f"{option} {(given or text)!r}: pass a number{hint}") from err
