"""A client that sees no GPU plans and runs on pandas frames, also where RAPIDS is installed."""

import pytest

pytestmark = pytest.mark.rapids

LIBRARIES = ("cudf", "dask_cudf", "pylibcudf", "libcudf")


def test_planning_and_running_on_pandas_never_imports_cudf(run_python, checkpoint):
    run_python(
        f"""
import importlib.util, sys
assert all(importlib.util.find_spec(name) for name in {LIBRARIES})
import dask.dataframe as dd, pandas as pd, torch
from gpuclassify import DomainClassifier, FineWebEduClassifier, classify
frame = dd.from_pandas(pd.DataFrame({{"text": ["one", None, "three"]}}), npartitions=2)
domain = DomainClassifier(model={str(checkpoint("domain"))!r}, filter_by="Games", keep_field="kept")
education = FineWebEduClassifier(model={str(checkpoint("fineweb-edu"))!r}, min_score=0)
for result in (domain(frame), frame.pipe(domain).pipe(education), classify(frame, [domain])):
    assert not any(name in sys.modules for name in {LIBRARIES})
    assert len(result.columns) > 2
assert len(domain(frame).compute(scheduler="sync")) == 3
assert not any(name in sys.modules for name in {LIBRARIES})
assert not torch.cuda.is_initialized()
""",
        CUDA_VISIBLE_DEVICES="",
    )


def test_a_client_that_sees_no_gpu_gets_a_cpu_cluster(run_python):
    run_python(
        """
import sys
from gpuclassify.cluster import get_client
if __name__ == "__main__":
    with get_client(n_workers=1) as client:
        assert type(client.cluster).__name__ == "LocalCluster"
    assert "cudf" not in sys.modules
""",
        CUDA_VISIBLE_DEVICES="",
    )


def test_a_gpu_cluster_says_that_there_is_no_gpu(run_python):
    message = run_python(
        """
from gpuclassify.cluster import get_client
try:
    get_client("gpu")
except RuntimeError as err:
    print(err)
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "cannot start here" in message
    assert "does not import" not in message
