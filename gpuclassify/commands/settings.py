"""A job's settings as plain values: the one table that options and YAML files derive from."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpuclassify.jobs.quarantine import OnError
from gpuclassify.jobs.storage import URL, redacted
from gpuclassify.settings.checks import (
    Backend,
    check_names,
    check_settings,
    check_values,
    nearest,
    setting_names,
    warn_once,
)
from gpuclassify.settings.options import NonFinite

if TYPE_CHECKING:
    from gpuclassify.classifiers.published import Published
    from gpuclassify.jobs.input.readers import FileReader
    from gpuclassify.jobs.output.writers import FileWriter
    from gpuclassify.jobs.pipeline import Pipeline
    from gpuclassify.mapping.text_mapper import TextMapper

Format = Literal["parquet", "jsonl"]
# Groups of options in the help.
MODEL, ROWS, FILES, REPORT = "Classifiers", "Columns and rows", "Files", "Report"
CLUSTER = "Cluster"  # of which a plan has no use
# Settings of `ScoreBuckets` with edges that are there, and those of `AssignBuckets`.
BUCKETS_OF_EDGES = ("combine", "bucket_field", "overwrite")
BUCKETS = ("scores", "weight", "by", "text_field", "n", *BUCKETS_OF_EDGES)
EDGES = "edges"


def _about(what: str, group: str = "", least: int = 1, **option: Any) -> dict[str, Any]:
    """Metadata of a setting: what to pass if it is no plain number or text, and its option."""
    told = {"what": what} if what else {"least": least}
    return {"group": group, "option": option, **told}


# fmt: off
@dataclass(frozen=True)
class JobSettings:
    """What a command does: the one table of settings, of options and of keys in YAML files.

    Raises TypeError if a value is of another kind, and ValueError if it is out of range or a token.
    """

    input: list[str] = field(metadata=_about(
        "a path or a list of paths, such as [books/*.jsonl]"))
    output: str | None = field(default=None, metadata=_about("a directory or URL"))
    classifiers: list[dict[str, Any]] = field(default_factory=list, metadata=_about(
        "a list of settings, such as [{classifier: domain}]", MODEL, metavar="FAMILY",
        help="See `gpuclassify models`; repeatable. Options that mean one of several begin with "
        "its name: --filter-by domain:Games."))
    buckets: dict[str, Any] | None = field(default=None, metadata=_about(
        "settings of AssignBuckets, such as {scores: [a, b], n: 20}, or {edges: edges.json}"))
    fields: list[str] | None = field(default=None, metadata=_about(
        "a list of columns' names, such as [id, url]", FILES, metavar="COLUMN",
        help="Read only these columns and the text; repeatable. Default: all."))
    types: dict[str, str] | None = field(default=None, metadata=_about(
        "columns and types, such as {price: double}", FILES, metavar="COLUMN=TYPE",
        help="Arrow type of a column of JSON lines that the files' beginnings, middles and ends "
        "may not tell, such as price=double; repeatable."))
    limit: int | None = field(default=None, metadata=_about(
        "", ROWS, metavar="ROWS", flags=["-n", "--limit"],
        help="Read only the first rows of the input, so many. Default: all; of `preview` 20."))
    format: Format = field(default="parquet", metadata=_about(
        "", FILES, help=""))
    compression: str | None = field(default=None, metadata=_about(
        "a name such as zstd", FILES, metavar="NAME",
        help="zstd, snappy, gzip, lz4 or none; of JSON lines gzip or zstd."))
    non_finite: NonFinite = field(default="null", metadata=_about(
        "", FILES,
        help="What JSON lines have for infinities and NaN: null, literals as Python writes them, "
        "which are no JSON, or their names as strings."))
    partition_by: list[str] | None = field(default=None, metadata=_about(
        "a list of columns' names, such as [bucket]", FILES, metavar="COLUMN",
        help="Write rows into folders by the values of this column, such as OUTPUT/bucket=19/; "
        "repeatable."))
    staging: str | None = field(default=None, metadata=_about(
        "a directory or URL", FILES, metavar="DIRECTORY",
        help="Where files are written before they are uploaded to an OUTPUT of hf://datasets/."))
    part_size: int | str | None = field(default=None, metadata=_about(
        'bytes, or such as "16MB"', FILES,
        help='Input of one task, such as "16MB". Default: automatic.'))
    input_digest: bool = field(default=False, metadata=_about(
        "", FILES,
        help="Tell by digests of their content whether input files have changed, and not by size "
        "and time; reads all of them once more."))
    backend: Backend = field(default="pandas", metadata=_about(
        "", FILES,
        help="Frames that files are read as."))
    on_error: OnError = field(default="raise", metadata=_about(
        "", FILES,
        help="What files, lines and rows do that cannot be read or scored: stop the job, or be "
        "left out and listed."))
    source_field: str | None = field(default=None, metadata=_about(
        "", REPORT, metavar="COLUMN",
        help="Count rows read and kept by the values of this column, such as url_host."))
    examples: int = field(default=2, metadata=_about(
        "", REPORT, least=0,
        help="Texts that the report shows of the most and of the least certain of each label and "
        "of what is dropped, 0 for none."))
    cluster: str = field(default="auto", metadata=_about(
        "a kind of cluster, such as cpu", CLUSTER, metavar="KIND",
        help="auto, gpu, cpu, slurm, coiled, or another kind that get_client starts. Default: "
        "auto, a worker for each GPU of this machine, or CPU workers."))
    cluster_options: dict[str, Any] | None = field(default=None, metadata=_about(
        "names and values, such as {memory_limit: 8GB}", CLUSTER, metavar="NAME=VALUE",
        help="Any further argument of get_client for the cluster; VALUE is JSON, or a text. "
        "Repeatable."))
    workers: int | None = field(default=None, metadata=_about(
        "", CLUSTER, help="Workers that --cluster starts."))
    scheduler: str | None = field(default=None, metadata=_about(
        "an address such as tcp://host:8786, or a scheduler file", CLUSTER,
        metavar="ADDRESS|FILE",
        help="Address or scheduler file of a Dask cluster that is running."))
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)
        buckets = self.buckets or {}
        known = (EDGES, *BUCKETS_OF_EDGES) if EDGES in buckets else BUCKETS
        check_names("buckets have", "setting", buckets, known)
        if buckets and not {"scores", EDGES} & {*buckets}:
            raise ValueError("buckets need scores, such as buckets: {scores: [a, b]}, or edges")
        if buckets and EDGES not in buckets and self.limit is not None:
            raise ValueError("limit= reads the first rows alone, and buckets are those of all")
        for settings in self.classifiers:
            if "token" in settings or "hf_token" in settings:
                raise ValueError(
                    "a token is no setting of a job, whose settings are shown and kept: set "
                    "HF_TOKEN, or log in to the Hub"
                )
        _bytes(self.part_size)
        if self.limit is not None and self.types:
            raise ValueError(
                "limit= reads the first rows as they are, and types= has no meaning for them: "
                "leave one of them out"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any], *, is_plan: bool = False) -> JobSettings:
        """Settings of plain values; a plan may do without an output.

        Raises as the class does, and ValueError if a name is unknown or one that is needed is
        missing.
        """
        given = check_plain(values)
        needed = {"input": "INPUT..."} | ({} if is_plan else {"output": "OUTPUT"})
        if not given.get("buckets"):
            needed["classifiers"] = "--classifier FAMILY (see `gpuclassify models`)"
        missing = [name for name in needed if not given.get(name)]
        if missing:
            options = " ".join(needed[name] for name in missing)
            raise ValueError(
                f"a job's {' and '.join(missing)} must be given: {options}, or in a --config FILE"
            )
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are the default."""
        defaults = {own.name: own.default for own in fields(self)}
        return {k: v for k, v in asdict(self).items() if v is not None and v != defaults[k]}

    def mappers(self) -> list[TextMapper]:
        """The classifiers in their order."""
        made = []
        for settings in self.classifiers:
            arguments = dict(settings)
            made.append(find_family(arguments.pop("classifier"))(**arguments))
        return made

    def job(self) -> Pipeline:
        """The job, without a writer if there is no output."""
        from gpuclassify.jobs.pipeline import OPTIONS, Pipeline
        from gpuclassify.scores.job import AssignBuckets

        options = {name: getattr(self, name) for name in OPTIONS}
        if self.buckets is None or EDGES in self.buckets:
            return Pipeline(self._stages(), **options)
        return AssignBuckets(self._stages(), **self.buckets, **options)

    def _stages(self) -> list[Any]:
        from gpuclassify.scores.buckets import ScoreBuckets

        stages: list[Any] = self.mappers()
        if self.buckets is not None and EDGES in self.buckets:
            stages.append(ScoreBuckets(**self.buckets))
        read = None if self.fields is None else self._fields(stages)
        if self.limit is None:
            reader: Any = self.reader(read)
        else:
            from gpuclassify.jobs.input.readers import first_rows_lazily

            reader = first_rows_lazily(self.input, self.limit, read)
        stages.insert(0, reader)
        if self.output is not None:
            stages.append(self.writer())
        return stages

    def reader(self, fields: list[str] | None = None) -> FileReader:
        """The reader of the input, of these columns or of all."""
        from gpuclassify.jobs.input.readers import FileReader, JsonlReader

        options: dict[str, Any] = {
            "fields": fields,
            "part_bytes": _bytes(self.part_size),
            "input_digest": self.input_digest,
        }
        if self.types:
            return JsonlReader(self.input, types=self.types, **options)
        return FileReader(self.input, **options)

    def writer(self) -> FileWriter:
        """The writer for the output: a directory, an fsspec URL or ``hf://datasets/OWNER/NAME``."""
        from gpuclassify.hub.dataset_files import hub_uri
        from gpuclassify.jobs.output.hub_writer import HubWriter
        from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter

        assert self.output is not None
        options: dict[str, Any] = {"compression": self.compression, "non_finite": self.non_finite}
        place = hub_uri(self.output)
        if place is None:
            if self.staging is not None:
                raise ValueError(
                    f"staging={self.staging!r} is for output to hf://datasets/OWNER/NAME only"
                )
            kind = ParquetWriter if self.format == "parquet" else JsonlWriter
            return kind(self.output, partition_by=self.partition_by, **options)
        if self.partition_by is not None:
            raise ValueError(
                f"partition_by={self.partition_by} is for directories: files of {self.output} "
                "have one folder"
            )
        if place.type != "dataset":
            raise ValueError(f"{self.output!r} is no dataset: write to hf://datasets/OWNER/NAME")
        if self.staging is None:
            raise ValueError(
                f"{self.output} needs a directory that all workers see, where the files are "
                "written before they are uploaded, so that a lost client loses no work: staging="
            )
        return HubWriter(
            place.id,
            staging=self.staging,
            path=place.path_in_repo or "data",
            revision=place.revision or "main",
            file_format=self.format,
            **options,
        )

    def _fields(self, stages: list[Any]) -> list[str]:
        """The columns that are read: what stages need of them, and those that are asked for."""
        from gpuclassify.jobs.stages import as_chain
        from gpuclassify.scores.job import AssignBuckets

        names = [*as_chain(stages).text_fields, *(self.fields or ()), self.source_field]
        if self.buckets is not None:
            buckets = stages[-1] if EDGES in self.buckets else AssignBuckets([], **self.buckets)
            written = as_chain(stages).schema().names
            names += [name for name in buckets.columns.needed if name not in written]
        return [name for name in names if name is not None]


def families() -> dict[str, Any]:
    """Classes by the names that settings give them."""
    from gpuclassify.classifiers import FAMILIES
    from gpuclassify.classifiers.embedder import Embedder
    from gpuclassify.classifiers.head_classifier import HeadClassifier

    return {**FAMILIES, "embedder": Embedder, "heads": HeadClassifier}


def find_family(name: str) -> type[TextMapper] | Published:
    """The class or declaration of this name; ValueError with the nearest one if there is none."""
    from gpuclassify.classifiers.published import find_published

    return find_published(name, families())


def check_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values that are not None, with a list where a setting may be one text of it.

    Raises TypeError or ValueError unless every name is that of a setting, and its value fits.
    """
    check_names("a job has", "setting", values, setting_names(JobSettings))
    given = {name: value for name, value in values.items() if value is not None}
    for name in {"input", "fields", "partition_by"} & given.keys():
        given[name] = [given[name]] if isinstance(given[name], str) else given[name]
    check_values(JobSettings, given)
    for settings in given.get("classifiers", ()):
        if settings.get("classifier") is None:
            near = nearest("classifier", map(str, settings)) and f", but {list(settings)}"
            raise ValueError(
                f"one of the classifiers has no name{near}: begin it with classifier: and one of "
                f"{', '.join(families())}"
            )
    return given


def _bytes(size: int | str | None) -> int | None:
    from dask.utils import parse_bytes

    try:
        size_bytes = None if size is None else parse_bytes(size)
    except ValueError as err:
        raise ValueError(f'part_size={size!r} is no size: pass bytes, or such as "16MB"') from err
    if size_bytes is not None and size_bytes < 1:
        raise ValueError(f'part_size={size!r} is below 1 byte: pass bytes, or such as "16MB"')
    return size_bytes


def load_settings(path: str) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises ValueError if it cannot be read, is no YAML, or no mapping of settings' names to values,
    and TypeError if a value is of another kind.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _yaml_loader())  # a safe one
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(
            f"the settings {path} cannot be read: {reason}. --dump-config {path} writes such a "
            "file from the other options"
        ) from err
    except RecursionError as err:
        raise ValueError(f"{path} holds lists or mappings nested too deep for settings") from err
    except yaml.YAMLError as err:
        raise ValueError(f"{path} is no YAML file: {err}") from err
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, such as input: books/*.jsonl")
    try:
        return check_plain(values)
    except (TypeError, ValueError) as err:
        raise type(err)(f"{path}: {err}") from err


def dump_settings(settings: JobSettings, path: str) -> None:
    """Write settings to a YAML file that only its owner may read, without passwords of URLs.

    Warns if URLs had a password, or a query, which may be a signature.
    """
    import yaml

    hidden: list[str] = []
    shown = _without_secrets(settings.as_dict(), hidden)
    content = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    if hidden:
        told = (
            f"left out passwords and queries of {', '.join(hidden)}: give these URLs whole on the "
            "command line, beside --config"
        )
        warn_once(f"{path}: {told}")
        content = f"# {told}\n{content}"
    try:
        for_its_owner = functools.partial(os.open, mode=0o600)
        with open(path, "w", encoding="utf-8", opener=for_its_owner) as file:
            file.write(content)
    except OSError as err:
        raise ValueError(
            f"the settings cannot be written to {path}: {err.strerror}. Name a file in a directory "
            "that is there"
        ) from err


def _without_secrets(value: Any, hidden: list[str]) -> Any:
    """The value with URLs as they may be shown; `hidden` gets those that say less then."""
    if isinstance(value, dict):
        return {name: _without_secrets(each, hidden) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each, hidden) for each in value]
    # What goes before the URL names a cache, as in simplecache::https://...
    is_url = isinstance(value, str) and URL.match(value.rpartition("::")[2])
    if not is_url or redacted(value) == value:
        return value
    hidden.append(redacted(value))
    return redacted(value)


@functools.cache
def _yaml_loader() -> Any:
    """A safe loader that refuses a name set twice.

    A time limit such as 8:00:00 is a text to it, and no number of base 60.
    """
    import yaml

    text = ("tag:yaml.org,2002:str", re.compile(r"[0-9]+(:[0-9]+)+$"))
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {first: [text, *others] for first, others in known}

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key, _ in node.value:  # YAML itself would take the last of a key that is repeated
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    raise ValueError(
                        f"{name} is set on line {lines[name]} and again on line {line}: "
                        "leave one of them"
                    )
                lines[name] = line
            return node

    return Loader
