"""Published classifiers as declarations, and any model by its name; read `category.py` first."""

from __future__ import annotations

from gpuclassify.classifiers.category import (
    ContentTypeClassifier,
    DomainClassifier,
    FormatClassifier,
    MultilingualDomainClassifier,
    QualityClassifier,
    TopicClassifier,
)
from gpuclassify.classifiers.checkpoint import DistributedDataClassifier
from gpuclassify.classifiers.education import (
    FineWebEduClassifier,
    FineWebMixtralEduClassifier,
    FineWebNemotronEduClassifier,
)
from gpuclassify.classifiers.fasttext.classifier import FastTextClassifier, LanguageIdentifier
from gpuclassify.classifiers.prompts import PromptTaskComplexityClassifier
from gpuclassify.classifiers.questions.aegis import AegisClassifier
from gpuclassify.classifiers.questions.instruction_data_guard import InstructionDataGuardClassifier
from gpuclassify.classifiers.questions.perplexity import Perplexity
from gpuclassify.classifiers.questions.prompt_classifier import PromptClassifier
from gpuclassify.classifiers.questions.published_guards import (
    GraniteGuardianClassifier,
    LlamaGuardClassifier,
    NemotronContentSafetyClassifier,
    NemotronSafetyGuardClassifier,
    Qwen3GuardClassifier,
    Qwen3GuardResponseClassifier,
    ShieldGemmaClassifier,
    WildGuardClassifier,
)
from gpuclassify.classifiers.questions.taxonomy import PropellaClassifier, TaxonomyClassifier
from gpuclassify.classifiers.signals.signals import Signals
from gpuclassify.classifiers.spans.classifier import SpanClassifier
from gpuclassify.classifiers.spans.patterns import PatternSpans
from gpuclassify.classifiers.token_counter import TokenCounter
from gpuclassify.classifiers.zero_shot import ZeroShotClassifier
from gpuclassify.mapping.text_mapper import TextMapper

# Classes by their names on the command line.
FAMILIES: dict[str, type[TextMapper]] = {
    "domain": DomainClassifier,
    "multilingual-domain": MultilingualDomainClassifier,
    "quality": QualityClassifier,
    "content-type": ContentTypeClassifier,
    "topic": TopicClassifier,
    "format": FormatClassifier,
    "prompt-task-complexity": PromptTaskComplexityClassifier,
    "fineweb-edu": FineWebEduClassifier,
    "fineweb-mixtral-edu": FineWebMixtralEduClassifier,
    "fineweb-nemotron-edu": FineWebNemotronEduClassifier,
    "aegis": AegisClassifier,
    "instruction-data-guard": InstructionDataGuardClassifier,
    "qwen3guard": Qwen3GuardClassifier,
    "qwen3guard-response": Qwen3GuardResponseClassifier,
    "llama-guard": LlamaGuardClassifier,
    "shieldgemma": ShieldGemmaClassifier,
    "granite-guardian": GraniteGuardianClassifier,
    "nemotron-safety-guard": NemotronSafetyGuardClassifier,
    "nemotron-content-safety": NemotronContentSafetyClassifier,
    "wildguard": WildGuardClassifier,
    "taxonomy": TaxonomyClassifier,
    "propella": PropellaClassifier,
    "prompt": PromptClassifier,
    "zero-shot": ZeroShotClassifier,
    "checkpoint": DistributedDataClassifier,
    "fasttext": FastTextClassifier,
    "language": LanguageIdentifier,
    "tokens": TokenCounter,
    "perplexity": Perplexity,
    "spans": SpanClassifier,
    "patterns": PatternSpans,
    "signals": Signals,
}

__all__ = [
    "FAMILIES", "AegisClassifier", "ContentTypeClassifier", "DistributedDataClassifier",
    "DomainClassifier", "FastTextClassifier", "FineWebEduClassifier", "FineWebMixtralEduClassifier",
    "FineWebNemotronEduClassifier", "FormatClassifier", "GraniteGuardianClassifier",
    "InstructionDataGuardClassifier", "LanguageIdentifier", "LlamaGuardClassifier",
    "MultilingualDomainClassifier", "NemotronContentSafetyClassifier",
    "NemotronSafetyGuardClassifier", "PatternSpans", "Perplexity", "PromptClassifier",
    "PromptTaskComplexityClassifier", "PropellaClassifier", "QualityClassifier",
    "Qwen3GuardClassifier", "Qwen3GuardResponseClassifier", "ShieldGemmaClassifier",
    "Signals", "SpanClassifier", "TaxonomyClassifier", "TokenCounter", "TopicClassifier",
    "WildGuardClassifier", "ZeroShotClassifier",
]  # fmt: skip
