"""A job's settings as plain values: the one table that options and YAML files derive from."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from gpuclassify.jobs.quarantine import ON_ERROR
from gpuclassify.jobs.storage import URL, redacted
from gpuclassify.settings.checks import BACKENDS, check_choice, check_count, is_kind, nearest
from gpuclassify.settings.options import NON_FINITE

if TYPE_CHECKING:
    from gpuclassify.jobs.input.readers import FileReader
    from gpuclassify.jobs.output.writers import FileWriter
    from gpuclassify.jobs.pipeline import Pipeline
    from gpuclassify.mapping.text_mapper import TextMapper

FORMATS = ("parquet", "jsonl")
# Settings of `ScoreBuckets` with edges that are there, and those of `AssignBuckets`.
BUCKETS_OF_EDGES = ("combine", "bucket_field", "overwrite")
BUCKETS = ("scores", "weight", "by", "text_field", "n", *BUCKETS_OF_EDGES)
EDGES = "edges"


def _about(what: str, group: str = "", **option: Any) -> dict[str, Any]:
    """Metadata of a setting: what to pass, and its option's group in the help and attributes."""
    return {"what": what, "group": group, "option": option}


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
        "a list of settings, such as [{classifier: domain}]", "Classifiers", metavar="FAMILY",
        help="See `gpuclassify models`; repeatable. Options that mean one of several begin with "
        "its name: --filter-by domain:Games."))
    buckets: dict[str, Any] | None = field(default=None, metadata=_about(
        "settings of AssignBuckets, such as {scores: [a, b], n: 20}, or {edges: edges.json}"))
    fields: list[str] | None = field(default=None, metadata=_about(
        "a list of columns' names, such as [id, url]", "Files", metavar="COLUMN",
        help="Read only these columns and the text; repeatable. Default: all."))
    types: dict[str, str] | None = field(default=None, metadata=_about(
        "columns and types, such as {price: double}", "Files", metavar="COLUMN=TYPE",
        help="Arrow type of a column of JSON lines that the files' beginnings, middles and ends "
        "may not tell, such as price=double; repeatable."))
    limit: int | None = field(default=None, metadata=_about(
        "a whole number", "Columns and rows", metavar="ROWS", short="-n",
        help="Read only the first rows of the input, so many. Default: all; of `preview` 20."))
    format: str = field(default="parquet", metadata=_about(
        "parquet or jsonl", "Files", choices=FORMATS, help="Default: parquet."))
    compression: str | None = field(default=None, metadata=_about(
        "a name such as zstd", "Files", metavar="NAME",
        help="zstd, snappy, gzip, lz4 or none; of JSON lines gzip or zstd."))
    non_finite: str = field(default="null", metadata=_about(
        "null, literal or string", "Files", choices=NON_FINITE,
        help="What JSON lines have for infinities and NaN: null, literals as Python writes them, "
        "which are no JSON, or their names as strings. Default: null."))
    partition_by: list[str] | None = field(default=None, metadata=_about(
        "a list of columns' names, such as [bucket]", "Files", metavar="COLUMN",
        help="Write rows into folders by the values of this column, such as OUTPUT/bucket=19/; "
        "repeatable."))
    staging: str | None = field(default=None, metadata=_about(
        "a directory or URL", "Files", metavar="DIRECTORY",
        help="Where files are written before they are uploaded to an OUTPUT of hf://datasets/."))
    part_size: int | str | None = field(default=None, metadata=_about(
        'bytes, or such as "16MB"', "Files",
        help='Input of one task, such as "16MB". Default: automatic.'))
    input_digest: bool = field(default=False, metadata=_about(
        "true or false", "Files",
        help="Tell by digests of their content whether input files have changed, and not by size "
        "and time; reads all of them once more."))
    backend: str = field(default="pandas", metadata=_about(
        "pandas or cudf", "Files", choices=BACKENDS,
        help="Frames that files are read as. Default: pandas."))
    on_error: str = field(default="raise", metadata=_about(
        "raise or quarantine", "Files", choices=ON_ERROR,
        help="What files, lines and rows do that cannot be read or scored: stop the job, or be "
        "left out and listed. Default: raise."))
    source_field: str | None = field(default=None, metadata=_about(
        "a column's name", "Report", metavar="COLUMN",
        help="Count rows read and kept by the values of this column, such as url_host."))
    examples: int = field(default=2, metadata=_about(
        "a whole number", "Report",
        help="Texts that the report shows of the most and of the least certain of each label and "
        "of what is dropped, 0 for none. Default: 2."))
    cluster: str = field(default="auto", metadata=_about(
        "a kind of cluster, such as cpu", "Cluster", metavar="KIND",
        help="auto, gpu, cpu, slurm, coiled, or another kind that get_client starts. Default: "
        "auto, a worker for each GPU of this machine, or CPU workers."))
    cluster_options: dict[str, Any] | None = field(default=None, metadata=_about(
        "names and values, such as {memory_limit: 8GB}", "Cluster", metavar="NAME=VALUE",
        help="Any further argument of get_client for the cluster; VALUE is JSON, or a text. "
        "Repeatable."))
    workers: int | None = field(default=None, metadata=_about(
        "a whole number", "Cluster", help="Workers that --cluster starts."))
    scheduler: str | None = field(default=None, metadata=_about(
        "an address such as tcp://host:8786, or a scheduler file", "Cluster",
        metavar="ADDRESS|FILE",
        help="Address or scheduler file of a Dask cluster that is running."))
    # fmt: on

    def __post_init__(self) -> None:
        check_kinds(asdict(self))
        for own in fields(self):
            if choices := own.metadata["option"].get("choices"):
                check_choice(own.name, getattr(self, own.name), choices)
        self._check_buckets()
        for settings in self.classifiers:
            if "token" in settings or "hf_token" in settings:
                raise ValueError(
                    "a token is no setting of a job, whose settings are shown and kept: set "
                    "HF_TOKEN, or log in to the Hub"
                )
        _bytes(self.part_size)
        check_count("limit", self.limit)
        if self.limit is not None and self.types:
            raise ValueError(
                "limit= reads the first rows as they are, and types= has no meaning for them: "
                "leave one of them out"
            )

    def _check_buckets(self) -> None:
        given = self.buckets or {}
        known = (EDGES, *BUCKETS_OF_EDGES) if EDGES in given else BUCKETS
        for name in given:
            if name not in known:
                raise ValueError(
                    f"buckets have no setting {name!r}.{nearest(name, known)} Settings are "
                    f"{', '.join(known)}, or with edges that are there "
                    f"{', '.join((EDGES, *BUCKETS_OF_EDGES))}"
                )
        if given and not {"scores", EDGES} & {*given}:
            raise ValueError("buckets need scores, such as buckets: {scores: [a, b]}, or edges")
        if given and EDGES not in given and self.limit is not None:
            raise ValueError("limit= reads the first rows alone, and buckets are those of all")

    @classmethod
    def of(cls, values: Mapping[str, Any], *, is_plan: bool = False) -> JobSettings:
        """Settings of plain values; a plan may do without an output.

        Raises as the class does, and ValueError if a name is unknown or one that is needed is
        missing.
        """
        check_kinds(values)
        needed = {"input": "INPUT..."} | ({} if is_plan else {"output": "OUTPUT"})
        if not values.get("buckets"):
            needed["classifiers"] = "--classifier FAMILY (see `gpuclassify models`)"
        missing = [name for name in needed if not values.get(name)]
        if missing:
            options = " ".join(needed[name] for name in missing)
            raise ValueError(
                f"a job's {' and '.join(missing)} must be given: {options}, or in a --config FILE"
            )
        given = {name: value for name, value in values.items() if value is not None}
        for name in {"input", "fields", "partition_by"} & set(given):
            given[name] = [given[name]] if isinstance(given[name], str) else list(given[name])
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


def find_family(name: str) -> type[TextMapper]:
    """The class of this name; ValueError with the nearest one if there is none."""
    known = families()
    check_choice("classifier", name, tuple(known))
    return known[name]


def check_kinds(values: Mapping[str, Any]) -> None:
    """Raise unless every name is one of a setting, and its value of the setting's kind.

    ValueError names the nearest name, TypeError what the value must be.
    """
    known, kinds = {own.name: own for own in fields(JobSettings)}, get_type_hints(JobSettings)
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"a job has no setting {name!r}.{nearest(str(name), known)} "
                f"Settings are {', '.join(known)}."
            )
        is_one = isinstance(value, str) and is_kind([value], kinds[name])  # in place of a list
        if not (is_one or value is None or is_kind(value, kinds[name])):
            what = known[name].metadata["what"]
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")
    for settings in values.get("classifiers") or []:
        if settings.get("classifier") is None:
            near = nearest("classifier", map(str, settings)) and f", but {list(settings)}"
            raise ValueError(
                f"one of the classifiers has no name{near}: begin it with classifier: and one of "
                f"{', '.join(families())}"
            )


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
        check_kinds(values)
    except (TypeError, ValueError) as err:
        raise type(err)(f"{path}: {err}") from err
    return values


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
        warnings.warn(f"{path}: {told}", stacklevel=2)
        content = f"# {told}\n{content}"
    try:
        with open(path, "w", encoding="utf-8", opener=_only_for_its_owner) as file:
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


def _only_for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
            _refuse_repeats(key for key, _ in node.value)
            return node

    return Loader


def _refuse_repeats(keys: Iterable[Any]) -> None:
    """Raise if two keys of a YAML mapping are the same; YAML itself would take the last one."""
    lines: dict[str, int] = {}
    for key in keys:
        line, name = key.start_mark.line + 1, str(key.value)
        if name in lines:
            raise ValueError(
                f"{name} is set on line {lines[name]} and again on line {line}: leave one of them"
            )
        lines[name] = line
