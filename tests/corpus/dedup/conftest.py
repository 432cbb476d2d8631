"""A small corpus with known duplicates."""

import pytest

from tests.corpus.dedup.known import make_corpus


@pytest.fixture
def corpus():
    """See `make_corpus`."""
    return make_corpus()
