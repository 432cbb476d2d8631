"""Run two classifiers in one pass on a cluster: ``python examples/cluster.py INPUT OUTPUT``.

`get_client` starts a worker for each GPU here, or workers on CPUs; with ``"slurm"`` or ``"coiled"``
they are elsewhere. Names of two models may follow.
"""

import sys

from gpuclassify import (
    DomainClassifier,
    FileReader,
    ParquetWriter,
    Pipeline,
    QualityClassifier,
    get_client,
)

MODELS = ("nvidia/quality-classifier-deberta", "nvidia/domain-classifier")


def main(source: str, target: str, quality: str = MODELS[0], domain: str = MODELS[1]) -> int:
    """Classify the files of `source` into `target`, and return how many rows were read."""
    stages = [QualityClassifier(model=quality), DomainClassifier(model=domain)]
    with get_client() as client:
        job = Pipeline([FileReader(source), *stages, ParquetWriter(target)])
        return job.run(client=client).rows_read


if __name__ == "__main__":  # workers are new processes, which import this file
    print(f"{main(*sys.argv[1:]):,} rows read")
