"""What runs inside a Dask worker: secrets, run events, device errors."""
