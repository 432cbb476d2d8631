"""Buckets of scores, thresholds, and the best share of rows; read `buckets.py` first."""
