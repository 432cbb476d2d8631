"""WebOrganizer's classifiers of web pages, which read a page's address before its text."""

from __future__ import annotations

from gpuclassify.classifiers.category import CategoryClassifier

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
# As the model cards have it.
_DEFAULTS = {"text_template": "{url}\n\n{text}"}


class TopicClassifier(CategoryClassifier):
    """Gives an English web page one of 24 topics, such as ``Games`` or ``Health``.

    Reads the columns ``url`` and ``text``. For texts without an address there is
    ``model="WebOrganizer/TopicClassifier-NoURL"`` with ``text_template=None``. Labels are spelt as
    on the model's card; its ``config.json`` decides.

    Examples
    --------
    >>> ddf = TopicClassifier()(ddf)  # doctest: +SKIP
    """

    purpose = "topic of English web pages, 24 labels"
    licence = "none stated; that of its base model is Apache-2.0"
    published_labels = TOPICS
    defaults = {
        "model": "WebOrganizer/TopicClassifier",
        "label_field": "topic_pred",
        **_DEFAULTS,
    }


class FormatClassifier(CategoryClassifier):
    """Gives an English web page one of 24 formats, such as ``Tutorial`` or ``Spam / Ads``.

    Reads the columns ``url`` and ``text``. For texts without an address there is
    ``model="WebOrganizer/FormatClassifier-NoURL"`` with ``text_template=None``. Labels are spelt as
    on the model's card; its ``config.json`` decides.
    """

    purpose = "format of English web pages, 24 labels"
    licence = TopicClassifier.licence
    published_labels = FORMATS
    defaults = {
        "model": "WebOrganizer/FormatClassifier",
        "label_field": "format_pred",
        **_DEFAULTS,
    }
