"""What tests of questions share."""

import pytest


@pytest.fixture
def never_loads(monkeypatch):
    """Fails a test that loads weights."""

    def load(*parts):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("gpuclassify.classifiers.questions.decoder.load_decoder", load)
