"""Buckets of equal weight of scores, and the best share of rows; read `buckets.py` first."""

COMBINE = ("max", "min")  # which of its scores' buckets is a row's
