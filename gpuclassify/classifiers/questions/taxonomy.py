"""Classifier for Essential AI's taxonomy: subject, type, quality and difficulty of web pages."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from gpuclassify.classifiers.questions.answers import Free
from gpuclassify.classifiers.questions.prompt_classifier import PromptClassifier

if TYPE_CHECKING:
    from gpuclassify.frames import Frame

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
    """Return a text, or three excerpts of 10,000 characters if it has over 30,000 characters.

    They are the beginning, a part of the middle, and the end, each below a line such as "[middle]".
    The authors select the middle part at random in every run. Here the text's SHA-256 selects it,
    so that a text always has the same labels.
    """
    if len(text) <= WHOLE_CHARS:
        return text
    offsets = len(text) - WHOLE_CHARS + 1
    digest = hashlib.sha256(text.encode()).digest()
    middle = PART_CHARS + int.from_bytes(digest, "big") % offsets
    parts = text[:PART_CHARS], text[middle : middle + PART_CHARS], text[-PART_CHARS:]
    return "[beginning]\n{}\n[middle]\n{}\n[end]\n{}".format(*parts)


class TaxonomyClassifier(PromptClassifier):
    """Classifier of English web pages by ten fields, as in Essential-Web v1.0.

    Every field below has a column with the prefix ``eai_``, and one with the suffix ``_secondary``
    for a second label, ``Abstain`` for most pages. Agreement is the published kappa with GPT-4o and
    Claude 3.5 Sonnet, for random and for scientific pages:

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

    ``fdc`` is the subject, a number of the Free Decimal Correspondence as written by the model,
    such as ``513.212``: 5 is science and 51 mathematics. The first digit of programming, ``005``,
    is 0. ``skip`` means no second subject, and ``-1`` no subject.

    If a text has over 30,000 characters, the model reads the first 10,000, the last 10,000, and
    10,000 between them; see `shortened`.

    Examples
    --------
    >>> classifier = TaxonomyClassifier(confidences=True)
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    purpose = "subject, kind, quality and difficulty of English web pages, ten fields"
    licence = "Apache-2.0"
    is_gated = False
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

    def list_texts(self, frame: Frame, max_chars: int | None) -> list[str | None]:
        """Return each row's text, or excerpts if it has over 30,000 characters; None for null.

        The excerpts are the first and the last 10,000 characters, and 10,000 between them.
        """
        texts = super().list_texts(frame, max_chars)
        return [None if text is None else shortened(text) for text in texts]
