"""The scripts of 1.x run with other imports and give what our own calls give."""

import operator
from pathlib import Path

import pytest

from gpuclassify import DomainClassifier, QualityClassifier, curator
from gpuclassify.jobs.report.summary import JobSummary
from tests.curator.conftest import FRAME, read_output

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DOMAIN = """
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.text.io.reader import JsonlReader
from nemo_curator.stages.text.io.writer import JsonlWriter
from nemo_curator.stages.text.classifiers import DomainClassifier

pipeline = Pipeline(name="domain_classification")

pipeline.add_stage(JsonlReader(file_paths="books_dataset/*.jsonl", fields=["text", "id"]))

domain_classifier = DomainClassifier(filter_by=["Games", "Sports"])
pipeline.add_stage(domain_classifier)

writer = JsonlWriter(path="games_and_sports/")
pipeline.add_stage(writer)

results = pipeline.run()  # Uses XennaExecutor by default
"""
EXECUTOR = """
from nemo_curator.backends.xenna import XennaExecutor
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.text.classifiers import QualityClassifier

pipeline = Pipeline(name="classifier_pipeline")
pipeline.add_stage(read_stage)
pipeline.add_stage(QualityClassifier())
pipeline.add_stage(write_stage)

executor = XennaExecutor(config={"execution_mode": "streaming"})
results = pipeline.run(executor)
"""


@pytest.mark.contract
@pytest.mark.usefixtures("small_models")
def test_a_pipeline_writes_what_the_classifier_gives(run_script, tmp_path):
    results = run_script(DOMAIN)["results"]

    expected = DomainClassifier(filter_by=["Games", "Sports"])(FRAME)
    found = read_output(tmp_path / "games_and_sports")
    assert {name: found[name].tolist() for name in found} == expected.to_dict("list")
    assert 0 < len(found) < len(FRAME)
    assert isinstance(results, JobSummary)


@pytest.mark.usefixtures("small_models")
def test_an_executors_settings_are_warned_of_once_and_change_nothing(run_script, tmp_path):
    run_script("# 'web_documents' is \"web_documents/*.jsonl\"")
    stages = {
        "read_stage": curator.JsonlReader(file_paths="web_documents"),
        "write_stage": curator.JsonlWriter(path="out"),
    }
    with pytest.warns(UserWarning, match=r"executor's .*streaming.* has no effect") as caught:
        run_script(EXECUTOR, **stages)

    assert len(caught) == 1
    expected = QualityClassifier()(FRAME)["quality_pred"].tolist()
    assert read_output(tmp_path / "out")["quality_pred"].tolist() == expected


@pytest.fixture
def pipeline(run_script, tmp_path):
    run_script('"folder/*.jsonl"')
    stages = [
        curator.JsonlReader("folder", files_per_partition=None, blocksize="1KiB"),
        lambda frame: frame[["id"]],
        curator.JsonlWriter("out", write_kwargs={"storage_options": {}}, mode="ignore"),
    ]
    return curator.Pipeline("ids", "of all texts", stages, config={})


def test_readers_writers_and_runs_take_the_arguments_of_1_x(pipeline, tmp_path):
    assert (pipeline.name, pipeline.description) == ("ids", "of all texts")
    with pytest.warns(UserWarning, match="checkpoint_path='state' has no effect: the output"):
        pipeline.run(curator.XennaExecutor(), checkpoint_path="state")
    assert read_output(tmp_path / "out")["id"].tolist() == FRAME["id"].tolist()
    assert len(list((tmp_path / "out").glob("part-*"))) > 2  # of 1 KiB


def test_what_runs_no_job_is_refused_with_the_cure(pipeline):
    with pytest.raises(TypeError, match=r"pass a dask.distributed.Client"):
        pipeline.run(object())
    with pytest.raises(TypeError, match="begins with its reader"):
        pipeline.run(initial_tasks=[object()])
    with pytest.raises(TypeError, match="a Pipeline of 0 stages ends with"):
        curator.Pipeline(name="empty").run()


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (curator.JsonlReader, {"read_kwargs": {"dtype": {}}}, r"\['dtype'\] are arguments of pand"),
        (curator.JsonlReader, {"read_kwargs": {"lines": False}}, "leave lines=False out$"),
        (curator.JsonlReader, {"read_kwargs": {"nrows": 5}}, "leave nrows=5 out"),
        (curator.ParquetReader, {"read_kwargs": {"columns": ["a"]}}, "pass fields= of the reader"),
        (curator.JsonlWriter, {"write_kwargs": {"orient": "split"}}, "leave orient='split' out"),
        (curator.JsonlWriter, {"write_kwargs": {"force_ascii": True}}, "force_ascii=True out"),
        (curator.JsonlWriter, {"write_kwargs": {"compression": "gzip"}}, "compression= of the wr"),
        (curator.ParquetWriter, {"write_kwargs": {"index": False}}, "leave index=False out"),
        (curator.DocumentDataset.read_json, {"read_kwargs": {"encoding": "latin-1"}}, "latin-1"),
        (curator.JsonlReader, {"_generate_ids": True}, "_generate_ids=True is not supported"),
        (curator.ParquetReader, {"task_type": "image"}, "task_type='image' is not supported"),
        (curator.ParquetWriter, {"fields": ["id"]}, "add a stage"),
        (curator.DocumentDataset.read_json, {"input_meta": {"a": "str"}}, "types= of JsonlReader"),
        (curator.TokenizerStage, {"transformers_init_kwargs": {"a": 1}}, "save the tokenizer as"),
        (lambda _: curator.XennaExecutor({"ignore_failures": True}), {}, 'on_error="quarantine"'),
    ],
)
def test_arguments_that_would_change_the_result_are_refused(call, arguments, message):
    with pytest.raises(TypeError, match=message):
        call("folder", **arguments)


def test_arguments_of_pandas_that_change_nothing_pass():
    said = {"lines": True, "orient": "records", "encoding": "utf-8", "storage_options": {"anon": 1}}
    assert curator.JsonlReader("in", read_kwargs=said).storage_options == {"anon": 1}
    said = {"lines": True, "orient": "records", "force_ascii": False}
    assert curator.JsonlWriter("out", write_kwargs=said).storage_options == {}


def test_a_writer_begins_anew_where_it_is_told_to(run_script, tmp_path):
    run_script('"folder/*.jsonl"')
    reader = curator.JsonlReader(file_paths="folder")
    for mode, fields in (("overwrite", ["id"]), ("overwrite", ["text", "id"])):
        chosen = operator.itemgetter(fields)
        writer = curator.JsonlWriter("out", mode=mode)
        results = curator.Pipeline("p", stages=[reader, chosen, writer]).run()
        assert read_output(tmp_path / "out").columns.tolist() == fields
        assert [task.data for task in results] == [[file] for file in results.files]
        assert len(results) == len(results.files) > 0
    with pytest.raises(ValueError, match="mode='append'"):
        curator.JsonlWriter("out", mode="append")


@pytest.mark.parametrize("writer", [curator.JsonlWriter, curator.ParquetWriter])
def test_a_writer_refuses_a_directory_that_exists_where_it_is_told_to(run_script, writer):
    run_script('"folder/*.jsonl"')
    stages = [curator.JsonlReader(file_paths="folder"), writer("new", mode="error")]
    assert curator.Pipeline("p", stages=stages).run().rows_written > 0
    for path in ("new", Path("new").absolute().as_uri(), "folder"):
        with pytest.raises(FileExistsError, match='mode="error" refuses it'):
            writer(path, mode="error")


@pytest.mark.parametrize(("most", "parts"), [(1, 5), (2, 3), (5, 1), (None, 5)])
def test_files_per_partition_counts(tmp_path, most, parts):
    for number in range(5):
        FRAME.to_json(tmp_path / f"{number}.jsonl", orient="records", lines=True)
    reader = curator.JsonlReader(str(tmp_path), files_per_partition=most)
    assert len(reader.find_parts().parts) == parts
    frame = curator.DocumentDataset.read_json(str(tmp_path), files_per_partition=most).df
    assert frame["id"].compute().tolist() == FRAME["id"].tolist() * 5
