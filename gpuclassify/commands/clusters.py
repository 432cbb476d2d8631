"""Command ``gpuclassify clusters``: fit clusters to the embeddings of files."""

from __future__ import annotations

from typing import Any

import click

from gpuclassify.commands.console import open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    JobCommand,
    options_of,
    reader_from_options,
    reading_options,
)

SETTINGS = ("n_clusters", "embedding_field", "sample_size", "max_iter", "seed")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.clusters.clusters import Clusters

    column = {"embedding_field": {"metavar": "COLUMN"}}
    own = options_of(Clusters.fit, "Options", *SETTINGS, has_defaults=True, **column)
    return [*own, *reading_options()]


@click.command(cls=JobCommand, options=_options)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("output")
def clusters(inputs: tuple[str, ...], output: str, **options: Any) -> None:
    """Fit clusters to a sample of the embeddings in INPUT files (Parquet or JSON lines).

    OUTPUT is a file of JSON with the centroids, for `annotate --assign-clusters OUTPUT`. Only the
    column of embeddings is read, from the files or from --annotations.

    \b
    gpuclassify annotate 'crawl/*.parquet' notes/vectors --classifier embedder
    gpuclassify clusters 'crawl/*.parquet' clusters.json --annotations notes/vectors \\
        --n-clusters 1000

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    from gpuclassify.corpus.clusters.clusters import Clusters

    quiet_dask()
    with wrong_call_exits(), open_console(stderr=True).status("Reading embeddings"):
        settings = {name: options[name] for name in SETTINGS}
        reader = reader_from_options(inputs, options)
        found = Clusters.fit(reader, **settings, on_error=options["on_error"])
        found.save(output)
    lines = f"{found}\nClusters: {output}"
    open_console().print(lines, highlight=False, markup=False, soft_wrap=True)
