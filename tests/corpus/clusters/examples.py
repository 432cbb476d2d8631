"""Example of the mapper that assigns clusters: it reads a column of embeddings, and no text."""

from gpuclassify import AssignClusters, Clusters
from tests.examples import FRAME


def clusters(**options):
    found = Clusters.fit(FRAME, 3 if "max_chars" in options else 4, embedding_field="vector")
    return AssignClusters(found, embedding_field="vector", distance_field="distance")


EXAMPLES = {"clusters": clusters}
