"""A job's settings as plain values: the one table that options and YAML files derive from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from gpuclassify.checks import check_choice, nearest
from gpuclassify.frames import BACKENDS
from gpuclassify.jobs.quarantine import ON_ERROR

if TYPE_CHECKING:
    from gpuclassify.jobs.output.writers import FileWriter
    from gpuclassify.jobs.pipeline import Pipeline

FORMATS = ("parquet", "jsonl")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_right, value))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes
    ----------
    is_right : callable
        Whether a value is of it.
    option : dict
        What click must know of an option that gives such a value.
    """

    is_right: Callable[[Any], bool]
    option: dict[str, Any]


TEXT = Kind(_is_text, {})
COUNT = Kind(_is_count, {"type": int})
SIZE = Kind(lambda value: _is_text(value) or _is_count(value), {})
TEXTS = Kind(lambda value: _is_text(value) or _is_list(value, _is_text), {"multiple": True})
NAMED = Kind(_is_named, {"multiple": True})
NAMED_TEXTS = Kind(
    lambda value: _is_named(value) and all(map(_is_text, value.values())), {"multiple": True}
)
CLASSIFIERS = Kind(lambda value: _is_list(value, _is_named), {"multiple": True})


@dataclass(frozen=True)
class Setting:
    """What a setting may be, and the option of the command line that gives it.

    Attributes
    ----------
    kind : Kind
    what : str
        What to pass, for messages.
    option : str
        Its flag; for what every job needs and no flag gives, how the command line names it.
    group : str
        Of options in the help; "" for arguments, which are no options.
    help : str
    metavar : str, optional
    choices : tuple of str
        All values, if they are few.
    """

    kind: Kind
    what: str
    option: str
    group: str = ""
    help: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, own: Field[Any]) -> Setting:
        """The setting that a field of `JobSettings` is."""
        return own.metadata["setting"]


def _field(*setting: Any, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(*setting, **more)})


@dataclass(frozen=True)
class JobSettings:
    """What a command does; the fields' metadata say what each one may be.

    Raises
    ------
    TypeError
        A value is of another kind.
    ValueError
        A value is out of range, or a token is among them.
    """

    input: list[str] = _field(
        TEXTS, "a path or a list of paths, such as [books/*.jsonl]", "INPUT...", default=MISSING
    )
    output: str | None = _field(_is_text, "a directory or URL", "OUTPUT", default=MISSING)
    classifiers: list[dict[str, Any]] = _field(
        CLASSIFIERS,
        "a list of settings, such as [{classifier: domain}]",
        "--classifier",
        "Classifiers",
        "See `gpuclassify models`; repeatable. Options that mean one of several "
        "begin with its name: --filter-by domain:Games.",
        "FAMILY",
        default=MISSING,
    )
    fields: list[str] | None = _field(
        TEXTS,
        "a list of columns' names, such as [id, url]",
        "--field",
        "Files",
        "Read only these columns and the text; repeatable. Default: all.",
        "COLUMN",
    )
    types: dict[str, str] | None = _field(
        NAMED_TEXTS,
        "columns and types, such as {price: double}",
        "--type",
        "Files",
        "Arrow type of a column of JSON lines that the files' beginnings, middles and ends may not "
        "tell, such as price=double; repeatable.",
        "COLUMN=TYPE",
    )
    format: str = _field(
        TEXT,
        "parquet or jsonl",
        "--format",
        "Files",
        "Default: parquet.",
        choices=FORMATS,
        default="parquet",
    )
    compression: str | None = _field(
        TEXT,
        "a name such as zstd",
        "--compression",
        "Files",
        "zstd, snappy, gzip, lz4 or none; of JSON lines gzip or zstd.",
        "NAME",
    )
    staging: str | None = _field(
        TEXT,
        "a directory or URL",
        "--staging",
        "Files",
        "Where files are written before they are uploaded to an OUTPUT of hf://datasets/.",
        "DIRECTORY",
    )
    part_size: int | str | None = _field(
        SIZE,
        'bytes, or such as "16MB"',
        "--part-size",
        "Files",
        'Input of one task, such as "16MB". Default: automatic.',
    )
    backend: str = _field(
        TEXT,
        "pandas or cudf",
        "--backend",
        "Files",
        "Frames that files are read as. Default: pandas.",
        choices=BACKENDS,
        default="pandas",
    )
    on_error: str = _field(
        TEXT,
        "raise or quarantine",
        "--on-error",
        "Files",
        "What files, lines and rows do that cannot be read or scored: stop the job, or be left out "
        "and listed. Default: raise.",
        choices=ON_ERROR,
        default="raise",
    )
    cluster: str = _field(
        TEXT,
        "a kind of cluster, such as cpu",
        "--cluster",
        "Cluster",
        "auto, gpu, cpu, slurm, coiled, or another kind that get_client starts. Default: auto, a "
        "worker for each GPU of this machine, or CPU workers.",
        "KIND",
        default="auto",
    )
    cluster_options: dict[str, Any] | None = _field(
        NAMED,
        "names and values, such as {memory_limit: 8GB}",
        "--cluster-option",
        "Cluster",
        "Any further argument of get_client for the cluster; VALUE is JSON, or a text. Repeatable.",
        "NAME=VALUE",
    )
    workers: int | None = _field(
        COUNT, "a whole number", "--workers", "Cluster", "Workers that --cluster starts."
    )
    scheduler: str | None = _field(
        TEXT, "an address such as tcp://host:8786, or a scheduler file", "--scheduler",
        "Cluster", "Address or scheduler file of a Dask cluster that is running.", "ADDRESS|FILE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_kinds(asdict(self))
        for own in fields(self):
            if choices := Setting.of(own).choices:
                check_choice(own.name, getattr(self, own.name), choices)
        if not self.input or not self.classifiers:
            raise ValueError("a job needs at least one input and one classifier")
        for settings in self.classifiers:
            if "token" in settings or "hf_token" in settings:
                raise ValueError(
                    "a token is no setting of a job, whose settings are shown and kept: set "
                    "HF_TOKEN, or log in to the Hub"
                )
        _bytes(self.part_size)

    @classmethod
    def of(cls, values: Mapping[str, Any], *, is_plan: bool = False) -> JobSettings:
        """Settings of plain values; a plan may do without an output.

        Raises
        ------
        ValueError
            A name is unknown, one that is needed is missing, or a value is out of range.
        TypeError
            A value is of another kind.
        """
        check_kinds(values)
        needed = {own.name: Setting.of(own).option for own in fields(cls) if own.default is MISSING}
        needed["classifiers"] += " FAMILY (see `gpuclassify models`)"
        if is_plan:
            del needed["output"]
        missing = [name for name in needed if not values.get(name)]
        if missing:
            options = " ".join(needed[name] for name in missing)
            raise ValueError(
                f"a job's {' and '.join(missing)} must be given: {options}, or in a --config FILE"
            )
        given: dict[str, Any] = {"output": None}
        given |= {name: value for name, value in values.items() if value is not None}
        for name in {"input", "fields"} & set(given):
            given[name] = [given[name]] if _is_text(given[name]) else list(given[name])
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are the default."""
        defaults = {own.name: own.default for own in fields(self)}
        return {k: v for k, v in asdict(self).items() if v is not None and v != defaults[k]}

    def pipeline(self) -> Pipeline:
        """The job itself, without a writer if there is no output.

        Raises
        ------
        TypeError, ValueError
            An argument of a classifier is unknown or wrong.
        """
        from gpuclassify.jobs.input.readers import FileReader, JsonlReader
        from gpuclassify.jobs.pipeline import Pipeline
        from gpuclassify.jobs.stages import as_chain, text_fields

        known, mappers = families(), []
        for settings in self.classifiers:
            arguments = dict(settings)
            family = arguments.pop("classifier")
            if family not in known:
                near = nearest(str(family), known)
                raise ValueError(f"no classifier {family!r}.{near} Known: {', '.join(known)}.")
            mappers.append(known[family](**arguments))
        read = self.fields
        if read is not None:
            read = [*text_fields(as_chain(mappers).mappers), *read]
        kind, typed = (JsonlReader, {"types": self.types}) if self.types else (FileReader, {})
        reader = kind(self.input, fields=read, part_bytes=_bytes(self.part_size), **typed)
        writers = [] if self.output is None else [self.writer(self.output)]
        return Pipeline([reader, *mappers, *writers], backend=self.backend, on_error=self.on_error)

    def writer(self, output: str) -> FileWriter:
        """The writer for an output: a directory, an fsspec URL or ``hf://datasets/OWNER/NAME``.

        Raises
        ------
        ValueError
            `staging` is missing for a repository, or given for another output.
        """
        from gpuclassify.hub.dataset_files import HubPath
        from gpuclassify.jobs.output.hub_writer import HubWriter
        from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter

        options: dict[str, Any] = {}
        if self.compression is not None:
            options["compression"] = self.compression
        place = HubPath.of(output)
        if place is None:
            if self.staging is not None:
                raise ValueError(
                    f"staging={self.staging!r} is for output to hf://datasets/OWNER/NAME only"
                )
            return (ParquetWriter if self.format == "parquet" else JsonlWriter)(output, **options)
        if place.repo_type != "dataset":
            raise ValueError(f"{output!r} is no dataset: write to hf://datasets/OWNER/NAME")
        if self.staging is None:
            raise ValueError(
                f"{output} needs a directory that all workers see, where the files are written "
                "before they are uploaded, so that a lost client loses no work: staging=, "
                "--staging DIR"
            )
        return HubWriter(
            place.repo,
            staging=self.staging,
            path=place.path or "data",
            revision=place.revision,
            file_format=self.format,
            **options,
        )


def families() -> dict[str, Any]:
    """Classes by the names that settings give them."""
    from gpuclassify.classifiers import FAMILIES
    from gpuclassify.classifiers.embedder import Embedder

    return {**FAMILIES, "embedder": Embedder}


def check_kinds(values: Mapping[str, Any]) -> None:
    """Raise unless every name is one of a setting, and its value of the setting's kind.

    Raises
    ------
    ValueError
        A name is unknown; the nearest one is named.
    TypeError
        A value is of another kind; what it must be is named.
    """
    known = {own.name: Setting.of(own) for own in fields(JobSettings)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"a job has no setting {name!r}.{nearest(str(name), known)} "
                f"Settings are {', '.join(known)}."
            )
        if value is not None and not known[name].kind.is_right(value):
            raise TypeError(
                f"{name}={value!r} is a {type(value).__name__}: pass {known[name].what}"
            )
    for settings in values.get("classifiers") or []:
        if settings.get("classifier") is None:
            near = nearest("classifier", map(str, settings)) and f", but {list(settings)}"
            raise ValueError(
                f"one of the classifiers has no name{near}: begin it with classifier: and one of "
                f"{', '.join(families())}"
            )


def _bytes(size: int | str | None) -> int | None:
    from dask.utils import parse_bytes

    if size is None:
        return None
    try:
        size_bytes = parse_bytes(size)
    except ValueError as err:
        raise ValueError(f'part_size={size!r} is no size: pass bytes, or such as "16MB"') from err
    if size_bytes < 1:
        raise ValueError(f'part_size={size!r} is below 1 byte: pass bytes, or such as "16MB"')
    return size_bytes
