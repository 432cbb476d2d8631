"""The demonstration as a command: ``make demo DEMO_OPTIONS="--documents 1500"``."""

import json
import sys
from pathlib import Path

import click

from examples.demo.run import run_demo
from gpuclassify.commands.console import open_console, print_summary, quiet_dask


@click.command(context_settings={"obj": {"debug": False}})
@click.option("--directory", default="demo-output", show_default=True, help="Where files go.")
@click.option("--model", default="demo", show_default=True, help="Where the model goes.")
@click.option("--documents", type=int, help="Most documents to use. Default: all that are found.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def main(directory: str, model: str, documents: int | None, as_json: bool) -> None:
    """Train a small classifier on docstrings, and run the main job on those it has not seen."""
    quiet_dask()
    console = open_console(stderr=as_json)
    result = run_demo(directory, console, model=model, max_documents=documents)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    print_summary(result.job, console)
    console.print(
        f"Held-out accuracy {result.accuracy:.1%} over {result.areas} areas "
        f"(always the most frequent one: {result.majority_share:.1%}). "
        f"Labelled documents are in {result.output}.\n\n{next_steps(directory, result.model)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def next_steps(directory: str, model: str) -> str:
    """Return a command and three lines of Python that run as they stand, in any folder."""
    python = Path(sys.executable)
    command, model = python.with_name("gpuclassify"), str(Path(model).absolute())
    file = Path(directory, "input/0.jsonl").absolute()
    return f"""\
The model is the folder {model}, which works in any folder by this path.
Name your own file of JSON lines, with a "text" in each, in place of {file}:

{command} classify {file} labelled --classifier checkpoint --model {model}

Or in {python}:

import gpuclassify, pandas as pd
frame = pd.read_json("{file}", lines=True)
gpuclassify.DistributedDataClassifier(model="{model}")(frame).to_parquet("labelled.parquet")
"""


if __name__ == "__main__":
    main()
