"""Labels without a network, and checkpoints that have others than the class that runs them."""

import warnings

import dask.dataframe as dd
import pandas as pd
import pytest

from gpuclassify import DistributedDataClassifier, DomainClassifier, QualityClassifier
from gpuclassify.classifiers import FAMILIES
from gpuclassify.models.checkpoint import CheckpointError
from tests.replicas import category_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FRAME = pd.DataFrame({"text": ["One text.", None]})
DDF = dd.from_pandas(FRAME, npartitions=1)


@pytest.mark.parametrize(
    ("family", "base_model", "file_bytes"),
    [
        ("domain", "deberta-v3-base", 1607),
        ("multilingual-domain", "mdeberta-v3-base", 1608),
        ("quality", "deberta-v3-base", 281),
        ("content-type", "deberta-v3-base", 799),
    ],
)
def test_the_labels_are_those_of_the_published_files(family, base_model, file_bytes):
    """Their config.json, which names every label twice, has this many bytes on the Hub."""
    config = category_config(FAMILIES[family].published_labels, f"microsoft/{base_model}")
    assert len(config.encode()) == file_bytes


def test_every_published_classifier_knows_its_labels():
    counts = {name: len(family.published_labels) for name, family in FAMILIES.items()}
    assert counts == {
        "domain": 26,
        "multilingual-domain": 26,
        "quality": 3,
        "content-type": 11,
        "topic": 24,
        "format": 24,
        "prompt-task-complexity": 12,
        "fineweb-edu": 2,
        "fineweb-mixtral-edu": 2,
        "fineweb-nemotron-edu": 2,
        "aegis": 15,
        "instruction-data-guard": 2,
        "qwen3guard": 3,
        "qwen3guard-response": 3,
        "llama-guard": 2,
        "shieldgemma": 0,
        "granite-guardian": 0,
        "nemotron-safety-guard": 2,
        "nemotron-content-safety": 2,
        "wildguard": 2,
        "taxonomy": 0,
        "propella": 4,
        "tokens": 0,
        "perplexity": 0,
        "spans": 0,
        "patterns": 0,
        "signals": 0,
        "prompt": 0,
        "zero-shot": 0,
        "checkpoint": 0,
        "fasttext": 0,
        "language": 0,
    }


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in ("domain", "quality")])
def test_the_class_of_the_model_says_nothing(checkpoint, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FAMILIES[name](model=checkpoint(name), strict=True)(DDF)
        DistributedDataClassifier(model=checkpoint(name), strict=True)(DDF)


def test_another_models_labels_are_warned_of_before_any_work(checkpoint):
    words = (
        r"gives Adult, .* and 24 more, .* not the labels of QualityClassifier \(High, Medium, and 1"
    )
    with pytest.warns(UserWarning, match=words) as told:
        DDF.pipe(QualityClassifier(model=checkpoint("domain")))
        QualityClassifier(model=checkpoint("domain"))(DDF)
        QualityClassifier(model=checkpoint("domain"))(FRAME)
    assert [warning.filename for warning in told] == [__file__]  # once, at the caller's line
    assert "`gpuclassify models`" in str(told[0].message)
    with pytest.raises(CheckpointError, match="are not the labels of QualityClassifier"):
        QualityClassifier(model=checkpoint("domain"), strict=True)(DDF)


def test_labels_that_are_given_are_meant_and_their_order_is_the_checkpoints(checkpoint, tmp_path):
    labels = list(DomainClassifier.published_labels)
    model = write_checkpoint(tmp_path / "other", "quality", labels=["Low", "Medium", "High"])
    other = QualityClassifier(model=model, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        QualityClassifier(model=checkpoint("domain"), labels=labels, strict=True)(DDF)
        other(DDF)
    assert other.labels == ["Low", "Medium", "High"]


def test_a_model_of_another_kind_is_refused_without_a_word_of_its_labels(sequence_classifier):
    model = sequence_classifier("bert", problem_type="regression")
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match="a regression model"):
        warnings.simplefilter("error")
        DomainClassifier(model=model)(DDF)
