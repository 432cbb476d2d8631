"""Spans by rules against the regular expressions of datatrove."""

import importlib.util
import ipaddress
import itertools
import random
import re
import time
from itertools import pairwise

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from gpuclassify import PatternSpans, merge_spans
from gpuclassify.classifiers.spans.patterns import find_emails, find_ips
from gpuclassify.classifiers.spans.spans import Spans

# Of the PIIFormatter of datatrove 0.10.1. The package's own are used where it is installed.
ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
BYTE = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
PART = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
LITERAL = rf"\[(?:{BYTE}\.){{3}}(?:{BYTE}|[A-Za-z0-9-]*[A-Za-z0-9]:)]"
EMAIL = re.compile(rf"\b{ATOM}(?:\.{ATOM})*@(?:(?:{PART}\.)+{PART}|{LITERAL})")
IP = re.compile(rf"(?:{BYTE}\.){{3}}{BYTE}")
if importlib.util.find_spec("datatrove"):
    from datatrove.pipeline.formatters.pii import PIIFormatter

    EMAIL, IP = PIIFormatter().emails_replacer.regex, PIIFormatter().ip_replacer.regex
PIECES = [
    *"abzAZ09.@-+_'éÉ \n[]:,/!",
    *("..", "@@", "a@b.co", "joe.x@", "1.2.3.4", "8.8.8.8", "256.1.", "010.", "[8.8.8.8]", "x-.y"),
    *("@[1.2.3.a:]", "@[1.2.3.B:]", "10.0.0.1", "ﬁ", "🙂", "--", "b.c.d"),
    *("Ada.Lovelace@Example.org", "A@B.CO", "@Mail.", "K", "ſ", "İ"),  # Kelvin, long s, dotted I
]
# Addresses with what may come before and after them.
BEFORE = ["", " ", "<", "mailto:", "é", "É", "中", "_", "-", ".", "x@y.zz", "\u200b"]
LOCALS = ["ada", "Ada.Lovelace", "ADA+list", "a_b-C", ".ada", "a..b", "+ada", "O'N", "ad\u00e4"]
DOMAINS = ["Example.org", "mail.EXAMPLE.co.uk", "x-Y.io", "-x.io", "x-.io", "Ex\u00e4m.de",
           "127.0.0.1", "1.2.3.400", "[8.8.8.8]", "[8.8.8.X:]", "a.b.", "a..b", "K.io"]  # fmt: skip
AFTER = ["", ".", "...", "-", ">", "É", "_", "@", "M", "/x", "\n"]
MADE = random.Random(0)
TEXTS = ["".join(MADE.choices(PIECES, k=MADE.randint(1, 25))) for _ in range(20_000)]
TEXTS += [
    f"{before}{local}@{domain}{after}"
    for before, local, domain, after in itertools.product(BEFORE, LOCALS, DOMAINS, AFTER)
]


def is_public(address):
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def published_emails(text):
    """What the expression finds in a text, where an address may begin at the end of another."""
    found, reached = [], 0
    while match := EMAIL.match(text[reached:]) or EMAIL.search(text, reached):
        start = reached if match.string != text else match.start()
        reached = start + len(match[0])
        found.append((start, reached))
    return found


def test_rules_find_what_the_published_expressions_find():
    emails = list(map(published_emails, TEXTS))
    assert sum(map(len, emails)) > 20_000
    assert [list(find_emails(text)) for text in TEXTS] == emails
    addresses = [[m.span() for m in IP.finditer(text) if is_public(m[0])] for text in TEXTS]
    assert sum(map(len, addresses)) > 500
    assert [list(find_ips(text)) for text in TEXTS] == addresses


def test_redacting_equals_datatrove_unless_addresses_touch():
    redacted = PatternSpans(["email"], redact="\0")(pd.DataFrame({"text": TEXTS}))["redacted"]
    apart = [(text, ours) for text, ours in zip(TEXTS, redacted, strict=True) if "\0\0" not in ours]
    assert len(TEXTS) > len(apart) > 0.9 * len(TEXTS)
    assert [ours for _, ours in apart] == [EMAIL.sub("\0", text) for text, _ in apart]


@pytest.mark.parametrize(
    "piece",
    [
        "a!",
        "a@",
        "a.",
        "a-.",
        "@a.",
        "a@b-",
        "1.",
        "8.8.8.8 a@b.co ",
        "x@[1.2.3.a",
        "..a",
        "A",
        "A@B.c.",
    ],
)
def test_time_grows_with_the_text(piece):
    def seconds(count):
        texts = [piece * count]
        started = time.process_time()
        PatternSpans()(texts)
        return time.process_time() - started

    seconds(10)
    assert min(seconds(200_000) for _ in range(2)) < 2 + 15 * seconds(20_000)


def test_an_ip_within_an_address_counts_once_and_columns_are_those_of_models():
    frame = pd.DataFrame({"text": ["joe@8.8.8.8.example.com 9.9.9.9", "none", None, ""]})
    mapper = PatternSpans(redact="[{label}]", count_field="n", share_field="share")
    found = mapper(frame)
    assert [[s["label"] for s in row] for row in found["pattern_spans"].dropna()] == [
        ["email", "ip"],
        [],
        [],
    ]
    assert found["redacted"].tolist()[:2] == ["[email] [ip]", "none"]
    assert found["n"].tolist() == [2, 0, pd.NA, 0]
    assert found["share"].tolist()[:2] == [np.float32(30 / 31), 0]
    again = mapper(found[["text"]].assign(text=found["redacted"]))
    assert again["redacted"].equals(found["redacted"])


def test_redacting_a_second_time_changes_nothing():
    mapper = PatternSpans(redact="[{label}]")
    once = mapper(pd.DataFrame({"text": TEXTS}))
    twice = mapper(pd.DataFrame({"text": once["redacted"]}))
    assert twice["redacted"].tolist() == once["redacted"].tolist()
    assert not any(map(len, twice["pattern_spans"]))


def test_a_pattern_that_is_not_known_and_settings_of_models_are_refused():
    with pytest.raises(
        ValueError, match=r"'e-mail' is not one of 'email', 'ip'.*Did you mean 'email'"
    ):
        PatternSpans(["e-mail"])
    with pytest.raises(TypeError, match="has no argument 'model'"):
        PatternSpans(model="a/b")
    with pytest.raises(TypeError, match="got a dataset"):
        PatternSpans(pd.DataFrame({"text": ["a"]}))
    with pytest.raises(ValueError, match="redacted_field='r' needs what replaces a span"):
        PatternSpans(redacted_field="r")
    with pytest.raises(ValueError, match=r"names \{name\}, and templates know \{label\} alone"):
        PatternSpans(redact="[{name}]")
    with pytest.raises(TypeError, match="redact=3 is a int"):
        PatternSpans(redact=3)
    with pytest.raises(TypeError, match="redact= gave a NoneType for 'ip'"):
        PatternSpans(redact=lambda text, label: None)(["8.8.8.8"])
    with pytest.raises(ValueError, match="max_chars=5 would leave"):
        PatternSpans(redact="x", max_chars=5)
    with pytest.raises(ValueError, match="no label 'url' in PatternSpans"):
        PatternSpans(labels=["url"])(["a"])


def test_a_chain_of_rules_and_model_is_one_pass_whose_spans_merge(token_classifier):
    from gpuclassify import SpanClassifier, classify

    texts = ["write to joe@example.com in Paris", None, "8.8.8.8 answers", "nothing at all"]
    ddf = dd.from_pandas(pd.DataFrame({"text": texts}), npartitions=2)
    model = SpanClassifier(model=token_classifier(), autocast=False)
    merged = merge_spans(["pattern_spans", "spans"], redact="<{label}>", redacted_field="clean")
    chained = classify(ddf, [PatternSpans(), model, merged])
    found = chained.compute()
    assert found.dtypes.to_dict() == chained._meta.dtypes.to_dict()
    assert found["merged_spans"].isna().tolist() == [False, True, False, False]
    for row in found.dropna().to_dict("records"):
        spans = row["merged_spans"]
        assert all(a["end"] <= b["start"] for a, b in pairwise(spans))
        covered = {n for s in spans for n in range(s["start"], s["end"])}
        every = {
            n
            for name in ("pattern_spans", "spans")
            for s in row[name]
            for n in range(s["start"], s["end"])
        }
        assert covered == every
        rest, reached = "", 0
        for span in spans:
            rest += row["text"][reached : span["start"]] + f"<{span['label']}>"
            reached = span["end"]
        assert row["clean"] == rest + row["text"][reached:]
    assert chained[["clean"]].compute()["clean"].equals(found["clean"])


def brute_force_merge(spans):
    """Spans of one text, (start, end, label, score), merged one after another."""
    groups = []
    for span in sorted(spans):
        if groups and span[0] < max(other[1] for other in groups[-1]):
            groups[-1].append(span)
        else:
            groups.append([span])
    merged = []
    for group in groups:
        longest = max(group, key=lambda span: (span[1] - span[0], -span[0]))
        merged.append((group[0][0], max(span[1] for span in group), *longest[2:]))
    return merged


def test_merging_and_redacting_leave_nothing_of_a_span_and_all_of_the_rest():
    draw = random.Random(3)
    letters = "abé🙂\u0301 \x00\r\n中"
    texts, spans = [], []
    for _ in range(1_500):
        text = "".join(draw.choices(letters, k=draw.randint(0, 40)))
        found = []
        for _ in range(draw.randint(0, 5) if text else 0):
            start = draw.randrange(len(text))
            end = draw.randint(start + 1, len(text))
            found.append((start, end, draw.randrange(2), draw.randrange(8) / 8))
        texts.append(text)
        spans.append(found)
    rows = [(n, *span) for n, found in enumerate(spans) for span in found]
    table = Spans.of(len(texts), ("A", "B"), [*np.array(rows).T])
    merged = table.merged().array().to_pylist()
    redacted = table.redacted(texts, "\u241f")
    for text, found, ours, clean in zip(texts, spans, merged, redacted, strict=True):
        expected = brute_force_merge(found)
        bounds = [(s["start"], s["end"]) for s in ours]
        assert bounds == [span[:2] for span in expected]
        lengths = {
            (e[0], e[1]): {s[1] - s[0] for s in found if e[0] <= s[0] < e[1]} for e in expected
        }
        for span, (start, end, label, _) in zip(ours, expected, strict=True):
            longest = [s for s in found if start <= s[0] < end]
            most = max(lengths[start, end])
            assert span["label"] in {"AB"[s[2]] for s in longest if s[1] - s[0] == most}
            assert label is not None
        inside = np.zeros(len(text), bool)
        for start, end, *_ in found:
            inside[start:end] = True
        outside = "".join(c for c, is_in in zip(text, inside, strict=True) if not is_in)
        assert clean.replace("\u241f", "") == outside
        assert clean.count("\u241f") == len(expected)
    assert table.covered().tolist() == [
        sum(end - start for start, end, *_ in brute_force_merge(found)) for found in spans
    ]


def test_merge_spans_refuses_what_it_cannot_read():
    frame = PatternSpans()(pd.DataFrame({"text": ["a"], "n": [1]}))
    with pytest.raises(ValueError, match="no column of spans 'span'"):
        merge_spans(["span"])(frame)
    with pytest.raises(TypeError, match="column 'n' holds int64, not spans"):
        merge_spans(["n"])(frame)
    with pytest.raises(ValueError, match="already has"):
        merge_spans(["pattern_spans"], spans_field="n")(frame)
    with pytest.raises(ValueError, match="no text column 'body'"):
        merge_spans(["pattern_spans"], text_field="body", redact="x")(frame)
    with pytest.raises(ValueError, match="fields=None names no column"):
        merge_spans(None)
