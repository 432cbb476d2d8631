"""Writers of a job's output, on disk and on the Hub; read `writers.py` first."""
