"""Planning a job: what it refuses, and that it writes and removes nothing."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from gpuclassify import DomainClassifier
from gpuclassify.cluster import get_client
from gpuclassify.jobs.run import plan_job, run_job

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def classifier(checkpoint):
    def make(**options):
        return DomainClassifier(model=checkpoint("domain"), autocast=False, **options)

    return make


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        lines = [json.dumps({"text": f"river oven {number} {row}"}) for row in range(12)]
        (folder / f"part-{number:05d}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("spelling", ["in", "in/../in", "link", "."])
def test_an_output_directory_that_holds_the_input_is_refused(
    classifier, source, tmp_path, spelling
):
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ValueError, match="lies in the output directory"):
        plan_job([str(source)], f"{tmp_path}/{spelling}", classifier(), overwrite=True)
    assert len(list(source.iterdir())) == 2


def test_planning_removes_nothing_and_a_job_replaces_earlier_parts(classifier, source, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "part-00007.parquet").write_bytes(b"earlier")
    with pytest.raises(FileExistsError, match="1 part files"):
        plan_job([str(source)], str(output), classifier())
    plan = plan_job([str(source)], str(output), classifier(), overwrite=True)
    assert [file.name for file in output.iterdir()] == ["part-00007.parquet"]
    with get_client("cpu", n_workers=1, processes=False, dashboard_address=None) as client:
        summary = run_job(plan, client)
    assert summary.rows_in == summary.rows_out == len(pd.read_parquet(output)) == 24
    assert sorted(map(str, output.iterdir())) == summary.files


def test_parts_of_a_job_have_the_inputs_columns_and_no_index(classifier, source, tmp_path):
    plan = plan_job([str(source)], str(tmp_path / "out"), classifier(min_confidence=0.2))
    with get_client("cpu", n_workers=1, processes=False, dashboard_address=None) as client:
        summary = run_job(plan, client)
    assert 0 < summary.rows_out < summary.rows_in
    assert all(pq.read_schema(file).names == ["text", "domain_pred"] for file in summary.files)
