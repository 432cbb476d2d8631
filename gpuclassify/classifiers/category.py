"""Published encoder models that give each text one category, such as a topic or a quality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuclassify.mapping.label_heads import CategoryHead
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
TOPICS = (
    "Adult", "Art & Design", "Software Dev.", "Crime & Law", "Education & Jobs", "Hardware",
    "Entertainment", "Social Life", "Fashion & Beauty", "Finance & Business", "Food & Dining",
    "Games", "Health", "History", "Home & Hobbies", "Industrial", "Literature", "Politics",
    "Religion", "Science & Tech.", "Software", "Sports & Fitness", "Transportation", "Travel",
)  # fmt: skip
FORMATS = (
    "Academic Writing", "Content Listing", "Creative Writing", "Customer Support",
    "Comment Section", "FAQ", "Truncated", "Knowledge Article", "Legal Notices", "Listicle",
    "News Article", "Nonfiction Writing", "About (Org.)", "News (Org.)", "About (Pers.)",
    "Personal Blog", "Product Page", "Q&A Forum", "Spam / Ads", "Structured Data", "Documentation",
    "Audio Transcript", "Tutorial", "User Review",
)  # fmt: skip
WEB_PAGE = "{url}\n\n{text}"  # the model cards' input format


class CategoryClassifier(TextMapper[ClassifierOptions]):
    """Base class of published classifiers that give each text one of several categories."""

    Options = ClassifierOptions
    head_type = CategoryHead
    family = "category"

    if TYPE_CHECKING:

        @takes(ClassifierOptions)
        def __init__(self, **settings: object) -> None: ...


class DomainClassifier(CategoryClassifier):
    """Classifier of English text into 26 domains, such as ``Finance`` or ``Sports``.

    Reads at most 2,000 characters and 512 tokens of the column ``text``,
    unless settings say otherwise. Writes the most probable domain to
    ``domain_pred``.

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
    """Classifier of text in 52 languages into 26 subject domains, such as ``Sports``.

    Reads at most 2,000 characters and 512 tokens of the column ``text``,
    unless settings say otherwise. Writes the most probable domain to
    ``multilingual_domain_pred``.
    """

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
    """Classifier of the quality of English text: ``High``, ``Medium`` or ``Low``.

    Reads at most 6,000 characters and 1,024 tokens of the column ``text``,
    unless settings say otherwise. Writes the most probable quality to
    ``quality_pred``.
    """

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
    """Classifier of English text into 11 speech types, such as ``News`` or ``Blogs``.

    Reads at most 6,000 characters and 1,024 tokens of the column ``text``,
    unless settings say otherwise. Writes the most probable type to
    ``content_pred``.
    """

    purpose = "speech type of English text, 11 labels"
    licence = "NVIDIA Open Model License"
    published_labels = CONTENT_TYPES
    defaults = {
        "model": "nvidia/content-type-classifier-deberta",
        "label_field": "content_pred",
        "max_chars": 6000,
        "max_seq_length": 1024,
    }


class TopicClassifier(CategoryClassifier):
    """Classifier of English web pages into 24 topics, such as ``Games`` or ``Health``.

    Reads the columns ``url`` and ``text``, and writes ``topic_pred``. For texts
    without an address pass ``model="WebOrganizer/TopicClassifier-NoURL"`` with
    ``text_template=None``. Rows get the labels in the model's ``config.json``, or
    in `labels`. Without `labels`, the class warns if ``config.json`` and the
    model's card, whose labels are in `published_labels`, differ; with ``strict``,
    it raises CheckpointError.

    Examples
    --------
    >>> ddf = TopicClassifier()(ddf)  # doctest: +SKIP
    """

    purpose = "topic of English web pages, 24 labels"
    licence = "none stated; that of its base model is Apache-2.0"
    cite = "arXiv:2502.10341"
    published_labels = TOPICS
    defaults = {
        "model": "WebOrganizer/TopicClassifier",
        "label_field": "topic_pred",
        "text_template": WEB_PAGE,
    }


class FormatClassifier(CategoryClassifier):
    """Classifier of English web pages into 24 formats, such as ``Tutorial`` or ``Spam / Ads``.

    Reads the columns ``url`` and ``text``, and writes ``format_pred``. For texts
    without an address pass ``model="WebOrganizer/FormatClassifier-NoURL"`` with
    ``text_template=None``. Rows get the labels in the model's ``config.json``, or
    in `labels`. Without `labels`, the class warns if ``config.json`` and the
    model's card, whose labels are in `published_labels`, differ; with ``strict``,
    it raises CheckpointError.
    """

    purpose = "format of English web pages, 24 labels"
    licence = TopicClassifier.licence
    cite = TopicClassifier.cite
    published_labels = FORMATS
    defaults = {
        "model": "WebOrganizer/FormatClassifier",
        "label_field": "format_pred",
        "text_template": WEB_PAGE,
    }
