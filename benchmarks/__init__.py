"""Measurements of gpuclassify: one file for each question. See README.md."""

from pathlib import Path

# Names in results, for those who only read them: nothing heavy is imported here.
RESULTS = Path(__file__).with_name("results")
BASELINE = "pipeline held"
SUBJECT = "gpuclassify"
