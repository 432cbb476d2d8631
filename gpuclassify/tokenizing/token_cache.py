"""Tokens of one partition's texts, shared by the mappers that run over it one after another."""

from __future__ import annotations

import contextlib
import contextvars
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, TextTokens


class TokenStore:
    """Remembers every text's tokens by tokenizer; tokenizes what it does not know.

    Tokens that another mapper made are used where they are the same by necessity: the tokenizers
    have equal fingerprints, and both cut in the same way or neither cuts this text. The text
    itself is the key, so mappers with different `max_chars` share the texts that both leave whole.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[str, TextTokens]] = defaultdict(dict)

    def encode(
        self, tokenizer: TextTokenizer, texts: Sequence[str]
    ) -> tuple[list[TextTokens], int]:
        """Tokens of each text, and how many of them were known."""
        uncut = self._known[tokenizer.fingerprint]
        cut = self._known[tokenizer.fingerprint, tokenizer.cut]
        found = {text: cut[text] for text in texts if text in cut}
        for text in texts:
            if text in uncut and uncut[text].whole_length <= tokenizer.max_tokens:
                found[text] = uncut[text]
        missing = [text for text in texts if text not in found]
        for text, tokens in zip(missing, tokenizer.encode(missing), strict=True):
            is_whole = tokens.whole_length <= tokenizer.max_tokens
            (uncut if is_whole else cut)[text] = found[text] = tokens
        return [found[text] for text in texts], len(texts) - len(missing)


_store: contextvars.ContextVar[TokenStore | None] = contextvars.ContextVar("store", default=None)


@contextlib.contextmanager
def shared_tokens() -> Iterator[None]:
    """Within it, the mappers that this thread runs share one `TokenStore`."""
    reset = _store.set(TokenStore())
    try:
        yield
    finally:
        _store.reset(reset)


def current_store() -> TokenStore | None:
    """The store of the `shared_tokens` that this thread is within."""
    return _store.get()
