"""Spans of texts: found by token classifiers or by rules, merged, and cut out if asked."""
