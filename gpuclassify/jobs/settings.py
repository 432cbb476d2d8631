"""A job's settings as plain values: of the command line, or of a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpuclassify.checks import check_choice, nearest
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.quarantine import ON_ERROR
from gpuclassify.jobs.readers import FileReader
from gpuclassify.jobs.stages import as_chain, text_fields
from gpuclassify.jobs.writers import JsonlWriter, ParquetWriter

WRITERS = {"parquet": ParquetWriter, "jsonl": JsonlWriter}


@dataclass(frozen=True)
class JobSettings:
    """What a command does.

    Attributes
    ----------
    input : list of str
        Files, directories, globs or URLs.
    output : str
        Directory or URL.
    classifiers : list of dict
        For each, ``classifier`` (its family's name) and the arguments of its constructor.
    fields : list of str, optional
        Columns to read and keep beside the text. Default: all.
    format : {"parquet", "jsonl"}
    compression : str, optional
        Default: zstd for Parquet, none for JSON lines.
    part_size : int or str, optional
        Bytes, or such as "16MB". Default: automatic.
    backend : {"pandas", "cudf"}
    on_error : {"raise", "quarantine"}
    cluster : str
        A kind that `gpuclassify.get_client` knows.
    workers : int, optional
    scheduler : str, optional
        Address or scheduler file of a cluster that is running.
    """

    input: list[str]
    output: str
    classifiers: list[dict[str, Any]]
    fields: list[str] | None = None
    format: str = "parquet"
    compression: str | None = None
    part_size: int | str | None = None
    backend: str = "pandas"
    on_error: str = "raise"
    cluster: str = "auto"
    workers: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        check_choice("format", self.format, tuple(WRITERS))
        check_choice("on_error", self.on_error, ON_ERROR)
        if not self.input or not self.classifiers:
            raise ValueError("a job needs at least one input and one classifier")
        for settings in self.classifiers:
            if "token" in settings or "hf_token" in settings:
                raise ValueError(
                    "a token is no setting of a job, whose settings are shown and kept: set "
                    "HF_TOKEN, or log in to the Hub"
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> JobSettings:
        """Settings of plain values.

        Raises
        ------
        ValueError
            A name is unknown, one that is needed is missing, or a value is out of range.
        """
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(
                    f"a job has no setting {name!r}.{nearest(str(name), names)} "
                    f"Settings are {', '.join(names)}."
                )
        missing = [name for name in ("input", "output", "classifiers") if not values.get(name)]
        if missing:
            raise ValueError(f"a job's {' and '.join(missing)} must be given")
        return cls(**{**values, "input": _as_list(values["input"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are the default."""
        defaults = {field.name: field.default for field in fields(self)}
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}

    def pipeline(self) -> Pipeline:
        """The job itself.

        Raises
        ------
        TypeError, ValueError
            An argument of a classifier is unknown or wrong.
        """
        chain = as_chain([_classifier(settings) for settings in self.classifiers])
        read = self.fields
        if read is not None:
            read = [*text_fields(chain.mappers), *read]
        reader = FileReader(self.input, fields=read, part_bytes=_bytes(self.part_size))
        options: dict[str, Any] = {}
        if self.compression is not None:
            options["compression"] = self.compression
        writer = WRITERS[self.format](self.output, **options)
        stages = [reader, *chain.mappers, writer]
        return Pipeline(stages, backend=self.backend, on_error=self.on_error)


def load_settings(path: str) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises
    ------
    ValueError
        It is no YAML, or no mapping of names to values.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as err:
        raise ValueError(f"{path} is no YAML file: {err}") from err
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, such as input: books/*.jsonl")
    return values


def dump_settings(settings: JobSettings, path: str) -> None:
    """Write settings to a YAML file."""
    import yaml

    content = yaml.safe_dump(settings.as_dict(), sort_keys=False, allow_unicode=True)
    Path(path).write_text(content, encoding="utf-8")


def families() -> dict[str, Any]:
    """Classes by the names that settings give them."""
    from gpuclassify.classifiers import FAMILIES
    from gpuclassify.embedder import Embedder

    return {**FAMILIES, "embedder": Embedder}


def _classifier(settings: Mapping[str, Any]) -> Any:
    arguments = dict(settings)
    family, known = arguments.pop("classifier", None), families()
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
        return max(1, parse_bytes(size))
    except ValueError as err:
        raise ValueError(f'part_size={size!r} is no size: pass bytes, or such as "16MB"') from err
