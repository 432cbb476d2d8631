"""A job's settings as plain values: of the command line, or of a YAML file."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpuclassify.checks import check_choice, nearest
from gpuclassify.frames import BACKENDS
from gpuclassify.jobs.files import JSONL, PARQUET
from gpuclassify.jobs.input.readers import FileReader, JsonlReader
from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.output.writers import FileWriter, JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.quarantine import ON_ERROR
from gpuclassify.jobs.stages import as_chain


@dataclass(frozen=True)
class JobSettings:
    """What a command does.

    Attributes
    ----------
    input : list of str
        Files, directories, globs or URLs.
    output : str, optional
        Directory, URL or ``hf://datasets/OWNER/NAME``. None for a job that is only planned.
    classifiers : list of dict
        For each, ``classifier`` (its family's name) and the arguments of its constructor.
    fields : list of str, optional
        Columns to read and keep beside the text. Default: all.
    types : dict of str to str, optional
        Arrow types of columns of JSON lines; see `gpuclassify.JsonlReader`.
    format : {"parquet", "jsonl"}
    compression : str, optional
        Default: zstd for Parquet, none for JSON lines.
    staging : str, optional
        Where files for a repository of the Hub are written first.
    part_size : int or str, optional
        Bytes, or such as "16MB". Default: automatic.
    backend : {"pandas", "cudf"}
    on_error : {"raise", "quarantine"}
    cluster : str
        A kind that `gpuclassify.get_client` knows.
    workers : int, optional
    scheduler : str, optional
        Address or scheduler file of a cluster that is running.
    cluster_options : dict, optional
        Further arguments of `gpuclassify.get_client`.
    """

    input: list[str]
    output: str | None
    classifiers: list[dict[str, Any]]
    fields: list[str] | None = None
    types: dict[str, str] | None = None
    format: str = "parquet"
    compression: str | None = None
    staging: str | None = None
    part_size: int | str | None = None
    backend: str = "pandas"
    on_error: str = "raise"
    cluster: str = "auto"
    workers: int | None = None
    scheduler: str | None = None
    cluster_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_kinds(asdict(self))
        check_choice("format", self.format, (PARQUET, JSONL))
        check_choice("on_error", self.on_error, ON_ERROR)
        check_choice("backend", self.backend, BACKENDS)
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
        needed = ("input", "classifiers") if is_plan else ("input", "output", "classifiers")
        missing = [name for name in needed if not values.get(name)]
        if missing:
            options = " ".join(_OPTIONS[name] for name in missing)
            raise ValueError(
                f"a job's {' and '.join(missing)} must be given: {options}, or in a --config FILE"
            )
        given: dict[str, Any] = {"output": None}
        given |= {name: value for name, value in values.items() if value is not None}
        given |= {name: _as_list(given[name]) for name in ("input", "fields") if name in given}
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are the default."""
        defaults = {field.name: field.default for field in fields(self)}
        return {k: v for k, v in asdict(self).items() if v is not None and v != defaults[k]}

    def pipeline(self) -> Pipeline:
        """The job itself, without a writer if there is no output.

        Raises
        ------
        TypeError, ValueError
            An argument of a classifier is unknown or wrong.
        """
        chain = as_chain([_classifier(settings) for settings in self.classifiers])
        read = self.fields
        if read is not None:
            read = [*chain.text_fields, *read]
        kind, typed = (JsonlReader, {"types": self.types}) if self.types else (FileReader, {})
        reader = kind(self.input, fields=read, part_bytes=_bytes(self.part_size), **typed)
        stages = [reader, *chain.mappers]
        if self.output is not None:
            options = {"compression": self.compression, "staging": self.staging}
            stages.append(make_writer(self.output, self.format, **options))
        return Pipeline(stages, backend=self.backend, on_error=self.on_error)


def make_writer(
    output: str, file_format: str, *, compression: str | None = None, staging: str | None = None
) -> FileWriter:
    """The writer for an output of the command line.

    Parameters
    ----------
    output : str
        Directory, fsspec URL, or ``hf://datasets/OWNER/NAME[@BRANCH][/FOLDER]``.
    file_format : {"parquet", "jsonl"}
    compression : str, optional
        Default: that of the writer.
    staging : str, optional
        Directory or URL in which the files of a dataset repository are written first.

    Raises
    ------
    ValueError
        `staging` is missing for a repository, or given for another output.
    """
    options: dict[str, Any] = {} if compression is None else {"compression": compression}
    place = hub_uri(output)
    if place is None:
        if staging is not None:
            raise ValueError(f"staging={staging!r} is for output to hf://datasets/OWNER/NAME only")
        writer = ParquetWriter if file_format == PARQUET else JsonlWriter
        return writer(output, **options)
    if place.type != "dataset":
        raise ValueError(f"{output!r} is no dataset: write to hf://datasets/OWNER/NAME")
    if staging is None:
        raise ValueError(
            f"{output} needs a directory that all workers see, where the files are written before "
            "they are uploaded, so that a lost client loses no work: staging=, --staging DIR"
        )
    return HubWriter(
        place.id,
        staging=staging,
        path=place.path_in_repo or "data",
        revision=place.revision or "main",
        file_format=file_format,
        **options,
    )


def load_settings(path: str) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises
    ------
    ValueError
        It cannot be read, is no YAML, or no mapping of the names of settings to values.
    TypeError
        A value is of another kind.
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
    """Write settings to a YAML file.

    Raises
    ------
    ValueError
        The file cannot be written.
    """
    import yaml

    content = yaml.safe_dump(settings.as_dict(), sort_keys=False, allow_unicode=True)
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as err:
        raise ValueError(
            f"the settings cannot be written to {path}: {err.strerror}. Name a file in a directory "
            "that is there"
        ) from err


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
    for name, value in values.items():
        if name not in _KINDS:
            raise ValueError(
                f"a job has no setting {name!r}.{nearest(str(name), _KINDS)} "
                f"Settings are {', '.join(_KINDS)}."
            )
        is_right, what = _KINDS[name]
        if value is not None and not is_right(value):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")
    for settings in values.get("classifiers") or []:
        if settings.get("classifier") is None:
            near = nearest("classifier", map(str, settings)) and f", but {list(settings)}"
            raise ValueError(
                f"one of the classifiers has no name{near}: begin it with classifier: and one of "
                f"{', '.join(families())}"
            )


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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, (list, tuple)) and all(map(_is_text, value)))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


def _is_named_texts(value: Any) -> bool:
    return _is_named(value) and all(map(_is_text, value.values()))


def _is_classifiers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_named, value))


# How a command is told what every job needs.
_OPTIONS = {
    "input": "INPUT...",
    "output": "OUTPUT",
    "classifiers": "--classifier FAMILY (see `gpuclassify models`)",
}
# Of each setting: whether a value is of its kind, and what is meant.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "input": (_is_texts, "a path or a list of paths, such as [books/*.jsonl]"),
    "output": (_is_text, "a directory or URL"),
    "classifiers": (_is_classifiers, "a list of settings, such as [{classifier: domain}]"),
    "fields": (_is_texts, "a list of columns' names, such as [id, url]"),
    "types": (_is_named_texts, "columns and types, such as {price: double}"),
    "format": (_is_text, "parquet or jsonl"),
    "compression": (_is_text, "a name such as zstd"),
    "staging": (_is_text, "a directory or URL"),
    "part_size": (lambda value: _is_text(value) or _is_count(value), 'bytes, or such as "16MB"'),
    "backend": (_is_text, "pandas or cudf"),
    "on_error": (_is_text, "raise or quarantine"),
    "cluster": (_is_text, "a kind of cluster, such as cpu"),
    "workers": (_is_count, "a whole number"),
    "scheduler": (_is_text, "an address such as tcp://host:8786, or a scheduler file"),
    "cluster_options": (_is_named, "names and values, such as {memory_limit: 8GB}"),
}


def _classifier(settings: Mapping[str, Any]) -> Any:
    arguments = dict(settings)
    family, known = arguments.pop("classifier"), families()
    if family not in known:
        raise ValueError(
            f"no classifier {family!r}.{nearest(str(family), known)} Known: {', '.join(known)}."
        )
    return known[family](**arguments)


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value]


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
