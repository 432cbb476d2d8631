"""Run text classifiers over Dask DataFrames of any size, on GPUs or CPUs, in one line.

>>> from gpuclassify import DomainClassifier
>>> ddf = DomainClassifier()(ddf)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpuclassify._version import __version__ as __version__

if TYPE_CHECKING:
    from gpuclassify.classifiers import (
        AegisClassifier,
        ContentTypeClassifier,
        DistributedDataClassifier,
        DomainClassifier,
        FineWebEduClassifier,
        FineWebMixtralEduClassifier,
        FineWebNemotronEduClassifier,
        InstructionDataGuardClassifier,
        MultilingualDomainClassifier,
        PromptTaskComplexityClassifier,
        QualityClassifier,
    )
    from gpuclassify.classifiers.embedder import Embedder
    from gpuclassify.classifiers.own_model import ModelMapper
    from gpuclassify.cluster import get_client
    from gpuclassify.jobs.input.readers import FileReader, JsonlReader, ParquetReader, read_files
    from gpuclassify.jobs.output.hub_writer import HubWriter, push_to_hub
    from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter, to_parquet
    from gpuclassify.jobs.pipeline import Pipeline
    from gpuclassify.jobs.stages import ToBackend
    from gpuclassify.models.deberta import Deberta
    from gpuclassify.partition_map import classify

# Public names and where they live. They are imported on first use, so that importing the package
# costs milliseconds and loads no framework.
_HOMES = {
    "AegisClassifier": "gpuclassify.classifiers",
    "ContentTypeClassifier": "gpuclassify.classifiers",
    "Deberta": "gpuclassify.models.deberta",
    "DistributedDataClassifier": "gpuclassify.classifiers",
    "DomainClassifier": "gpuclassify.classifiers",
    "Embedder": "gpuclassify.classifiers.embedder",
    "FileReader": "gpuclassify.jobs.input.readers",
    "FineWebEduClassifier": "gpuclassify.classifiers",
    "FineWebMixtralEduClassifier": "gpuclassify.classifiers",
    "FineWebNemotronEduClassifier": "gpuclassify.classifiers",
    "HubWriter": "gpuclassify.jobs.output.hub_writer",
    "InstructionDataGuardClassifier": "gpuclassify.classifiers",
    "JsonlReader": "gpuclassify.jobs.input.readers",
    "JsonlWriter": "gpuclassify.jobs.output.writers",
    "ModelMapper": "gpuclassify.classifiers.own_model",
    "MultilingualDomainClassifier": "gpuclassify.classifiers",
    "ParquetReader": "gpuclassify.jobs.input.readers",
    "ParquetWriter": "gpuclassify.jobs.output.writers",
    "Pipeline": "gpuclassify.jobs.pipeline",
    "PromptTaskComplexityClassifier": "gpuclassify.classifiers",
    "QualityClassifier": "gpuclassify.classifiers",
    "ToBackend": "gpuclassify.jobs.stages",
    "classify": "gpuclassify.partition_map",
    "get_client": "gpuclassify.cluster",
    "push_to_hub": "gpuclassify.jobs.output.hub_writer",
    "read_files": "gpuclassify.jobs.input.readers",
    "to_parquet": "gpuclassify.jobs.output.writers",
}

__all__ = [
    "AegisClassifier",
    "ContentTypeClassifier",
    "Deberta",
    "DistributedDataClassifier",
    "DomainClassifier",
    "Embedder",
    "FileReader",
    "FineWebEduClassifier",
    "FineWebMixtralEduClassifier",
    "FineWebNemotronEduClassifier",
    "HubWriter",
    "InstructionDataGuardClassifier",
    "JsonlReader",
    "JsonlWriter",
    "ModelMapper",
    "MultilingualDomainClassifier",
    "ParquetReader",
    "ParquetWriter",
    "Pipeline",
    "PromptTaskComplexityClassifier",
    "QualityClassifier",
    "ToBackend",
    "classify",
    "get_client",
    "push_to_hub",
    "read_files",
    "to_parquet",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
