"""What every mapper promises: laziness, same in same out, the user's rows, true meta, nulls.

Independence of scores is in test_independence.py; keys, identity and secrets are in
test_restart.py; the inert import is in test_import.py.
"""

import functools
import json
import shutil
import sys

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import (
    ApplyThresholds,
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    Thresholds,
)
from gpuclassify.hub import ModelNotFoundError
from tests.hard_frames import STRING_DTYPES, TEXTS, assert_meta_is_true, documents, with_hard_parts
from tests.oracle import assert_close, probabilities, raw_outputs, stacked
from tests.replicas import write_checkpoint

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture
def education(checkpoint):
    def make(**options):
        return FineWebEduClassifier(model=checkpoint("fineweb-edu"), autocast=False, **options)

    return make


LAZY = dd.from_pandas(documents(), npartitions=2)


# 1. Lazy.


def test_a_constructor_opens_nothing(run_python, tmp_path):
    run_python(f"""
import sys
from gpuclassify import (
    ApplyThresholds, DistributedDataClassifier, DomainClassifier, Embedder, FineWebEduClassifier,
    Thresholds
)
def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo"):
        raise AssertionError(f"{{event}} {{arguments}}")
sys.addaudithook(refuse)
DomainClassifier(filter_by=["Games"], token="hf_x")
Embedder(token="hf_x")
FineWebEduClassifier(min_score=3)
DistributedDataClassifier(model={str(tmp_path / "absent")!r}, base_model="no/where")
# A path of thresholds is read, a few kB: what it holds is part of the Dask key.
ApplyThresholds(Thresholds("score", "good", "recall", 0.5, {{}}))
""")


def test_calling_with_a_dask_frame_computes_nothing(domain, education):
    def explode(part):
        raise AssertionError("a partition was computed")

    frame = dd.from_map(explode, range(3), meta=documents([]))
    result = frame.pipe(domain(score_field="scores")).pipe(education(min_score=3))
    chosen = Thresholds("fineweb-edu-score-float", "good", "recall", 0.5, {})
    result = result.pipe(ApplyThresholds(chosen))
    with pytest.raises(AssertionError, match="a partition was computed"):
        result.compute(scheduler="sync")


def enlarge_embeddings(model, size_bytes):
    """Make the word embeddings of a DeBERTa checkpoint that large, without using the disk."""
    sizes_path, weights_path = model / "backbone" / "config.json", model / "model.safetensors"
    sizes, raw = json.loads(sizes_path.read_text()), weights_path.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    rows = size_bytes // (4 * sizes["hidden_size"])
    embedding = header["model.embeddings.word_embeddings.weight"]
    end = embedding["data_offsets"][1]
    more_bytes = 4 * sizes["hidden_size"] * (rows - embedding["shape"][0])
    embedding["shape"][0] = rows
    embedding["data_offsets"][1] += more_bytes
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    for entry in tensors:  # what lay behind the embeddings
        if entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset + more_bytes for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    with weights_path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in tensors))
    sizes_path.write_text(json.dumps({**sizes, "vocab_size": rows}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's memory accounting")
def test_planning_reads_no_weights_and_starts_no_cuda(run_python, checkpoint, tmp_path):
    huge = write_checkpoint(tmp_path / "huge", "domain")
    enlarge_embeddings(huge, 2 << 30)
    out = run_python(
        f"""
import resource, torch, pandas as pd, dask.dataframe as dd
from gpuclassify import DomainClassifier
ddf = dd.from_pandas(pd.DataFrame({{"text": ["a"]}}), npartitions=1)
def plan(model):
    classifier = DomainClassifier(model=model, filter_by="Games")
    assert len(classifier.labels) == 26
    classifier(ddf)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = plan({str(checkpoint("domain"))!r})
print(plan({str(huge)!r}) - before, torch.cuda.is_initialized())
""",
        CUDA_VISIBLE_DEVICES="",
    )
    growth_kib, is_initialized = out.split()
    assert int(growth_kib) < 100_000
    assert is_initialized == "False"


@pytest.mark.parametrize("settings", [{"labels": ["b", "a"]}, {"filter_by": "Gamez"}])
def test_mistakes_show_before_any_work(domain, settings):
    with pytest.raises(ValueError, match=r"Games|are not those of"):
        domain(**settings)(dd.from_pandas(documents(), npartitions=1))


def test_a_missing_model_shows_when_it_is_used(tmp_path):
    classifier = DomainClassifier(model=tmp_path / "absent")
    for use in (lambda: classifier.labels, lambda: classifier(LAZY)):
        with pytest.raises(ModelNotFoundError, match="absent"):
            use()


@pytest.mark.parametrize("step", [1, -1])
def test_a_client_without_the_checkpoint_plans_by_labels_that_workers_verify(
    domain, checkpoint, tmp_path, step
):
    away = tmp_path / "domain"
    planned = DomainClassifier(model=away, labels=domain().labels[::step], autocast=False)(LAZY)
    shutil.copytree(checkpoint("domain"), away)
    if step == 1:
        expected = domain()(LAZY).compute(scheduler="sync")
        pd.testing.assert_frame_equal(planned.compute(scheduler="sync"), expected)
        return
    with pytest.raises(ValueError, match="are not those of"):
        planned.compute(scheduler="sync")


# 2. Same in, same out.


def test_a_lazy_frame_gives_a_lazy_frame_of_its_backend(domain, frames):
    result = domain()(frames.lazy(documents()))
    assert dask.is_dask_collection(result)
    assert type(result) is type(frames.lazy(documents()))
    assert isinstance(result._meta, frames.frame_type)
    assert isinstance(result.compute(scheduler="sync"), frames.frame_type)


def test_pipe_keyword_and_call_give_the_same_frame(domain, frames):
    lazy = frames.lazy(documents())
    assert domain()(lazy)._name == lazy.pipe(domain())._name == domain()(dataset=lazy)._name


@pytest.mark.parametrize(
    "make",
    [
        lambda ddf: {"text": ["a text"]},
        lambda ddf: ddf.text,
        lambda ddf: ddf.to_bag(),
        lambda ddf: ddf.text.compute(),
    ],
)
def test_what_is_no_frame_is_refused(domain, make):
    with pytest.raises(TypeError, match=r"pass a (Dask )?DataFrame"):
        domain()(make(dd.from_pandas(documents(), npartitions=1)))


# 3. The rows are the user's.


def user_frame():
    texts = [*TEXTS, "x" * 5_000 + " tail", None, "", " lead\ttab\n", "é\u0301\x00nul"]
    count = len(texts)
    return pd.DataFrame(
        {
            "id": np.arange(count),
            "text": pd.Series(texts, dtype="str"),
            "when": pd.date_range("2024-01-01", periods=count),
            "weight": np.linspace(0, 1, count, dtype="float32"),
        }
    ).set_index(pd.Index(np.sort(np.arange(count) // 2), name="duplicated"))


@pytest.mark.parametrize("npartitions", [1, 4])
@pytest.mark.parametrize("has_divisions", [True, False])
def test_rows_order_index_divisions_and_columns_are_unchanged(
    domain, frames, npartitions, has_divisions
):
    lazy = frames.lazy(user_frame(), npartitions)
    if not has_divisions:
        lazy = lazy.clear_divisions()
    result = domain(max_chars=100)(lazy)
    assert result.divisions == lazy.divisions
    assert result.npartitions == lazy.npartitions
    pd.testing.assert_frame_equal(
        frames.to_pandas(result[list(lazy.columns)]), frames.to_pandas(lazy), check_exact=True
    )
    sizes = [len(part) for part in dask.compute(*result.to_delayed(), scheduler="sync")]
    assert sizes == [len(part) for part in dask.compute(*lazy.to_delayed(), scheduler="sync")]


def test_the_callers_plain_frame_is_not_touched(domain, frames):
    frame = frames.plain(user_frame())
    before = frame.copy(deep=True)
    domain()(frame)
    pd.testing.assert_frame_equal(frames.to_pandas(frame), frames.to_pandas(before))


def test_a_filter_drops_rows_and_nothing_else(domain, frames):
    everything = frames.to_pandas(domain()(frames.lazy(user_frame())))
    wanted = everything.domain_pred.mode()[0]
    lazy = frames.lazy(user_frame())
    kept = domain(filter_by=wanted)(lazy)
    assert kept.divisions == lazy.divisions
    expected = everything[(everything.domain_pred == wanted).fillna(False).astype(bool)]
    assert 0 < len(expected) < len(everything)
    pd.testing.assert_frame_equal(frames.to_pandas(kept), expected)


def test_only_the_first_max_chars_are_read(domain):
    start = "naïve market budget "
    frame = documents([start, start + "oven " * 300])
    cut = stacked(domain(max_chars=len(start), score_field="s")(frame).s)
    np.testing.assert_array_equal(cut[0], cut[1])
    whole = stacked(domain(score_field="s")(frame).s)
    assert np.abs(whole[0] - whole[1]).max() > 1e-3


# 4. Meta is the truth.


@pytest.mark.parametrize("name", STRING_DTYPES)
@pytest.mark.parametrize("keep_field", [None, "kept"])
def test_computed_dtypes_are_those_of_meta(domain, education, name, keep_field):
    with dask.config.set({"dataframe.convert-string": False}):
        frame = with_hard_parts(documents(TEXTS[:4], STRING_DTYPES[name]))
        by_label = domain(
            score_field="scores",
            confidence_field="confidence",
            min_confidence=0.05,
            keep_field=keep_field,
        )
        result = education()(by_label(frame))
    parts = assert_meta_is_true(result)
    dtypes = dict(result.dtypes)
    text_dtype = pd.Series([], dtype="str").dtype if name == "object" else dtypes["text"]
    assert dtypes["domain_pred"] == dtypes["fineweb-edu-score-label"] == text_dtype
    assert dtypes["scores"] == pd.ArrowDtype(pa.list_(pa.float32()))
    assert dtypes["confidence"] == dtypes["fineweb-edu-score-float"] == np.float32
    assert dtypes["fineweb-edu-score-int"] == pd.Int64Dtype()
    if keep_field is not None:
        assert dtypes[keep_field] == np.dtype(bool)
        assert not parts[2][keep_field].any()


def test_an_all_null_json_partition_is_text_too(domain, tmp_path):
    rows = [[{"text": text} for text in TEXTS[:3]], [{"text": None}] * 2]
    paths = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for path, part in zip(paths, rows, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    read = functools.partial(pd.read_json, lines=True)
    frame = dd.from_map(read, paths, meta=read(paths[0]).iloc[:0])
    assert frame.partitions[1].compute(scheduler="sync").text.dtype == np.float64
    result = domain(score_field="scores")(frame)
    parts = dask.compute(*result.to_delayed(), scheduler="sync")
    for name in ("domain_pred", "scores"):
        assert all(part[name].dtype == result[name].dtype for part in parts)
    assert parts[1].domain_pred.isna().all()
    assert parts[0].domain_pred.notna().all()


# 5. Null is not text.


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_blank_text_is_scored_as_it_stands(domain, checkpoint, text):
    found = domain(score_field="scores")(documents([TEXTS[0], text]))
    expected = probabilities(raw_outputs(checkpoint("domain"), [TEXTS[0], text]))
    assert_close(stacked(found.scores), expected)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_an_empty_text_of_a_decoder_is_scored(sequence_classifier, architecture):
    model = sequence_classifier(architecture)
    result = DistributedDataClassifier(model=model, autocast=False)(documents(["", "word"]))
    assert result.preds.notna().all()


def test_nulls_pass_no_filter(domain, education, frames):
    lazy = frames.lazy(documents([None, *TEXTS[:5], None]), 2)
    labels = domain().labels
    assert len(frames.to_pandas(domain(filter_by=labels)(lazy))) == 5
    assert len(frames.to_pandas(domain(min_confidence=0)(lazy))) == 5
    assert len(frames.to_pandas(education(min_score=0)(lazy))) == 5
    kept = frames.to_pandas(education(min_score=0, keep_field="kept")(lazy))
    assert list(kept.kept) == [False, *[True] * 5, False]
    assert kept.kept.dtype == np.dtype(bool)
