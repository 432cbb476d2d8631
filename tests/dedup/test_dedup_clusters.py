"""Deduplication on clusters, whose workers shuffle among themselves."""

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, LocalCluster

from gpuclassify import ExactDuplicates
from tests.dedup.known import WAYS, expected, plain


@WAYS
@pytest.mark.parametrize("processes", [False, True])
def test_a_cluster_gives_the_same(way, processes, corpus):
    want = expected(corpus, way is ExactDuplicates).astype({"id": "str", "group": "str"})
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=processes, dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        frame = dd.from_pandas(corpus, npartitions=5)
        found = way(id_field="id", keep_by=["quality"])(frame)
        pd.testing.assert_frame_equal(plain(found), want)
