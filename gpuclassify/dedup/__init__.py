"""Exact, fuzzy and semantic deduplication."""
