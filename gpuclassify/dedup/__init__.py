"""Exact, fuzzy and semantic deduplication: which documents are duplicates, and their removal."""
