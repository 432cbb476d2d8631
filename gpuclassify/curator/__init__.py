"""NeMo Curator's names, for published scripts and similar ones; read `documents.py` first.

``from nemo_curator... import X`` becomes ``from gpuclassify.curator import X``, for all modules of
both generations. Classes of CrossFit are in `gpuclassify.curator.crossfit`: ``HFModel``, and the
``DistributedDataClassifier`` that takes one.
"""

from gpuclassify._version import __version__
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
from gpuclassify.curator.deduplication import (
    ExactDuplicates,
    FuzzyDuplicates,
    FuzzyDuplicatesConfig,
    SemDedup,
    SemDedupConfig,
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
from gpuclassify.curator.scripts import ArgumentHelper, RayClient, get_all_file_paths_under
from gpuclassify.jobs.stages import ToBackend

__all__ = [
    "AegisClassifier", "ArgumentHelper", "ContentTypeClassifier", "DistributedDataClassifier",
    "DocumentDataset", "DomainClassifier", "ExactDuplicates", "FineWebEduClassifier",
    "FineWebMixtralEduClassifier", "FineWebNemotronEduClassifier", "FuzzyDuplicates",
    "FuzzyDuplicatesConfig", "InstructionDataGuardClassifier", "JsonlReader", "JsonlWriter",
    "ModelStage", "MultilingualDomainClassifier", "ParquetReader", "ParquetWriter", "Pipeline",
    "PromptTaskComplexityClassifier", "QualityClassifier", "RayActorPoolExecutor", "RayClient",
    "RayDataExecutor", "SemDedup", "SemDedupConfig", "Sequential", "ToBackend", "TokenizerStage",
    "WorkerMetadata", "XennaExecutor", "__version__", "get_all_file_paths_under", "get_client",
]  # fmt: skip
