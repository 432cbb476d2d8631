"""Settings of jobs as plain values: the source of options and of keys in YAML files."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.jobs.stores.names import URL, redacted
from gpuclassify.settings.checks import (
    Backend,
    check_names,
    check_values,
    nearest,
    setting_names,
    warn_once,
)
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.options import MODEL, ROWS, Surrogates

if TYPE_CHECKING:
    from gpuclassify.classifiers.published import Published
    from gpuclassify.corpus.clusters.clusters import AssignClusters
    from gpuclassify.jobs.input.readers import FileReader
    from gpuclassify.jobs.output.writers import FileWriter
    from gpuclassify.jobs.pipeline import Pipeline
    from gpuclassify.mapping.text_mapper import TextMapper

Format = Literal["parquet", "jsonl"]
# Groups of options in the help.
FILES, REPORT = "Files", "Report"
SELECTION, NOTES = "Selection", "Annotations"
CLUSTER = "Cluster"  # ignored by `plan`
# Cluster options that a file may set: sizes and names. Other options could run code in workers, or
# let others connect to them, and so could a foreign scheduler.
SAFE_OPTIONS = {
    *("backend", "n_workers", "threads_per_worker", "processes", "memory_limit", "cores", "memory"),
    *("rmm_pool_size", "rmm_maximum_pool_size", "rmm_async", "torch_memory_fraction"),
    *("enable_cudf_spill", "device_memory_limit", "CUDA_VISIBLE_DEVICES", "gpus_per_job"),
    *("partition", "queue", "account", "walltime", "leave_before", "name", "region", "workspace"),
    *("worker_vm_types", "worker_cpu", "worker_memory", "worker_disk_size", "worker_gpu"),
    *("worker_gpu_type", "spot_policy", "idle_timeout"),
}


# fmt: off
@declared
class JobSettings(Declared):
    """Settings of a job, each with its option on the command line and its key in YAML files."""

    input: list[str] = setting(
        what="a path or a list of paths, such as [books/*.jsonl]")
    output: str | None = setting(
        default=None, what="a directory or URL")
    classifiers: list[dict[str, Any]] = setting(
        factory=list, what="a list of settings, such as [{classifier: domain}]",
        group=MODEL, metavar="FAMILY",
        help="See `gpuclassify models`; repeatable. With several, begin an option's value with "
        "the name of one: --filter-by domain:Games.")
    fields: list[str] | None = setting(
        default=None, what="a list of columns' names, such as [id, url]",
        group=FILES, metavar="COLUMN",
        help="Read only these columns and the text; repeatable. Default: all.")
    types: dict[str, str] | None = setting(
        default=None, what="columns and types, such as {price: double}",
        group=FILES, metavar="COLUMN=TYPE",
        help="Arrow type of a column of JSON lines that the files' beginnings, middles and ends "
        "may not show, such as price=double; repeatable.")
    surrogates: Surrogates = setting(
        default="refuse", group=FILES,
        help="How to handle half a surrogate pair in JSON lines: refuse its line, or replace it "
        "with U+FFFD.")
    path_field: str | None = setting(
        default=None, group=FILES, metavar="COLUMN",
        help="Add a column of this name with the path or URL of each row's file.")
    limit: int | None = setting(
        default=None, group=ROWS, metavar="ROWS", flags=["-n", "--limit"],
        help="Read only this many first rows of the input. Default: all; for `preview` 20.")
    where: str | None = setting(
        default=None, what="a condition such as quality_pred != 'Low'",
        group=SELECTION, metavar="CONDITION",
        help="Keep only rows for which this is true, such as \"quality_pred != 'Low' and "
        "score > 0.5\"; columns are those of the input and of --annotations.")
    threshold_files: list[str] | None = setting(
        default=None, what="a list of files, such as [thresholds.json]",
        group=SELECTION, metavar="FILE",
        flags=["--thresholds"],
        help="Keep only rows whose score reaches the threshold of their group, as `gpuclassify "
        "thresholds` found it; repeatable.")
    cluster_file: str | None = setting(
        default=None, what="a file, such as clusters.json", group=ROWS, metavar="FILE",
        flags=["--assign-clusters"],
        help="Add the column `cluster`: the nearest centroid of each row's `embedding`, which a "
        "classifier `embedder` may write, as `gpuclassify clusters` found it.")
    annotations: list[str] | None = setting(
        default=None, what="a list of directories, such as [notes/quality]",
        group=FILES, metavar="DIRECTORY[=PREFIX_]",
        flags=["--annotations"],
        help="Read the columns of an annotation set beside the input; repeatable. With =PREFIX_, "
        "their names begin with that.")
    annotations_complete: bool = setting(
        default=True, group=FILES, flags=["--annotations-complete/--annotations-incomplete"],
        help="Refuse annotation sets that are unfinished or lack files, or take null for what is "
        "missing. Default: refuse.")
    annotate: bool = setting(
        default=False, group=NOTES,
        help="Write an annotation set: the new columns of every row, without text.")
    redo_changed: bool = setting(
        default=False, group=NOTES,
        help="Annotate files again that have changed since they were annotated.")
    format: Format = setting(
        default="parquet", group=FILES, help="")
    compression: str | None = setting(
        default=None, what="a name such as zstd", group=FILES, metavar="NAME",
        help="zstd, snappy, gzip, lz4 or none; of JSON lines gzip or zstd.")
    partition_by: list[str] | None = setting(
        default=None, what="a list of columns' names, such as [bucket]",
        group=FILES, metavar="COLUMN",
        help="Write rows into folders by the values of this column, such as OUTPUT/bucket=19/; "
        "repeatable.")
    output_bytes: int | str | None = setting(
        default=None, what='bytes, or such as "1GB"', group=FILES,
        help='Size of the files of OUTPUT, such as "1GB", into which neighbouring parts are joined '
        "at the end; 0 for a file of each part. Default: 256MB.")
    staging: str | None = setting(
        default=None, what="a directory or URL", group=FILES, metavar="DIRECTORY",
        help="Directory for files until they are uploaded to an OUTPUT of hf://datasets/.")
    part_size: int | str | None = setting(
        default=None, what='bytes, or such as "16MB"', group=FILES,
        help='Input of one task, such as "16MB". Default: automatic.')
    input_digest: bool = setting(
        default=False, group=FILES,
        help="Detect changed input files by digests of their content instead of size and time; "
        "reads all of them once more.")
    backend: Backend = setting(
        default="pandas", group=FILES,
        help="Library of the frames that hold the rows.")
    on_error: OnError = setting(
        default="raise", group=FILES,
        help="How to handle files, lines and rows that cannot be read or scored: stop the job, or "
        "leave them out and list them.")
    source_field: str | None = setting(
        default=None, group=REPORT, metavar="COLUMN",
        help="Count rows read and rows written by the values of this column, such as url_host.")
    examples: int = setting(
        default=2, group=REPORT, least=0,
        help="Number of texts that the report shows of the most and of the least certain of each "
        "label and of dropped rows, 0 for none.")
    cluster: str = setting(
        default="auto", what="a kind of cluster, such as cpu", group=CLUSTER, metavar="KIND",
        help="auto, gpu, cpu, slurm, coiled, or another kind that get_client starts. Default: "
        "auto, a worker for each GPU of this machine, or CPU workers.")
    cluster_options: dict[str, Any] | None = setting(
        default=None, what="names and values, such as {memory_limit: 8GB}",
        group=CLUSTER, metavar="NAME=VALUE",
        help="Any further argument of get_client for the cluster; VALUE is JSON, or a text. "
        "Repeatable.")
    workers: int | None = setting(
        default=None, group=CLUSTER, help="Workers that --cluster starts.")
    scheduler: str | None = setting(
        default=None, what="an address such as tcp://host:8786, or a scheduler file", group=CLUSTER,
        metavar="ADDRESS|FILE",
        help="Address or scheduler file of a Dask cluster that is running.")
    # fmt: on

    def check_together(self) -> None:
        """Raise an error if settings contradict each other, or one is not allowed."""
        for settings in self.classifiers:
            if "token" in settings or "hf_token" in settings:
                raise ValueError(
                    "a token is no setting of a job, because settings are shown and saved: set "
                    "HF_TOKEN, or log in to the Hub"
                )
        _bytes("part_size", self.part_size, least=1)
        _bytes("output_bytes", self.output_bytes)
        if self.annotate:
            names = ("partition_by", "limit", "path_field")
            wrong = [name for name in names if getattr(self, name) is not None]
            wrong += ["format"] * (self.format != "parquet")
            if wrong:
                raise ValueError(
                    f"annotations are Parquet files of all rows: leave out {wrong[0]}="
                )

    @classmethod
    def of(
        cls, values: Mapping[str, Any], *, is_plan: bool = False, needs_stages: bool = True
    ) -> JobSettings:
        """Make settings from plain values by name, as they are in YAML files and options.

        ``input`` is required; so is ``output``, unless `is_plan`, for a forecast. With
        `needs_stages`, ``classifiers`` are required, too, unless a setting such as ``where``
        replaces them.
        """
        settings = check_plain(values)
        needed = {"input": "INPUT..."} | ({} if is_plan else {"output": "OUTPUT"})
        without = ("where", "threshold_files", "annotations", "cluster_file")
        if needs_stages and not any(settings.get(name) for name in without):
            needed["classifiers"] = "--classifier FAMILY (see `gpuclassify models`)"
        missing = [name for name in needed if settings.get(name) in (None, [])]
        if missing:
            options = " ".join(needed[name] for name in missing)
            raise ValueError(
                f"a job needs {' and '.join(missing)}: pass {options}, or write a --config FILE"
            )
        return cls(**settings)

    def as_dict(self) -> dict[str, Any]:
        """Return settings other than their defaults and None, by name, as plain values for YAML."""
        return {name: value for name, value in self.changed().items() if value is not None}

    def mappers(self) -> list[TextMapper]:
        """Make the job's classifiers from the setting `classifiers`, in this order."""
        mappers = []
        for settings in self.classifiers:
            arguments = dict(settings)
            mappers.append(find_family(arguments.pop("classifier"))(**arguments))
        return mappers

    def cluster_mappers(self) -> list[AssignClusters]:
        """Return a list with the mapper that adds clusters, or [] without `cluster_file`."""
        from gpuclassify.corpus.clusters.clusters import AssignClusters

        return [] if self.cluster_file is None else [AssignClusters(self.cluster_file)]

    def job(self) -> Pipeline:
        """Make the job that the settings declare; it has no writer if there is no output."""
        from gpuclassify.jobs.pipeline import Pipeline

        return Pipeline(self._stages(), **self.pass_options())

    def pass_options(self) -> dict[str, Any]:
        """Return the keyword arguments to pass to a `Pipeline`, by name, except for its stages."""
        names = ("backend", "on_error", "source_field", "examples")
        return {name: getattr(self, name) for name in names}

    def _stages(self) -> list[Any]:
        from gpuclassify.corpus.scores.threshold_filter import ApplyThresholds
        from gpuclassify.jobs.stages import as_chain
        from gpuclassify.mapping.select import Select

        stages: list[Any] = [] if self.where is None else [Select(self.where)]
        stages += map(ApplyThresholds, self.threshold_files or ())
        stages += self.mappers()
        assigned = self.cluster_mappers()
        stages += assigned
        read = self.fields_read(stages, as_chain(assigned).read_fields)
        if self.limit is None:
            reader: Any = self.reader(read)
        else:
            from gpuclassify.jobs.input.files import add_link_targets, find_files
            from gpuclassify.jobs.input.readers import first_rows_lazily
            from gpuclassify.jobs.input.sources import refuse_overlap

            if self.output is not None:
                files, writer = find_files(self.input, {}), self.writer()
                paths, real = add_link_targets(self.input, files), (f.real for f in files)
                refuse_overlap(writer.directory, writer.sample_name, real, paths, {})
            reader = first_rows_lazily(self.reader(read), self.limit, self.on_error)
        stages.insert(0, reader)
        if self.output is not None:
            stages.append(self.writer())
        return stages

    def reader(self, fields: list[str] | None = None) -> FileReader:
        """Make the reader of the input files, which reads the columns `fields`; None means all.

        The setting of the same name is not used here; `fields_read` makes the argument from it.
        """
        from gpuclassify.jobs.input.readers import FileReader

        options: dict[str, Any] = {
            "fields": fields,
            "part_bytes": _bytes("part_size", self.part_size, least=1),
            "input_digest": self.input_digest,
            "path_field": self.path_field,
            "annotations": self.annotations or (),
            "annotations_complete": self.annotations_complete,
            "types": self.types,
            "surrogates": self.surrogates,
        }
        return FileReader(self.input, **options)

    def writer(self) -> FileWriter:
        """Make the writer for `output`: a directory, fsspec URL or ``hf://datasets/OWNER/NAME``."""
        from gpuclassify.jobs.output.hub_writer import HubWriter
        from gpuclassify.jobs.output.writers import AnnotationWriter, JsonlWriter, ParquetWriter
        from gpuclassify.jobs.stores.hub import hub_uri

        assert self.output is not None
        repo, options = hub_uri(self.output), dict[str, Any](compression=self.compression)
        if (size := _bytes("output_bytes", self.output_bytes)) is not None:
            options |= {"output_bytes": size}
        if self.annotate and repo is None and self.staging is None:
            return AnnotationWriter(self.output, redo_changed=self.redo_changed, **options)
        if repo is None:
            if self.staging is not None:
                raise ValueError(
                    f"staging={self.staging!r} is only for output to hf://datasets/OWNER/NAME"
                )
            kind = ParquetWriter if self.format == "parquet" else JsonlWriter
            return kind(self.output, partition_by=self.partition_by, **options)
        if self.partition_by is not None:
            raise ValueError(
                f"partition_by={self.partition_by} is for directories, but {self.output} "
                "has a single folder: leave out partition_by="
            )
        if repo.type != "dataset":
            raise ValueError(f"{self.output!r} is no dataset: write to hf://datasets/OWNER/NAME")
        if self.staging is None:
            raise ValueError(
                f"{self.output} needs a directory that all workers share, which keeps the files "
                "until they are uploaded, so that a lost client loses no work: pass staging="
            )
        return HubWriter(
            repo.id,
            staging=self.staging,
            path=repo.path_in_repo or "data",
            revision=repo.revision or "main",
            file_format=self.format,
            annotates=self.annotate,
            **options,
        )

    def fields_read(self, stages: list[Any], needed: Iterable[str] = ()) -> list[str] | None:
        """Return the columns to read from the input files; None means all.

        If the setting `fields` (--field) names columns, they are these, the columns of texts of
        `stages` and of stages that only drop rows, `source_field`, and the columns in `needed` that
        no stage writes. Other columns that stages read must be in `needed`.
        """
        from gpuclassify.jobs.stages import as_chain

        if self.fields is None:
            return None
        chain = as_chain(stages)
        names = [*chain.text_fields, *self.fields, self.source_field]
        choices = [mapper for mapper in chain.mappers if mapper.row_filter() is not None]
        names += [name for choice in choices for name in choice.read_fields]
        written = chain.schema().names
        names += [name for name in needed if name not in written]
        return [name for name in names if name not in (None, self.path_field)]


def families() -> dict[str, Any]:
    """Return the classes of all classifiers by their names in settings, such as "quality"."""
    from gpuclassify.classifiers import FAMILIES
    from gpuclassify.classifiers.embedder import Embedder
    from gpuclassify.classifiers.head_classifier import HeadClassifier

    return {**FAMILIES, "embedder": Embedder, "heads": HeadClassifier}


def find_family(name: str) -> type[TextMapper] | Published:
    """Return the classifier with this name in settings: its class, or a published checkpoint.

    Raises ValueError for unknown names.
    """
    from gpuclassify.classifiers.published import find_published

    return find_published(name, families())


def family_name(name: str) -> str:
    """Return the usual name of a classifier for any spelling: "domain" for "DomainClassifier".

    Names that are not known are returned unchanged.
    """
    from gpuclassify.classifiers.published import full_name

    return full_name(name, families())


def check_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check plain values for `JobSettings`, by name, and return all but None.

    A single text for ``input`` or some other settings becomes a list, and names of classifiers
    become their usual names (`family_name`).
    """
    check_names("a job has", "setting", values, setting_names(JobSettings))
    passed = {name: value for name, value in values.items() if value is not None}
    for name in {"input", "fields", "partition_by", "annotations"} & passed.keys():
        passed[name] = [passed[name]] if isinstance(passed[name], str) else passed[name]
    check_values(JobSettings, passed)
    for settings in passed.get("classifiers", ()):
        if settings.get("classifier") is None:
            near = nearest("classifier", map(str, settings)) and f", but {list(settings)}"
            raise ValueError(
                f"one of the classifiers has no name{near}: begin it with classifier: and one of "
                f"{', '.join(families())}"
            )
    if "classifiers" in passed:
        passed["classifiers"] = [
            settings | {"classifier": family_name(settings["classifier"])}
            for settings in passed["classifiers"]
        ]
    return passed


def _bytes(name: str, size: int | str | None, least: int = 0) -> int | None:
    from dask.utils import parse_bytes

    try:
        size_bytes = None if size is None else parse_bytes(size)
    except ValueError as err:
        raise ValueError(f'{name}={size!r} is no size: pass bytes, or such as "16MB"') from err
    if size_bytes is not None and size_bytes < least:
        raise ValueError(
            f'{name}={size!r} is below {least} byte{"s" * (least != 1)}: pass bytes, or such as '
            '"16MB"'
        )
    return size_bytes


def load_settings(path: str, others: Collection[str] = ()) -> dict[str, Any]:
    """Load the settings in a YAML file, and check the settings of `JobSettings` among them.

    `others` are names of further settings, such as a recipe's, which are returned unchecked.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _yaml_loader())  # a safe loader
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
        recipe = {name: values.pop(name) for name in others if name in values}
        return check_plain(values) | recipe
    except (TypeError, ValueError) as err:
        raise type(err)(f"{path}: {err}") from err


def refuse_code(values: Mapping[str, Any], path: str) -> None:
    """Raise ValueError if settings from a YAML file could run code that the file's author chose.

    These are the address of a scheduler, and options of a cluster that are not in `SAFE_OPTIONS`.
    """
    for name, value in (values.get("cluster_options") or {}).items():
        if name not in SAFE_OPTIONS or re.search("[\n\r]", str(value)):
            raise ValueError(
                f"{path} has the cluster option {name}, which may run code or open the cluster to "
                "others: if you want that, remove it from the file, and pass "
                f"--cluster-option {name}=VALUE beside --config"
            )
    if values.get("scheduler") is not None:
        raise ValueError(
            f"{path} names the scheduler {values['scheduler']}, whose owner could run code here "
            "and gets the Hub's token: if you want that, remove it from the file, and pass "
            "--scheduler beside --config"
        )


def dump_settings(settings: JobSettings, path: str, own: Mapping[str, Any] | None = None) -> None:
    """Write settings to a YAML file that only its owner may read, without secrets in URLs.

    Secrets are passwords and query strings, which may hold a signature; a warning names the URLs.
    `own` has the settings of a recipe (a kind of job) by name.
    """
    import yaml

    hidden: list[str] = []
    shown = _without_secrets({**settings.as_dict(), **(own or {})}, hidden)
    content = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    if hidden:
        warning = (
            f"left out passwords and queries of {', '.join(hidden)}: pass these URLs in full "
            "on the command line, beside --config"
        )
        warn_once(f"{path}: {warning}")
        content = f"# {warning}\n{content}"
    try:
        open_private = functools.partial(os.open, mode=0o600)
        with open(path, "w", encoding="utf-8", opener=open_private) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # others could read an older file
                os.fchmod(file.fileno(), 0o600)
            file.write(content)
    except OSError as err:
        raise ValueError(
            f"the settings cannot be written to {path}: {err.strerror}. Name a file in an "
            "existing directory"
        ) from err


def _without_secrets(value: Any, hidden: list[str]) -> Any:
    """Remove passwords and queries from URLs in a nested value; add the new URLs to `hidden`."""
    if isinstance(value, dict):
        return {name: _without_secrets(item, hidden) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, hidden) for item in value]
    # A prefix of the URL names a cache, as in simplecache::https://...
    is_url = isinstance(value, str) and URL.match(value.rpartition("::")[2])
    if not is_url or redacted(value) == value:
        return value
    hidden.append(redacted(value))
    return redacted(value)


@functools.cache
def _yaml_loader() -> Any:
    """Return a safe loader class for ``yaml.load`` that refuses repeated names.

    A time limit such as 8:00:00 stays a text; YAML would read a number of base 60.
    """
    import yaml

    text = ("tag:yaml.org,2002:str", re.compile(r"[0-9]+(:[0-9]+)+$"))
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {first: [text, *others] for first, others in known}

        def compose_mapping_node(self, anchor: object) -> Any:
            node = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key, _ in node.value:  # YAML would use the last value of a repeated key
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    raise ValueError(
                        f"{name} is set on line {lines[name]} and again on line {line}: "
                        "remove one of them"
                    )
                lines[name] = line
            return node

    return Loader
