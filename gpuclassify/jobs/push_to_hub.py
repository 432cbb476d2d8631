"""A Dask frame as a dataset of the Hugging Face Hub, without a pipeline of one's own."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.summary import JobSummary, Report


def push_to_hub(
    ddf: Any,
    repo: str,
    *,
    staging: str,
    client: Any = None,
    restart: bool = False,
    verify: str = "digest",
    report: Report | None = None,
    **options: Any,
) -> JobSummary:
    """Write a Dask frame to a dataset repository of the Hugging Face Hub, in one commit.

    Each partition is a file. The index is left out.

    Parameters
    ----------
    ddf : dask.dataframe.DataFrame
    repo : str
    staging : str
        See `HubWriter`, as for all other `options`.
    client : distributed.Client, optional
        Default: the current one; without any, everything runs here.
    restart, verify, report
        See `gpuclassify.Pipeline.run`.

    Returns
    -------
    JobSummary
        Its `commit_url` is the address of the commit.

    Raises
    ------
    Exception
        See `gpuclassify.Pipeline.run`. Run the same again to continue.
    """
    pipeline = Pipeline([ddf, HubWriter(repo, staging=staging, **options)])
    distributed = sys.modules.get("distributed")
    if client is None and distributed is not None:
        with contextlib.suppress(ValueError):  # there is none
            client = distributed.default_client()
    return pipeline.run(client, restart=restart, verify=verify, report=report)
