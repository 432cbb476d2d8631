"""Classify files into files, once: ``python examples/job.py INPUT OUTPUT [MODEL]``.

The same call continues a job that was interrupted, and a finished one starts nothing.
"""

import sys

from gpuclassify import FileReader, ParquetWriter, Pipeline, QualityClassifier


def main(
    source: str, target: str, model: str = "nvidia/quality-classifier-deberta"
) -> tuple[int, int]:
    """Classify files, and return how many rows were read and how many are kept."""
    classifier = QualityClassifier(model=model, filter_by=["High", "Medium"])
    summary = Pipeline([FileReader(source), classifier, ParquetWriter(target)]).run()
    return summary.rows_read, summary.rows_written


if __name__ == "__main__":
    print("{:,} rows read, {:,} kept".format(*main(*sys.argv[1:])))
