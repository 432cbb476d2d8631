"""The output of a job, written exactly once; read `records.py` first."""
