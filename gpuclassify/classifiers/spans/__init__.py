"""Spans of texts, found by token classifiers or rules; merged, and redacted if asked."""
