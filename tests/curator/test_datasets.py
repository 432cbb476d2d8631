"""The Dask generation's scripts run with other imports and give what our own calls give."""

import argparse

import pandas as pd
import pyarrow.parquet as pq
import pytest
from dask import is_dask_collection

import gpuclassify
from gpuclassify import ToBackend, cluster, curator
from gpuclassify.cluster.sizing import gpu_cluster_options
from gpuclassify.curator import scripts
from gpuclassify.workers.nvml import GpuSurvey
from tests.curator.conftest import FRAME, read_output

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
READ = """
from nemo_curator.datasets import DocumentDataset
from nemo_curator.classifiers import {kind}

input_dataset = DocumentDataset.read_json("content/*.jsonl", backend="cudf")
"""
AEGIS = """
token = "hf_1234"  # Your HuggingFace user access token
safety_classifier = AegisClassifier(
    aegis_variant="nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0",
    token=token,
    filter_by=["safe", "O13"],  # Keep only safe content and "needs caution" category
    keep_raw_pred=True,
    raw_pred_column="raw_predictions"
)
result_dataset = safety_classifier(dataset=input_dataset)
"""
MIXTRAL = """
classifier = FineWebMixtralEduClassifier(
    pred_column="score",                 # Raw float scores
    int_column="score-int",              # Rounded integer scores
    quality_label_column="quality-label" # "high_quality" or "low_quality"
)
result_dataset = classifier(dataset=input_dataset)

# Extract highly educational content (scores 4-5)
high_edu_dataset = result_dataset[result_dataset["score-int"] >= 4]
"""
SCRIPTS = [
    (
        "AegisClassifier",
        AEGIS,
        {"filter_by": ["safe", "O13"], "keep_raw": True, "raw_field": "raw_predictions"},
    ),
    (
        "FineWebMixtralEduClassifier",
        MIXTRAL,
        {"score_field": "score", "int_score_field": "score-int", "label_field": "quality-label"},
    ),
]
MODULES = """
from nemo_curator import Sequential, ToBackend

pipeline = Sequential([
    cpu_operation, ToBackend("cudf"), gpu_operation, ToBackend("pandas"), cpu_operation_2
])
"""


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize(("kind", "script", "options"), SCRIPTS)
def test_a_classifier_gives_a_dataset_of_what_it_gives_a_frame(
    run_script, safety_models, kind, script, options
):
    variant = {"nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0": safety_models.defensive}
    scope = run_script(READ.format(kind=kind) + script, variant)

    result = scope["result_dataset"]
    expected = getattr(gpuclassify, kind)(**options)(FRAME).reset_index(drop=True)
    found = result.to_pandas().sort_values("id", ignore_index=True)
    assert isinstance(result, curator.DocumentDataset)
    assert 0 < len(found) == len(result)
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-5, atol=1e-5)
    if high := scope.get("high_edu_dataset"):
        assert isinstance(high, curator.DocumentDataset)
        is_high = expected["score-int"] >= 4
        assert high.df["id"].compute().tolist() == expected["id"][is_high].tolist()


def test_modules_run_one_after_another(run_script, checkpoint):
    classifier = curator.DomainClassifier(model=checkpoint("domain"))
    functions = {
        "cpu_operation": lambda dataset: dataset[dataset["id"] >= 10],
        "gpu_operation": classifier,
        "cpu_operation_2": lambda dataset: dataset.repartition(npartitions=1),
    }
    pipeline = run_script(MODULES, **functions)["pipeline"]

    found = pipeline(curator.DocumentDataset.from_pandas(FRAME, npartitions=3))

    assert found.npartitions == 1
    expected = classifier(FRAME[10:])
    pd.testing.assert_frame_equal(found.to_pandas(), expected, check_dtype=False)


@pytest.mark.parametrize("limit", [None, 3])
def test_classify_gives_a_lazy_dataset_of_a_dataset(limit):
    dataset = curator.DocumentDataset.from_pandas(FRAME, npartitions=2)
    found = gpuclassify.classify(dataset, [gpuclassify.Signals()], limit=limit)
    assert isinstance(found, curator.DocumentDataset)
    assert is_dask_collection(found.df)
    pd.testing.assert_frame_equal(
        found.to_pandas(), gpuclassify.Signals()(FRAME[:limit]), check_dtype=False
    )


def test_moving_a_lazy_frame_moves_its_meta(frames):
    lazy = frames.lazy(FRAME)
    there = ToBackend(frames.name)(lazy)
    assert type(there._meta) is type(lazy._meta)
    back = ToBackend("pandas")(there)
    assert isinstance(back._meta, pd.DataFrame)
    pd.testing.assert_frame_equal(back.compute(), frames.to_pandas(lazy), check_dtype=False)


def test_clients_are_asked_for_by_the_older_options(monkeypatch):
    calls = []
    monkeypatch.setattr(
        cluster, "get_client", lambda kind, **options: calls.append((kind, options))
    )
    with pytest.warns(UserWarning, match="set_torch_to_use_rmm=True has no effect"):
        curator.get_client(scheduler_address="tcp://a:1", set_torch_to_use_rmm=True)
    curator.get_client(cluster_type="gpu", rmm_pool_size="1GB", enable_spilling=True)
    parser = curator.ArgumentHelper(argparse.ArgumentParser())
    parser.add_distributed_classifier_cluster_args()
    args = parser.parser.parse_args(["--n-workers", "3", "--enable-spilling"])
    for device in ("cpu", "gpu"):
        args.device = device
        curator.get_client(**curator.ArgumentHelper.parse_client_args(args))
    assert calls == [
        ("auto", {"address": "tcp://a:1"}),
        ("gpu", {"rmm_pool_size": "1GB", "enable_cudf_spill": True}),
        ("cpu", {"n_workers": 3, "threads_per_worker": 1}),
        ("gpu", {"rmm_pool_size": "512MB", "enable_cudf_spill": True, "protocol": "tcp"}),
    ]
    gpu_cluster_options({"protocol": "tcp"}, rmm_pool_size="512MB", enable_cudf_spill=True)


@pytest.mark.parametrize(
    ("asked", "visible", "expected"),
    [
        ({}, 0, []),
        ({}, 1, []),
        ({}, 2, [("gpu", {"n_workers": 2})]),
        ({"num_gpus": 1}, 4, []),
        ({"num_gpus": 4}, 1, [("gpu", {"n_workers": 4})]),
    ],
)
def test_a_client_of_ray_starts_workers_where_several_are_wanted(
    monkeypatch, asked, visible, expected
):
    calls = []
    monkeypatch.setattr(scripts, "survey_gpus", lambda: GpuSurvey((None,) * visible))
    monkeypatch.setattr(
        cluster, "get_client", lambda kind, **options: calls.append((kind, options))
    )
    client = curator.RayClient(**asked)
    client.start()
    client.stop()
    assert calls == expected
    with pytest.warns(UserWarning, match="'num_cpus': 64} has no effect"):
        curator.RayClient(num_cpus=64, num_gpus=2)


def test_a_dataset_is_written_and_read_again(run_script, tmp_path):
    run_script('"content/*.jsonl"')
    dataset = curator.DocumentDataset.read_json("content", columns=["id"], blocksize="1KiB")
    assert list(dataset.df.columns) == list(dataset.columns) == ["id"]
    dataset.persist().to_json("lines", write_to_filename=False)
    dataset.to_parquet("parquet")
    dataset.to_parquet("parquet")  # the job of before, which is done

    assert read_output(tmp_path / "lines")["id"].tolist() == FRAME["id"].tolist()
    found = curator.DocumentDataset.read_parquet("parquet")
    assert found.npartitions == dataset.npartitions > 2
    assert sorted(found.to_pandas()["id"]) == FRAME["id"].tolist()
    assert len(found.head(3)) == 3


def test_files_of_names_are_written_after_an_interrupted_removal_of_their_parts(tmp_path):
    dataset = curator.DocumentDataset.from_pandas(FRAME[["id"]].assign(file_name="a.jsonl"))
    left = tmp_path / "out/_parts_of_files/file_name=a/part-00000-0123abcd.jsonl"
    left.parent.mkdir(parents=True)
    left.touch()
    for _ in range(2):
        dataset.to_json(str(tmp_path / "out"), write_to_filename=True)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.jsonl"]
    assert read_output(tmp_path / "out")["id"].tolist() == FRAME["id"].tolist()


@pytest.mark.parametrize("compression", ["snappy", "gzip", "none", None])
def test_parquet_has_the_compression_that_is_asked_for(tmp_path, compression):
    frame = pd.DataFrame({"id": range(4), "file_name": ["a.parquet", "b.parquet"] * 2})
    dataset = curator.DocumentDataset.from_pandas(frame, npartitions=2)
    dataset.to_parquet(str(tmp_path / "named"), write_to_filename=True, compression=compression)
    dataset.to_parquet(str(tmp_path / "parts"), compression=compression)
    files = [*tmp_path.glob("named/*.parquet"), *tmp_path.glob("parts/*.parquet")]
    found = {pq.ParquetFile(path).metadata.row_group(0).column(0).compression for path in files}
    assert found == {{"none": "UNCOMPRESSED", None: "ZSTD"}.get(compression) or compression.upper()}
    for name, ids in (("a", [0, 2]), ("b", [1, 3])):
        assert pd.read_parquet(tmp_path / f"named/{name}.parquet")["id"].tolist() == ids


@pytest.mark.parametrize(("compression", "ending"), [(None, ""), ("gzip", ".gz"), ("zstd", ".zst")])
@pytest.mark.parametrize("is_kept", [False, True])
def test_files_of_several_parts_have_all_their_rows(tmp_path, compression, ending, is_kept):
    names = [f"a.jsonl{ending}", f"b.jsonl{ending}"]
    frame = pd.DataFrame({"id": range(4), "file_name": names * 2})
    dataset = curator.DocumentDataset.from_pandas(frame, npartitions=2)
    options = {"write_to_filename": True, "keep_filename_column": is_kept}
    dataset.to_json(str(tmp_path), compression=compression, **options)
    columns = ["id", "file_name"] if is_kept else ["id"]
    assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == names
    for number, name in enumerate(names):
        content = (tmp_path / name).read_bytes()
        assert content.count(ZSTD_MAGIC) == (compression == "zstd")  # pandas reads one zstd frame
        found = curator.DocumentDataset.read_json(str(tmp_path / name)).to_pandas()
        expected = frame[columns][number::2].reset_index(drop=True)
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)


def test_an_unknown_pooling_is_refused_with_the_known_ones():
    config = curator.SemDedupConfig(cache_dir="x", embedding_pooling_strategy="cls")
    message = "embedding_pooling_strategy='cls' is not one of 'mean_pooling', 'last_token'"
    with pytest.raises(ValueError, match=message):
        curator.SemDedup(config)
