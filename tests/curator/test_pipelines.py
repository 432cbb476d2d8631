"""The scripts of 1.x run with other imports and give what our own calls give."""

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

# Create pipeline
pipeline = Pipeline(name="domain_classification")

# Load dataset
reader = JsonlReader(
    file_paths="books_dataset/*.jsonl",
    fields=["text", "id"]
)
pipeline.add_stage(reader)

# Apply the classifier, filtering for specific domains
domain_classifier = DomainClassifier(filter_by=["Games", "Sports"])
pipeline.add_stage(domain_classifier)

# Save the results
writer = JsonlWriter(path="games_and_sports/")
pipeline.add_stage(writer)

# Execute pipeline
results = pipeline.run()  # Uses XennaExecutor by default
"""
EXECUTOR = """
from nemo_curator.backends.xenna import XennaExecutor
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.text.classifiers import QualityClassifier

# Create pipeline with classifier
pipeline = Pipeline(name="classifier_pipeline")
pipeline.add_stage(read_stage)
pipeline.add_stage(QualityClassifier())
pipeline.add_stage(write_stage)

# Run with default Xenna executor (recommended)
executor = XennaExecutor(config={"execution_mode": "streaming"})
results = pipeline.run(executor)
"""


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


def test_an_executor_that_would_change_the_result_is_refused():
    with pytest.raises(TypeError, match='on_error="quarantine"'):
        curator.RayDataExecutor(config={"ignore_failures": True})


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


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("JsonlReader", {"read_kwargs": {"dtype": {}}}, r"\['dtype'\] are arguments of pandas"),
        ("JsonlReader", {"_generate_ids": True}, "_generate_ids=True has no effect"),
        ("ParquetReader", {"task_type": "image"}, "task_type='image' has no effect"),
        ("JsonlWriter", {"mode": "overwrite"}, r"run\(restart=True\)"),
        ("ParquetWriter", {"fields": ["id"]}, "add a stage"),
    ],
)
def test_arguments_that_would_change_the_result_are_refused(kind, arguments, message):
    with pytest.raises(TypeError, match=message):
        getattr(curator, kind)("folder", **arguments)


def test_an_argument_that_only_changes_parts_is_warned_of():
    with pytest.warns(UserWarning, match="files_per_partition=2 has no effect") as caught:
        curator.JsonlReader("folder", files_per_partition=2)
    assert len(caught) == 1
