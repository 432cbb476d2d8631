"""Exact, fuzzy and semantic deduplication of frames and files; read `duplicates.py` first.

Each document with a text gets a signature. `find_components` of each class collects documents with
equal or similar signatures in sets of candidates. `groups.py` decides which documents of a set
stay.
"""
