"""Examples of mappers that find spans."""

from gpuclassify import PatternSpans, SpanClassifier
from tests.examples import known_options


def spans(token_classifier, **options):
    return SpanClassifier(model=token_classifier(), **with_columns(SpanClassifier, options))


def patterns(**options):
    return PatternSpans(**with_columns(PatternSpans, options))


def with_columns(kind, options):
    """Add optional columns; redacted texts only without `max_chars`, which keeps the rest."""
    redact = {} if "max_chars" in options else {"redact": "[{label}]"}
    return known_options(kind, {"count_field": "n", "share_field": "share", **options, **redact})


EXAMPLES = {"spans": spans, "patterns": patterns}
