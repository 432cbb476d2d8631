"""Clusters of embeddings: k-means in `kmeans.py`, saved centroids and a mapper in `clusters.py`."""
