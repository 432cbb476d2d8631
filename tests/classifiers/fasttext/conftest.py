"""The model of fastText that others have published."""

import pytest

from tests.fasttext_models import published_model


@pytest.fixture(scope="session")
def real_model():
    """The path of lid.176.ftz, with 176 languages."""
    return published_model()
