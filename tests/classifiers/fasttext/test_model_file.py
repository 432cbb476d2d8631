"""Files that are no whole classifier are refused before the library sees them."""

import struct

import dask.dataframe as dd
import fasttext
import numpy as np
import pandas as pd
import pytest

from gpuclassify import FastTextClassifier
from gpuclassify.classifiers.fasttext.model_file import PATTERNS, read_fasttext
from gpuclassify.hub import ModelChangedError, ModelNotFoundError, read_file, resolve_file
from gpuclassify.models.checkpoint import CheckpointError
from tests.fasttext_models import KINDS, train_word_vectors

FRAME = pd.DataFrame({"text": ["buy a theorem"]})


def described(path):
    model = resolve_file(path, None, PATTERNS)
    return read_file(model, lambda file: read_fasttext(file, model))


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_read_without_the_library(fasttext_model, kind):
    path = fasttext_model(kind)
    assert list(described(path).labels) == fasttext.load_model(str(path)).get_labels()


@pytest.mark.parametrize("kind", ["chars", "norms", "pruned"])
def test_a_file_cut_anywhere_is_refused(fasttext_model, tmp_path, kind):
    data = fasttext_model(kind).read_bytes()
    path = tmp_path / "cut.bin"
    for length in np.linspace(0, len(data) - 1, 40, dtype=int):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"ends within its|is no fastText model"):
            FastTextClassifier(model=path)(FRAME)


def changed(data, start, *numbers):
    """Bytes with other int32 numbers at a place."""
    return (
        data[:start] + struct.pack(f"<{len(numbers)}i", *numbers) + data[start + 4 * len(numbers) :]
    )


# Places in the file: 0 magic, 4 version, 8 dim, 32 loss, 36 model, 40 bucket, 64 dictionary.
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: changed(data, 4, 13), "has version 13 of the format"),
        (lambda data: changed(data, 0, 7), "is no fastText model"),
        (lambda data: changed(data, 8, 11), "matrix that no classifier"),
        (lambda data: changed(data, 36, 9), "settings that no classifier"),
        (lambda data: changed(data, 40, 0), "settings that no classifier"),
        (lambda data: changed(data, 40, 999), "matrix that no classifier"),
        (lambda data: changed(data, 64, 5), "dictionary that no classifier"),
        (lambda data: changed(data, 64, 2**31 - 1, 2**31 - 4, 3), "dictionary"),
        (lambda data: data[:92] + b"a" * 2**26, "dictionary that no classifier"),
        (lambda data: data + b"\0", "1 bytes more than its header announces"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda data: b"a text file, and a long one\n" * 99, "is no fastText model"),
        (lambda data: np.random.default_rng(0).bytes(5_000), "is no fastText model"),
        (lambda data: data[:8] + np.random.default_rng(0).bytes(5_000), "copy it again"),
        (lambda data: b"", "is no fastText model"),
    ],
)
def test_foreign_and_damaged_files_are_refused(fasttext_model, tmp_path, damage, message):
    path = tmp_path / "damaged.bin"
    path.write_bytes(damage(fasttext_model("chars").read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        _ = FastTextClassifier(model=path).labels


def test_word_vectors_are_no_classifier(tmp_path):
    with pytest.raises(CheckpointError, match="word vectors"):
        _ = FastTextClassifier(model=train_word_vectors(tmp_path)).labels


def test_a_directory_holds_one_model_or_is_asked_which(fasttext_model, tmp_path):
    data = fasttext_model("chars").read_bytes()
    with pytest.raises(ModelNotFoundError, match="no one file of"):
        FastTextClassifier(model=tmp_path)(FRAME)
    (tmp_path / "a.bin").write_bytes(data)
    assert len(FastTextClassifier(model=tmp_path)(FRAME)) == 1
    (tmp_path / "b.bin").write_bytes(data)
    with pytest.raises(ModelNotFoundError, match=r"'a.bin', 'b.bin'\]: pass file="):
        FastTextClassifier(model=tmp_path)(FRAME)
    assert len(FastTextClassifier(model=tmp_path, file="b.bin")(FRAME)) == 1
    (tmp_path / "model.bin").write_bytes(data)  # the usual name
    assert FastTextClassifier(model=tmp_path).model.file.filename == "model.bin"
    with pytest.raises(ModelNotFoundError, match=r"no file 'c\.bin'"):
        FastTextClassifier(model=tmp_path, file="c.bin")(FRAME)
    with pytest.raises(ModelNotFoundError, match="absent"):
        FastTextClassifier(model=tmp_path / "absent.bin")(FRAME)


def test_a_file_written_anew_after_planning_is_refused(fasttext_model, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(fasttext_model("chars").read_bytes())
    lazy = FastTextClassifier(model=path)(dd.from_pandas(FRAME, npartitions=1))
    path.write_bytes(fasttext_model("softmax").read_bytes())
    with pytest.raises(ModelChangedError, match="not the file that the work was planned with"):
        lazy.compute(scheduler="sync")
    assert len(FastTextClassifier(model=path)(FRAME)) == 1
