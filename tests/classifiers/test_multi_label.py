"""Several labels a text, as web registers have: held against transformers' own pipeline."""

import json

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from transformers import pipeline

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    JsonlWriter,
    ParquetWriter,
    Pipeline,
    to_parquet,
)
from gpuclassify.commands.cli import main
from gpuclassify.commands.settings import JobSettings, load_settings
from gpuclassify.mapping.stage_counts import StageCounts
from gpuclassify.workers.run_context import run_context
from tests.replicas import sample_texts, write_sequence_classifier

pytestmark = pytest.mark.usefixtures("one_torch_thread")
REGISTERS = ["NA", "IN", "in/dtp", "OP", "LY"]  # labels of a hierarchy are just labels
TEXTS = [*sample_texts(18, seed=5, max_words=40), None, ""]
FRAME = pd.DataFrame({"id": range(20), "text": TEXTS})
IS_TEXT = FRAME["text"].notna().to_numpy()
BY_LABEL = {"NA": 0.75, "in/dtp": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sequence_classifier(
        tmp_path_factory.mktemp("registers") / "model",
        "xlm-roberta",
        labels=REGISTERS,
        problem_type="multi_label_classification",
    )


@pytest.fixture(scope="module")
def scores(model):
    """The probability of each label, by label, of each text."""
    classify = pipeline("text-classification", model=str(model), tokenizer=str(model), top_k=None)
    return [
        None if text is None else {found["label"]: found["score"] for found in classify([text])[0]}
        for text in TEXTS
    ]


@pytest.fixture
def registers(model):
    def make(**options):
        settings = {"labels_field": "registers", "autocast": False, **options}
        return DistributedDataClassifier(model=model, **settings)

    return make


def given(scores, thresholds):
    """The labels of each text that reach their thresholds, in id order; 0.5 for those unnamed."""
    by_label = thresholds if isinstance(thresholds, dict) else dict.fromkeys(REGISTERS, thresholds)
    return [
        own and [label for label in REGISTERS if own[label] >= by_label.get(label, 0.5)]
        for own in scores
    ]


def as_lists(column):
    return [
        list(value) if is_text else None
        for value, is_text in zip(column, column.notna(), strict=True)
    ]


@pytest.mark.parametrize("thresholds", [None, 0.25, 0, 1, BY_LABEL])
@pytest.mark.parametrize("npartitions", [1, 7])
def test_labels_are_those_that_reach_their_thresholds(
    registers, scores, frames, thresholds, npartitions
):
    lazy = registers(thresholds=thresholds, score_field="s")(frames.lazy(FRAME, npartitions))
    computed = frames.to_pandas(lazy)

    expected = given(scores, 0.5 if thresholds is None else thresholds)
    assert as_lists(computed["registers"]) == expected
    assert list(computed.columns) == ["id", "text", "preds", "s", "registers"]
    assert computed["preds"][IS_TEXT].tolist() == [max(s, key=s.get) for s in scores if s]
    sizes = {len(labels) for labels in expected if labels is not None}
    assert sizes == ({0} if thresholds == 1 else {5} if thresholds == 0 else sizes) and sizes


@pytest.mark.parametrize("keep_field", [None, "is_kept"])
def test_filter_by_keeps_rows_with_any_of_the_labels(registers, scores, keep_field):
    wanted = ["LY", "NA"]
    options = {"filter_by": wanted, "thresholds": BY_LABEL, "keep_field": keep_field}
    found = registers(**options)(FRAME)
    is_kept = [bool(labels and set(wanted) & set(labels)) for labels in given(scores, BY_LABEL)]
    assert 0 < sum(is_kept) < len(FRAME)
    if keep_field:
        assert found["is_kept"].tolist() == is_kept
    else:
        assert found["id"].tolist() == FRAME["id"][is_kept].tolist()
    only_best = registers(labels_field=None, filter_by=wanted)(FRAME)["preds"]
    assert set(only_best) <= set(wanted)


def test_the_lists_survive_parquet_json_and_concatenation(registers, scores, tmp_path):
    expected = given(scores, 0.5)
    lazy = registers()(dd.from_pandas(FRAME, npartitions=3))
    to_parquet(lazy, tmp_path / "lazy")
    for name, writer in (("parquet", ParquetWriter), ("jsonl", JsonlWriter)):
        Pipeline([dd.from_pandas(FRAME, npartitions=3), registers(), writer(tmp_path / name)]).run()
    for folder in ("lazy", "parquet"):
        table = pq.read_table(tmp_path / folder).sort_by("id")
        assert table["registers"].to_pylist() == expected
        assert table.schema.field("registers").type == pa.list_(pa.string())
    lines = [x for file in sorted((tmp_path / "jsonl").glob("*.jsonl")) for x in file.open()]
    assert [json.loads(line)["registers"] for line in lines] == expected


def test_reports_count_every_label(registers, scores, tmp_path):
    stages = StageCounts(most_examples=2)
    with run_context(stages=stages):
        registers()(FRAME)
    counts = stages.counts["DistributedDataClassifier"]["labels"]["registers"]
    every = [label for labels in given(scores, 0.5) if labels for label in labels]
    assert counts == {label: every.count(label) for label in set(every)}

    names = ("registers", "again")  # the report compares columns of labels, and lists are none
    mappers = [registers(label_field=None, labels_field=name) for name in names]
    frame = dd.from_pandas(FRAME, npartitions=3)
    summary = Pipeline([frame, *mappers, ParquetWriter(tmp_path / "out")]).run()
    assert summary.columns == {"registers": counts, "again": counts}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thresholds": {"in/dpt": 0.3}}, r"no label 'in/dpt'.*Did you mean 'in/dtp'"),
        ({"filter_by": "XX"}, "no label 'XX'"),
        ({"thresholds": 1.5}, "is not from 0 to 1"),
        ({"thresholds": {"IN": -1}}, "is not from 0 to 1"),
        ({"thresholds": {}}, "names no label"),
        ({"thresholds": 0.5, "labels_field": None}, "pass labels_field= with them"),
        ({"labels_field": "preds"}, r"different names; given twice: \['preds'\]"),
    ],
)
def test_settings_without_a_meaning_are_refused_at_the_call(registers, options, message):
    with pytest.raises(ValueError, match=message):
        registers(**options)(dd.from_pandas(FRAME, npartitions=2))


def test_models_with_one_label_a_text_say_what_to_pass(sequence_classifier, checkpoint):
    frame = pd.DataFrame({"text": ["a"]})
    cure = 'use label_field, or pass problem_type="multi_label_classification"'
    single = sequence_classifier("bert")
    with pytest.raises(ValueError, match=cure):
        DistributedDataClassifier(model=single, labels_field="all")(frame)
    with pytest.raises(ValueError, match=cure):
        DomainClassifier(model=checkpoint("domain"), labels_field="all")(frame)
    regression = sequence_classifier("bert", num_labels=1, problem_type="regression")
    with pytest.raises(ValueError, match="gives no label: leave labels_field out"):
        DistributedDataClassifier(model=regression, labels_field="all")(frame)


def test_the_command_line_has_them(model, tmp_path):
    words = [
        *("classify", "in.jsonl", "out", "--classifier", "checkpoint", "--model", str(model)),
        *("--labels-field", "all", "--thresholds", "NA=0.75", "--thresholds", "in/dtp=0.1"),
        *("--dump-config", str(tmp_path / "job.yaml")),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    (mapper,) = JobSettings.of(load_settings(tmp_path / "job.yaml")).mappers()
    assert mapper == DistributedDataClassifier(model=model, labels_field="all", thresholds=BY_LABEL)
    done = CliRunner().invoke(main, [*words[:-6], "--thresholds", "x"])
    assert done.exit_code == 2 and "--thresholds 'x': pass a number, or LABEL=NUMBER" in done.output
