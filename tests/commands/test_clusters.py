"""`gpuclassify clusters` and `--assign-clusters`: embeddings in files become clusters."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import AssignClusters, Clusters, read_files
from gpuclassify.commands.cli import main


def run(*words):
    return CliRunner().invoke(main, [*map(str, words)])


@pytest.fixture
def crawl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32).tolist()
    frame = pd.DataFrame({"id": range(60), "text": "a text", "embedding": vectors})
    frame.to_parquet("crawl.parquet", index=False)
    done = run("clusters", "crawl.parquet", "clusters.json", "--n-clusters", 5, "--seed", 3)
    assert done.exit_code == 0, done.output
    found = Clusters.fit(read_files("crawl.parquet"), 5, seed=3)
    assert Clusters.load("clusters.json") == found
    assert done.output == f"{found}\nClusters: clusters.json\n"
    return AssignClusters("clusters.json")(read_files("crawl.parquet")).compute()


def test_rows_of_jobs_and_previews_get_their_clusters(crawl):
    want, option = crawl["cluster"].tolist(), ("--assign-clusters", "clusters.json")
    done = run("annotate", "crawl.parquet", "notes", *option)
    assert done.exit_code == 0, done.output
    notes = read_files("crawl.parquet", annotations="notes").compute()
    assert notes["cluster"].tolist() == want and 1 < len(set(want)) <= 5
    done = run("select", "crawl.parquet", "out", *option, "--field", "id", "--where", "id < 20")
    assert done.exit_code == 0, done.output
    rows = pq.read_table("out", partitioning=None).to_pandas().sort_values("id")
    assert rows["cluster"].tolist() == want[:20] and "text" not in rows
    done = run("preview", "crawl.parquet", *option, "-n", 7, "--json")
    assert [json.loads(line)["cluster"] for line in done.stdout.splitlines()] == want[:7]


@pytest.mark.parametrize(
    ("name", "words"), [("other.json", "holds no clusters"), ("absent.json", "No such file")]
)
def test_a_file_without_clusters_is_named(crawl, name, words):
    Path("other.json").write_text("[]")
    done = run("annotate", "crawl.parquet", "notes", "--assign-clusters", name)
    assert done.exit_code == 2 and words in done.stderr and name in done.stderr
