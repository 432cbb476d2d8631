"""Measurements of gpuclassify: one file for each question. See README.md."""
