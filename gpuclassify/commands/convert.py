"""Command ``gpuclassify convert``: convert tensors of linear layers to a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

import click

from gpuclassify.commands.console import echo, wrong_call_exits
from gpuclassify.commands.options import JobCommand, options_of
from gpuclassify.models.head_network import (
    HIDDEN_ACTIVATIONS,
    OUTPUT_ACTIVATIONS,
    Backbone,
)
from gpuclassify.settings.options import ProblemType

HIDDEN = [name for name in HIDDEN_ACTIVATIONS if name]
OUTPUT = [name or "none" for name in OUTPUT_ACTIVATIONS]


def _options() -> Sequence[click.Option]:
    from gpuclassify.classifiers.embedder import EmbeddingOptions

    attributes: dict[str, Any] = {
        "revision": {"help": "Commit of that model on the Hub."},
        "normalize": {"flags": ["--normalize/--no-normalize"]},
    }
    read = ("revision", "pooling", "normalize", "prompt", "max_seq_length", "truncate_dim")
    return options_of(EmbeddingOptions, "Options", *read, **attributes)


@click.command(
    cls=JobCommand,
    options=_options,
)
@click.argument("source", type=click.Path(exists=True, dir_okay=False))
@click.argument("directory")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="LABEL",
    help="Name of an output, in order; repeatable. Default: score, of a regression.",
)
@click.option(
    "--problem-type",
    type=click.Choice(get_args(ProblemType)),
    help="Default: one label a text if there are labels, else a regression.",
)
@click.option("--hidden-activation", type=click.Choice(HIDDEN), help="Between two layers.")
@click.option("--output-activation", type=click.Choice(OUTPUT), help="Of a regression's score.")
@click.option(
    "--backbone",
    "model",
    metavar="NAME",
    help="Hub name or directory of the model whose embeddings the head reads.",
)
def convert(source: str, directory: str, **options: Any) -> None:
    """Convert the head in SOURCE, and write it into DIRECTORY for the classifier `heads`.

    A head is one or two layers that turn the embeddings of a model into labels or a score. SOURCE
    holds the tensors of these layers; code in pickles (.pt, .ckpt) is not run. For files as JQL and
    FineWeb2-HQ publish them, the other settings are known; for other files pass options.

    \b
    gpuclassify convert edu-gemma-snowflake-balanced.ckpt heads/edu-gemma
    gpuclassify convert probe.npz heads/topic --label News --label Fiction --backbone MODEL
    """  # fmt: skip
    from gpuclassify.models.head_conversion import convert_head

    names = {field.name for field in fields(Backbone)}
    backbone = {name: options[name] for name in names if options[name] is not None}
    settings = {name: value for name, value in options.items() if name not in names}
    with wrong_call_exits():
        head, layout = convert_head(source, directory, backbone=backbone, **settings)
    widths = [head.layers[0][0].shape[1], *(len(bias) for _, bias in head.layers)]
    known = "" if layout is None else f", the layout of {layout}"
    echo(f"{directory}: {'-'.join(map(str, widths))}, {head.problem_type}{known}")
    if head.backbone is None:
        echo("The model that embeds for it is not known: pass HeadClassifier a backbone=")
    else:
        shown = (f"{name} {value!r}" for name, value in asdict(head.backbone).items())
        echo(f"It reads embeddings of {', '.join(shown)}")
