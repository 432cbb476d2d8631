"""Classifiers of web pages by several fields at once: Essential AI's taxonomy, and propella."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gpuclassify.classifiers.questions.answers import Free, Several
from gpuclassify.classifiers.questions.prompt_classifier import ChoiceRunner, PromptClassifier
from gpuclassify.frames import Texts
from gpuclassify.mapping.runners import Outputs
from gpuclassify.mapping.token_lengths import TokenLengths
from gpuclassify.workers.run_context import RunStats

WHOLE_CHARS = 30_000  # longer texts are read in three parts
PART_CHARS = WHOLE_CHARS // 3
# Code of the first label, and all labels, by field in the order of the answer's lines.
TAXONOMY: dict[str, tuple[int, tuple[str, ...]]] = {
    "bloom_cognitive_process": (
        1, ("Remember", "Understand", "Apply", "Analyze", "Evaluate", "Create"),
    ),
    "bloom_knowledge_domain": (1, ("Factual", "Conceptual", "Procedural", "Metacognitive")),
    "document_type_v1": (1, (
        "News/Editorial", "Academic/Research", "Reference/Encyclopedic/Educational",
        "Code/Software", "Social/Forum", "Promotional/Advertisement",
        "Search/Directory/Bibliography", "Adult/Pornographic", "Personal/Misc",
        "Machine-Generated", "Legal/Regulatory", "Government/Political", "Literary/Creative",
        "Reviews/Critiques", "E-Commerce/Marketplace", "Images/Videos/Audio",
        "Other/Unclassified",
    )),
    "extraction_artifacts": (0, (
        "No Artifacts", "Leftover HTML", "Text Extraction Errors", "Irrelevant Content",
        "Indeterminate",
    )),
    "missing_content": (0, (
        "No Missing Content", "Truncated Snippets", "Click Here References", "Incoherent Flow",
        "Missing Images or Figures", "Missing Referenced Data", "Indeterminate",
    )),
    "document_type_v2": (1, (
        "About (Org.)", "About (Personal)", "Academic Writing", "Audio Transcript",
        "Comment Section", "Content Listing", "Creative Writing", "Documentation", "FAQ",
        "Knowledge Article", "Legal Notices", "Listicle", "News (Org.)", "News Article",
        "Nonfiction Writing", "Personal Blog", "Product Page", "Q&A Forum", "Spam / Ads",
        "Structured Data", "Customer Support", "Truncated", "Tutorial", "User Review",
        "Other/Unclassified",
    )),
    "reasoning_depth": (1, (
        "No Reasoning", "Basic Reasoning", "Intermediate Reasoning", "Advanced Reasoning",
        "Exceptional Reasoning", "Indeterminate",
    )),
    "technical_correctness": (1, (
        "Technically Flawed", "Partially Correct", "Mostly Correct", "Highly Correct",
        "Exceptionally Correct", "Not Applicable/Indeterminate",
    )),
    "education_level": (1, (
        "General Audience", "High School Level", "Undergraduate Level", "Graduate/Expert Level",
        "Indeterminate",
    )),
}  # fmt: skip


def _answer_fields() -> dict[str, Any]:
    # Subjects are decimals of any length, and cannot be listed.
    fields: dict[str, Any] = {
        "eai_fdc": Free(max_tokens=16, stop=","),
        "eai_fdc_secondary": Free(max_tokens=16),
    }
    for name, (first, labels) in TAXONOMY.items():
        codes = {label: str(code) for code, label in enumerate(labels, first)}
        fields[f"eai_{name}"] = codes | {"Abstain": "-1"}
        fields[f"eai_{name}_secondary"] = codes | {"Abstain": ("skip", "-1")}
    return fields


def shortened(text: str) -> str:
    """Return a text unchanged, or three of its parts, joined, if it has over 30,000 characters.

    The parts have 10,000 characters each: the beginning, a part between the other two, and the end.
    Each is below a line such as "[middle]". The authors select the middle part at random in every
    run. Here the text's SHA-256 selects it, so that a text always has the same labels.
    """
    if len(text) <= WHOLE_CHARS:
        return text
    offsets = len(text) - WHOLE_CHARS + 1
    digest = hashlib.sha256(text.encode()).digest()
    middle = PART_CHARS + int.from_bytes(digest, "big") % offsets
    parts = text[:PART_CHARS], text[middle : middle + PART_CHARS], text[-PART_CHARS:]
    return "[beginning]\n{}\n[middle]\n{}\n[end]\n{}".format(*parts)


class ExcerptRunner(ChoiceRunner):
    """Base class of runners that ask about excerpts of a long text in the column `text_field`."""

    most_chars: int  # characters of a document in its excerpts; a shorter one is whole

    @abstractmethod
    def excerpts(self, document: str) -> str:
        """Return the document unchanged, or its excerpts if it has over `most_chars` characters."""

    def columns_of(self, text: str) -> tuple[str, ...]:
        """Return the texts of a row's prompt columns; of a long document, its joined excerpts."""
        columns = [*super().columns_of(text)]
        columns[self._main] = self.excerpts(columns[self._main])
        return tuple(columns)

    @property
    def _main(self) -> int:
        columns: tuple[str, ...] = self.model.checkpoint.prompts[0].columns
        return columns.index(self.options.text_field)

    def _kept_shares(self, texts: list[str]) -> np.ndarray:
        """Return the share of each document's characters in its excerpts, float32 (texts,)."""
        documents = [super(ExcerptRunner, self).columns_of(text)[self._main] for text in texts]
        chars = np.array([len(document) for document in documents])
        return (self.most_chars / np.maximum(chars, self.most_chars)).astype(np.float32)

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Ask the decoder about each distinct text; text outside of excerpts counts as not read."""
        outputs = super().run(texts, stats, name_text)
        return replace(outputs, seen_share=outputs.seen_share * self._kept_shares(texts))

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Count tokens of the prompts that are run, and of each prompt with the whole document."""
        lengths = super().token_lengths(texts)
        whole = ChoiceRunner(self.options, self.model, None).token_lengths(texts).whole
        # Excerpts have marks, but a cut document must count as longer than its excerpts.
        least = lengths.whole + (self._kept_shares(texts) < 1)
        return replace(lengths, whole=np.maximum(whole, least))


class TaxonomyRunner(ExcerptRunner):
    """Runner that asks about three parts of a document if it has over 30,000 characters."""

    most_chars = WHOLE_CHARS

    def excerpts(self, document: str) -> str:
        """Return the document, or three of its parts if it is long; see `shortened`."""
        return shortened(document)


class TaxonomyClassifier(PromptClassifier):
    """Classifier of English web pages by ten fields, as in Essential-Web v1.0.

    Every field below has a column with the prefix ``eai_``, and another one
    with the suffix ``_secondary`` for a second label. Labels may also be
    ``Abstain``, as most second labels are. Agreement is the published kappa
    with GPT-4o and Claude 3.5 Sonnet, for random and for scientific pages:

    ===========================  ======  ======  =======
    field                        labels  random  science
    ===========================  ======  ======  =======
    ``fdc``, first digit             10    0.88     0.93
    ``fdc``, two digits             100    0.81     0.80
    ``fdc``, three digits         1,000    0.63     0.61
    ``bloom_cognitive_process``       6    0.70     0.76
    ``bloom_knowledge_domain``        4    0.63     0.65
    ``document_type_v1``             17    0.83     0.86
    ``extraction_artifacts``          5    0.27     0.37
    ``missing_content``               7    0.48     0.57
    ``document_type_v2``             25    0.88     0.86
    ``reasoning_depth``               6    0.87     0.76
    ``technical_correctness``         6    0.72     0.75
    ``education_level``               5    0.79     0.86
    ===========================  ======  ======  =======

    ``fdc`` is the subject, a number of the Free Decimal Correspondence as
    written by the model, such as ``513.212``: 5 is science and 51 mathematics.
    The first digit of programming, ``005``, is 0. In place of ``Abstain``,
    ``skip`` means no second subject, and ``-1`` no subject.

    If a text has over 30,000 characters, the model reads the first 10,000, the
    last 10,000, and 10,000 between them; see `shortened`. `seen_field` is the
    parts' share of its characters, times the share of their tokens read.

    Examples
    --------
    >>> classifier = TaxonomyClassifier(confidences=True)
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    purpose = "subject, kind, quality and difficulty of English web pages, ten fields"
    licence = "Apache-2.0"
    is_gated = False
    runner_type = TaxonomyRunner
    defaults = {
        "model": "EssentialAI/eai-distill-0.5b",
        "system": "taxonomy",
        "prompt": "{text}",
        "answer": "\n".join(
            f"{{eai_{name}}},{{eai_{name}_secondary}}" for name in ("fdc", *TAXONOMY)
        ),
        "fields": _answer_fields(),
        "max_seq_length": 16_384,
    }


PROPELLA_MOST_CHARS = 50_000  # the authors cut documents here, and mark the cut
# Labels by field, in the order of the answer. Names that end with [] have lists of labels.
PROPELLA: dict[str, tuple[str, ...]] = {
    "content_integrity": ("complete", "mostly_complete", "fragment", "severely_degraded"),
    "content_ratio": (
        "complete_content", "mostly_content", "mixed_content", "mostly_navigation",
        "minimal_content",
    ),
    "content_length": ("substantial", "moderate", "brief", "minimal"),
    "one_sentence_description": (),
    "content_type[]": (
        "analytical", "instructional", "reference", "procedural", "qa_structured",
        "conversational", "creative", "transactional", "boilerplate", "news_report",
        "opinion_editorial", "review_critique", "technical_documentation",
        "specification_standard", "legal_document", "press_release", "structured_data",
        "source_code",
    ),
    "business_sector[]": (
        "academic_research", "education_sector", "technology_software", "hardware_electronics",
        "healthcare_medical", "pharmaceutical_biotech", "financial_services", "legal_services",
        "government_public", "manufacturing_industrial", "mining_resources",
        "chemicals_materials", "energy_utilities", "retail_commerce", "wholesale_distribution",
        "real_estate_construction", "transportation_logistics", "automotive_industry",
        "telecommunications", "media_entertainment", "advertising_marketing",
        "hospitality_tourism", "agriculture_food", "environmental_services", "aerospace_defense",
        "insurance_industry", "nonprofit_ngo", "consulting_professional", "human_resources",
        "security_cyber", "gaming_industry", "gambling_betting", "travel_aviation",
        "food_beverage_hospitality", "consumer_goods", "general_interest", "other",
    ),
    "technical_content[]": (
        "code_heavy", "math_heavy", "scientific", "data_heavy", "engineering", "basic_technical",
        "non_technical",
    ),
    "information_density": ("dense", "adequate", "moderate", "thin", "empty"),
    "content_quality": ("excellent", "good", "adequate", "poor", "unacceptable"),
    "audience_level": ("expert", "advanced", "general", "beginner", "youth", "children"),
    "commercial_bias": ("none", "minimal", "moderate", "heavy", "pure_marketing"),
    "time_sensitivity": (
        "evergreen", "slowly_changing", "regularly_updating", "time_sensitive",
    ),
    "content_safety": ("safe", "mild_concerns", "nsfw", "harmful", "illegal"),
    "educational_value": ("high", "moderate", "basic", "minimal", "none"),
    "reasoning_indicators": ("analytical", "explanatory", "basic_reasoning", "minimal", "none"),
    "pii_presence": ("no_pii", "contains_pii"),
    "regional_relevance[]": (
        "european", "north_american", "east_asian", "south_asian", "southeast_asian",
        "middle_eastern", "sub_saharan_african", "latin_american", "oceanian", "central_asian",
        "russian_sphere", "global", "culturally_neutral", "indeterminate",
    ),
    "country_relevance[]": (),
}  # fmt: skip
# The system message of the model's training, which lists fields in another order than the answer.
# Where it explains labels, the text in parentheses is not the list of labels.
_PROPELLA_FIELDS = {
    "content_integrity": "technical completeness",
    "content_ratio": "content vs navigation/boilerplate ratio",
    "content_length": "substantive words (substantial 2k+|moderate 500-2k|brief 100-500|"
    "minimal <100)",
    "one_sentence_description": "neutral ~10 word summary in English",
    "content_type[]": "functional purpose",
    "business_sector[]": "industry domain",
    "technical_content[]": "specialized knowledge",
    "content_quality": "writing/presentation quality",
    "information_density": "signal vs padding",
    "educational_value": "teaching potential",
    "reasoning_indicators": "logical analysis depth",
    "audience_level": "assumed background",
    "commercial_bias": "promotional influence",
    "time_sensitivity": "temporal decay",
    "content_safety": "harmful content",
    "pii_presence": "private individual data",
    "regional_relevance[]": "geographic/cultural context",
    "country_relevance[]": "specific countries as ISO names, or supranational|none",
}


def _propella_system() -> str:
    lines = [
        "Annotate the document. Any language; assess quality within its linguistic norms. Return "
        "only a JSON object. Do not include markdown, code fences, or explanatory text."
    ]
    for name, meaning in _PROPELLA_FIELDS.items():
        labels = "|".join(PROPELLA[name]) if name != "content_length" else ""
        lines.append(f"{name}: {meaning}" + (f" ({labels})" if labels else ""))
    return "\n".join(lines) + "\n"


def _propella_answers() -> dict[str, str]:
    """Return the JSON answer's parts, such as ``"key":["{propella_key}"]``, by output column."""
    answers = {}
    for name in PROPELLA:
        key, is_list = name.removesuffix("[]"), name.endswith("[]")
        value = f'"{{propella_{key}}}"'
        answers[f"propella_{key}"] = f'"{key}":' + (f"[{value}]" if is_list else value)
    return answers


def _propella_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for column, (name, labels) in zip(_propella_answers(), PROPELLA.items(), strict=True):
        if name.endswith("[]"):
            free = Free(96, stop='"]', separator='","', is_json=True)
            fields[column] = Several(labels, separator='","') if labels else free
        else:
            fields[column] = labels or Free(96, stop='","', is_json=True)
    return fields


class PropellaRunner(ExcerptRunner):
    """Runner that asks about the first 50,000 characters of a document, with a mark at the cut."""

    most_chars = PROPELLA_MOST_CHARS

    def excerpts(self, document: str) -> str:
        """Return the document, or its beginning and a line ``<truncated_content>`` if it is cut."""
        if len(document) <= self.most_chars:
            return document
        return f"{document[: self.most_chars]}\n<truncated_content>"


class PropellaClassifier(PromptClassifier):
    """Classifier of documents in any language by the 18 fields of propella-1.

    Every field has a column with the prefix ``propella_``: a label; a list of
    labels for ``content_type``, ``business_sector``, ``technical_content`` and
    ``regional_relevance``; a list of names of countries, or of
    ``supranational`` or ``none``, for ``country_relevance``; and a short
    English summary for ``one_sentence_description``. Lists of labels have at
    least one item, because the labels include one for none, such as
    ``non_technical``.

    A document is cut after 50,000 characters, and the cut is marked for the
    model, as in the authors' code. Such a document counts as truncated:
    `seen_field` has the share of its characters before the cut, times the share
    of their tokens that the model reads. `max_chars` cuts a document before, and
    leaves no mark.

    Parameters
    ----------
    model : str
        "ellamind/propella-1-1.7b" and "ellamind/propella-1-4b" are larger.

    Examples
    --------
    >>> classifier = PropellaClassifier(confidences=True)
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    purpose = "18 properties of documents in any language, from quality to countries"
    licence = "Apache-2.0"
    cite = "arXiv:2602.12414"
    is_gated = False
    published_labels = PROPELLA["content_integrity"]
    runner_type = PropellaRunner
    defaults = {
        "model": "ellamind/propella-1-0.6b",
        "system": _propella_system(),
        "prompt": "<start_of_document>\n{text}\n<end_of_document>\n",
        "answer": "{{" + ",".join(_propella_answers().values()) + "}}",
        "fields": _propella_fields(),
        "max_seq_length": 32_768,
    }
