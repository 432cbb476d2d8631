"""The demonstration as a command: ``make demo DEMO_OPTIONS="--documents 1500"``."""

import json

import click

from examples.demo.run import run_demo
from gpuclassify.commands.console import open_console, print_summary, quiet_dask


@click.command(context_settings={"obj": {"debug": False}})
@click.option("--directory", default="demo-output", show_default=True, help="Where files go.")
@click.option("--documents", type=int, help="Most documents to use. Default: all that are found.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def main(directory: str, documents: int | None, as_json: bool) -> None:
    """Train a small classifier on docstrings, and run the main job on those it has not seen."""
    quiet_dask()
    console = open_console(stderr=as_json)
    result = run_demo(directory, console, max_documents=documents)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    print_summary(result.job, console)
    console.print(
        f"Held-out accuracy {result.accuracy:.1%} over {result.areas} areas "
        f"(always the most frequent one: {result.majority_share:.1%}). "
        f"Labelled documents are in {result.output}, the model is in {result.model}.",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
