"""What was published of FineWeb-Edu's job on 100 A10G GPUs, beside the prediction of it.

``python -m benchmarks.fineweb_comparison PREDICTION.json`` changes nothing in the prediction.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fineweb import NAME
from benchmarks.harness import write_result
from benchmarks.names import RESULTS

QUESTION = "fleet-comparison"
PUBLISHED = {
    "gpus": 100,
    "hours": 5.0,
    "where": "huggingface/blog, dask-scaling.md: about 5 hours on 100 g5.xlarge, spot",
}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the comparison, and return its path."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fineweb_comparison", description=__doc__
    )
    parser.add_argument("prediction", type=Path, metavar="PREDICTION.json")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args(arguments)
    content = options.prediction.read_bytes()
    result = compare(json.loads(content)) | {
        "prediction": options.prediction.name,
        "prediction_sha256": hashlib.sha256(content).hexdigest(),
    }
    path = write_result(QUESTION, result, options.output)
    print(table(result))
    print(f"written to {path}")
    return path


def compare(prediction: dict) -> dict:
    """Predicted and published hours, and the share of the peak that the job then had.

    That share is what the published time means. It is told to be learnt from, and goes nowhere.
    """
    [predicted] = [
        found for found in prediction["predictions"] if found["gpus"] == PUBLISHED["gpus"]
    ]
    rows, operations = (prediction["job"][name] for name in ("rows", "operations_per_row"))
    gpu_seconds = PUBLISHED["gpus"] * PUBLISHED["hours"] * 3600
    return {
        "machine": {"short_name": NAME},
        "prediction_finished": prediction["finished"],
        "published": PUBLISHED,
        "predicted": predicted,
        "predicted_hours_between": prediction["hours_on_100_gpus_between"],
        "predicted_to_published": predicted["hours"] / PUBLISHED["hours"],
        "utilisation_predicted": prediction["utilisation"],
        "utilisation_of_the_published_time": rows
        * operations
        / gpu_seconds
        / prediction["settings"]["peak"],
    }


def table(result: dict) -> str:
    """The result as a few lines for people."""
    low, high = result["predicted_hours_between"]
    shares = [result[f"utilisation_{name}"] for name in ("predicted", "of_the_published_time")]
    return (
        f"{PUBLISHED['gpus']} GPUs: predicted {result['predicted']['hours']:.1f} hours ({low:.1f} "
        f"to {high:.1f}), published about {PUBLISHED['hours']:g}; "
        f"{result['predicted_to_published']:.2f} times as long\n"
        f"share of the peak: {shares[0]:.1%} assumed, {shares[1]:.1%} by the published time"
    )


if __name__ == "__main__":
    main()
