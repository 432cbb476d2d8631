"""Recipes over a whole corpus: duplicates, test items, scores and samples, trained heads."""
