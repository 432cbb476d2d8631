"""The public names: read by type checkers and editors, and by __init__.py when it runs."""

from .classifiers import AegisClassifier as AegisClassifier
from .classifiers import ContentTypeClassifier as ContentTypeClassifier
from .classifiers import DistributedDataClassifier as DistributedDataClassifier
from .classifiers import DomainClassifier as DomainClassifier
from .classifiers import FastTextClassifier as FastTextClassifier
from .classifiers import FineWebEduClassifier as FineWebEduClassifier
from .classifiers import FineWebMixtralEduClassifier as FineWebMixtralEduClassifier
from .classifiers import FineWebNemotronEduClassifier as FineWebNemotronEduClassifier
from .classifiers import FormatClassifier as FormatClassifier
from .classifiers import InstructionDataGuardClassifier as InstructionDataGuardClassifier
from .classifiers import LanguageIdentifier as LanguageIdentifier
from .classifiers import MultilingualDomainClassifier as MultilingualDomainClassifier
from .classifiers import PromptTaskComplexityClassifier as PromptTaskComplexityClassifier
from .classifiers import QualityClassifier as QualityClassifier
from .classifiers import TopicClassifier as TopicClassifier
from .classifiers.checkpoint import ModelMapper as ModelMapper
from .classifiers.embedder import Embedder as Embedder
from .classifiers.head_classifier import HeadClassifier as HeadClassifier
from .cluster import get_client as get_client
from .dedup.exact import ExactDuplicates as ExactDuplicates
from .dedup.fuzzy import FuzzyDuplicates as FuzzyDuplicates
from .dedup.job import Deduplicate as Deduplicate
from .dedup.removal import remove_duplicates as remove_duplicates
from .dedup.semantic import SemanticDuplicates as SemanticDuplicates
from .jobs.input.readers import FileReader as FileReader
from .jobs.input.readers import JsonlReader as JsonlReader
from .jobs.input.readers import ParquetReader as ParquetReader
from .jobs.input.readers import read_files as read_files
from .jobs.output.hub_writer import HubWriter as HubWriter
from .jobs.output.writers import JsonlWriter as JsonlWriter
from .jobs.output.writers import ParquetWriter as ParquetWriter
from .jobs.output.writers import to_parquet as to_parquet
from .jobs.pipeline import Pipeline as Pipeline
from .jobs.pipeline import push_to_hub as push_to_hub
from .jobs.stages import ToBackend as ToBackend
from .mapping.chain import classify as classify
from .models.deberta import Deberta as Deberta
from .scores.buckets import ScoreBuckets as ScoreBuckets
from .scores.buckets import ScoreEdges as ScoreEdges
from .scores.buckets import add_buckets as add_buckets
from .scores.buckets import keep_top as keep_top
from .scores.buckets import score_edges as score_edges
from .scores.job import AssignBuckets as AssignBuckets
from .training.trained_head import Head as Head

__version__: str
