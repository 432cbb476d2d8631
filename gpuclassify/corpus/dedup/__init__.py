"""Exact, fuzzy and semantic deduplication of frames; read `duplicates.py` first, then `exact.py`.

Each document gets a signature. `find_components` of each class collects documents with equal or
similar signatures in sets of candidates. `groups.py` decides which document of a set stays.
"""
