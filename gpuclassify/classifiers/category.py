"""The published category classifiers: DeBERTa backbones with one linear head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuclassify.mapping.heads import CategoryHead
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.options import ClassifierOptions
from gpuclassify.settings.signatures import takes

DOMAINS = (
    "Adult", "Arts_and_Entertainment", "Autos_and_Vehicles", "Beauty_and_Fitness",
    "Books_and_Literature", "Business_and_Industrial", "Computers_and_Electronics", "Finance",
    "Food_and_Drink", "Games", "Health", "Hobbies_and_Leisure", "Home_and_Garden",
    "Internet_and_Telecom", "Jobs_and_Education", "Law_and_Government", "News",
    "Online_Communities", "People_and_Society", "Pets_and_Animals", "Real_Estate", "Science",
    "Sensitive_Subjects", "Shopping", "Sports", "Travel_and_Transportation",
)  # fmt: skip
CONTENT_TYPES = (
    "Product/Company/Organization/Personal Websites", "Explanatory Articles", "News", "Blogs",
    "MISC", "Boilerplate Content", "Analytical Exposition", "Online Comments", "Reviews",
    "Books and Literature", "Conversational",
)  # fmt: skip


class CategoryClassifier(TextMapper):
    """What the published category classifiers share."""

    Options = ClassifierOptions
    head_type = CategoryHead
    family = "category"

    if TYPE_CHECKING:

        @takes(ClassifierOptions)
        def __init__(self, **settings: Any) -> None: ...


class DomainClassifier(CategoryClassifier):
    """Gives English text one of 26 domains, such as ``Finance`` or ``Sports``.

    Examples
    --------
    >>> classifier = DomainClassifier(filter_by=["Games", "Sports"])
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    purpose = "subject domain of English text, 26 labels"
    licence = "Apache-2.0"
    published_labels = DOMAINS
    defaults = {
        "model": "nvidia/domain-classifier",
        "label_field": "domain_pred",
        "max_chars": 2000,
        "max_seq_length": 512,
    }


class MultilingualDomainClassifier(CategoryClassifier):
    """Gives text in 52 languages one of 26 subject domains."""

    purpose = "subject domain of text in 52 languages, 26 labels"
    licence = "NVIDIA Open Model License"
    published_labels = DOMAINS
    defaults = {
        "model": "nvidia/multilingual-domain-classifier",
        "label_field": "multilingual_domain_pred",
        "max_chars": 2000,
        "max_seq_length": 512,
    }


class QualityClassifier(CategoryClassifier):
    """Judges the quality of English text: ``High``, ``Medium`` or ``Low``."""

    purpose = "quality of English text: High, Medium, Low"
    licence = "Apache-2.0"
    published_labels = ("High", "Medium", "Low")
    defaults = {
        "model": "nvidia/quality-classifier-deberta",
        "label_field": "quality_pred",
        "max_chars": 6000,
        "max_seq_length": 1024,
    }


class ContentTypeClassifier(CategoryClassifier):
    """Gives English text one of 11 speech types, such as ``News`` or ``Blogs``."""

    purpose = "speech type of English text, 11 labels"
    licence = "NVIDIA Open Model License"
    published_labels = CONTENT_TYPES
    defaults = {
        "model": "nvidia/content-type-classifier-deberta",
        "label_field": "content_pred",
        "max_chars": 6000,
        "max_seq_length": 1024,
    }
