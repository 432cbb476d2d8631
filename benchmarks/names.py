"""Names in results, for those who only read them: nothing heavy is imported here."""

from pathlib import Path

RESULTS = Path(__file__).with_name("results")
BASELINE = "pipeline held"
SUBJECT = "gpuclassify"
