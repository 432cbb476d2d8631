"""Code inside a Dask worker: secrets, counts, lost devices; read `run_context.py` first."""
