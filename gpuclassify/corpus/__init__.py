"""Methods for a whole corpus: deduplication, decontamination, clusters, scores, trained heads."""
