"""PatternSpans: find addresses by rules, without a model, in linear time.

The rules are those of datatrove's ``PIIFormatter``. Its regular expression for e-mail addresses
starts at every word and takes quadratic time for some texts; here an address is read from its ``@``
in both directions.
"""

from __future__ import annotations

import bisect
import contextlib
import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.classifiers.rules import RuleModel, RuleRunner
from gpuclassify.classifiers.spans.columns import SpanHead, SpanOptions, SpanOutputs
from gpuclassify.classifiers.spans.spans import Spans
from gpuclassify.frames import Texts
from gpuclassify.hub import Identity
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.settings.checks import check_choice, label_tuple
from gpuclassify.settings.declared import declared
from gpuclassify.settings.options import StrPath
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats, advance

_LOCAL = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]*")
_DOMAIN = re.compile(r"[A-Za-z0-9.-]*")
_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")  # part of a domain between dots
_BYTE = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_IP = re.compile(rf"(?:{_BYTE}\.){{3}}{_BYTE}")
_LITERAL = re.compile(rf"\[(?:{_BYTE}\.){{3}}(?:{_BYTE}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]")

Bounds = Iterator[tuple[int, int]]


def find_emails(text: str) -> Bounds:
    """Yield start and end (exclusive) of each e-mail address in a text, by datatrove's rules."""
    reached, at = 0, text.find("@")
    while at >= 0:
        start, end = _start_of_local(text, reached, at), _end_of_domain(text, at + 1)
        reached = at + 1
        if start is not None and end is not None:
            yield start, end
            reached = end
        at = text.find("@", reached)


def _start_of_local(text: str, first: int, at: int) -> int | None:
    """Return the start of the local part before the ``@`` at `at`; None if there is no local part.

    The local part starts at the first word boundary in the characters that it may have, at or after
    `first`, the end of the address or ``@`` before. `first` itself counts as a boundary before a
    letter, digit or underscore, because the address before it may be removed.
    """
    reverse = _LOCAL.match(text[first:at][::-1])
    local = reverse[0][::-1] if reverse else ""
    local = local[local.rfind("..") + 2 :] if ".." in local else local
    if local.endswith("."):
        return None
    for index in range(at - len(local), at):
        before, own = index > 0 and _is_word(text[index - 1]), _is_word(text[index])
        if text[index] != "." and (before != own or (own and index == first)):
            return index
    return None


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _end_of_domain(text: str, first: int) -> int | None:
    """Return the end (exclusive) of the domain, or IP address in brackets, at `first`, or None."""
    if literal := _LITERAL.match(text, first):
        return literal.end()
    domain = _DOMAIN.match(text, first)
    end = None
    at = first
    for number, part in enumerate(domain[0].split(".") if domain else ()):
        match = _PART.match(part.rstrip("-"))
        if match is None:
            break
        if number:
            end = at + match.end()
        if match.end() < len(part):
            break
        at += len(part) + 1
    return end


def find_ips(text: str) -> Bounds:
    """Yield start and end (exclusive) of each public IPv4 address in a text."""
    for match in _IP.finditer(text):
        with contextlib.suppress(ValueError):  # such as leading zeros
            if ipaddress.ip_address(match[0]).is_global:
                yield match.span()


PATTERNS: dict[str, Callable[[str], Bounds]] = {"email": find_emails, "ip": find_ips}
_SIGNS = {"email": "@", "ip": "."}  # characters in every span of a pattern


@declared
class PatternOptions(SpanOptions):
    """Settings of `PatternSpans`, in addition to `SpanOptions`.

    Attributes
    ----------
    patterns : list of str
        "email", "ip" (public addresses), or both.
    text_field : str
        Column of the text.
    """

    model: StrPath = field(default="", init=False)
    revision: str | None = field(default=None, init=False)
    cache_dir: StrPath | None = field(default=None, init=False)
    patterns: str | Sequence[str] = ("email", "ip")
    spans_field: str = "pattern_spans"

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings are invalid; make `patterns` a tuple."""
        super().check_together()
        patterns = label_tuple("patterns", self.patterns, keep_order=True) or ()
        for pattern in patterns:
            check_choice("patterns", pattern, tuple(PATTERNS))
        object.__setattr__(self, "patterns", patterns)


class PatternModel(RuleModel):
    """Version of the rules that find addresses, in place of the model that other mappers have."""

    identity = checkpoint = Identity("rules", "2", is_directory=False)  # type: ignore[assignment]


class PatternRunner(RuleRunner):
    """Runner that finds e-mail and IP addresses in texts by rules, on the CPU."""

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> SpanOutputs:
        """Find the spans of distinct texts; all scores are 1."""
        names = self.options.patterns
        rows = [
            (index, start, end, code)
            for index, text in enumerate(texts)
            for code, (start, end) in _spans_of(text, names)
        ]
        advance(len(texts))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        spans = Spans.of(len(texts), names, [*columns, np.ones(len(rows), np.float32)])
        ones, all_read = np.ones(len(texts), np.int64), np.ones(len(texts), np.float32)
        return SpanOutputs(np.zeros((len(texts), 0)), ones, all_read, texts=texts, spans=spans)


def _spans_of(text: str, names: Sequence[str]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the pattern's index in `names`, and start and end (exclusive), of each span in a text.

    Spans are in the order of `PATTERNS`, without spans that overlap earlier patterns' spans.
    """
    taken: list[tuple[int, int]] = []
    for name in PATTERNS:
        if name not in names or _SIGNS[name] not in text:
            continue
        earlier = [(0, 0), *taken]
        for start, end in PATTERNS[name](text):
            if earlier[bisect.bisect_left(earlier, (end, 0)) - 1][1] <= start:
                taken.append((start, end))
                yield names.index(name), (start, end)


class PatternHead(SpanHead):
    """Head that converts spans found by rules to columns, and filters rows by them."""

    @property
    def labels(self) -> list[Any]:
        """Labels of the spans: names of the patterns in the settings, in their order."""
        return list(self.options.patterns)


class PatternSpans(TextMapper[PatternOptions]):
    """Mapper that finds e-mail addresses and public IP addresses by rules, without a model.

    The rules are those of datatrove's ``PIIFormatter``, in linear time. Columns
    are those of `SpanClassifier`, but the column of spans is ``pattern_spans``
    by default. A chain of both runs in one pass, and `merge_spans` joins their
    spans.

    Examples
    --------
    >>> addresses = PatternSpans(["email", "ip"], redact="[{label}]")
    >>> ddf = ddf.pipe(addresses)  # doctest: +SKIP
    """

    Options = PatternOptions
    model_type = PatternModel
    runner_type = PatternRunner
    head_type = PatternHead
    first_setting = "patterns"
    family = "patterns"
    purpose = "e-mail and public IP addresses, by rules"
    licence = "none: there is no model"

    if TYPE_CHECKING:

        @takes(PatternOptions)
        def __init__(self, **settings: Any) -> None: ...
