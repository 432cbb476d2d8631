"""Answers that a decoder gave before, from which the next ones are drafted."""

from __future__ import annotations

from collections import Counter

MOST_DRAFTED = 8  # tokens; longer answers seldom come twice
_MOST_SEEN = 64  # answers; the table of continuations is made from them for every batch

Tokens = tuple[int, ...]


class SeenAnswers:
    """Whole answers, as token ids, with how often they came."""

    def __init__(self) -> None:
        self._counts: Counter[Tokens] = Counter()

    def add(self, answer: Tokens) -> None:
        """Count an answer; when too many differ, the rarer half is forgotten."""
        self._counts[answer] += 1
        if len(self._counts) > _MOST_SEEN:
            self._counts = Counter(dict(self._counts.most_common(_MOST_SEEN // 2)))

    def continuations(self) -> dict[Tokens, Tokens]:
        """By the beginning of an answer: the rest of the most common one, but its last token.

        The last token of an answer is left out because verifying those before it gives it anyway.
        """
        rarest_first = reversed(self._counts.most_common())
        return {
            answer[:start]: answer[start:-1][:MOST_DRAFTED]
            for answer, _ in rarest_first
            for start in range(len(answer))
        }
