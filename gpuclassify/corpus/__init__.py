"""Recipes over a whole corpus: duplicates, test items, scores, samples and trained heads."""
