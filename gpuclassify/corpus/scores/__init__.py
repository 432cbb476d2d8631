"""Buckets of scores, thresholds, mixtures, the best share of rows; read `buckets.py` first."""
