"""Embeddings of annotated texts that tests share, and what is embedded anew."""

import pytest

from gpuclassify.classifiers.embedder import Embedder
from tests.replicas.annotated import annotated_texts


@pytest.fixture(scope="session")
def annotated():
    return annotated_texts(240)


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """Where embeddings of all tests are kept."""
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="session")
def tiny(sequence_classifier):
    """The directory of a tiny BERT."""
    return str(sequence_classifier("bert", labels=("score",), problem_type="regression"))


@pytest.fixture
def embedded_texts(monkeypatch):
    """How many rows embedders have been given."""
    counts = []
    run = Embedder.compute

    def counting(self, texts, name_row):
        counts.append(len(texts))
        return run(self, texts, name_row)

    monkeypatch.setattr(Embedder, "compute", counting)
    return counts
