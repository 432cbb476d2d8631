"""NeMo Curator's names: scripts run after a change of imports; read `documents.py` first.

``from nemo_curator... import X`` becomes ``from gpuclassify.curator import X``, whichever module of
either generation `X` was in. What was written on CrossFit itself is in
`gpuclassify.curator.crossfit`: ``HFModel``, and the ``DistributedDataClassifier`` that takes one.
"""

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
from gpuclassify.curator.documents import DocumentDataset, Sequential, get_client
from gpuclassify.curator.pipeline import (
    JsonlReader,
    JsonlWriter,
    ModelStage,
    ParquetReader,
    ParquetWriter,
    Pipeline,
    RayActorPoolExecutor,
    RayDataExecutor,
    TokenizerStage,
    WorkerMetadata,
    XennaExecutor,
)
from gpuclassify.jobs.stages import ToBackend

__all__ = [
    "AegisClassifier", "ContentTypeClassifier", "DistributedDataClassifier", "DocumentDataset",
    "DomainClassifier", "FineWebEduClassifier", "FineWebMixtralEduClassifier",
    "FineWebNemotronEduClassifier", "InstructionDataGuardClassifier", "JsonlReader", "JsonlWriter",
    "ModelStage", "MultilingualDomainClassifier", "ParquetReader", "ParquetWriter", "Pipeline",
    "PromptTaskComplexityClassifier", "QualityClassifier", "RayActorPoolExecutor",
    "RayDataExecutor", "Sequential", "ToBackend", "TokenizerStage", "WorkerMetadata",
    "XennaExecutor", "get_client",
]  # fmt: skip
