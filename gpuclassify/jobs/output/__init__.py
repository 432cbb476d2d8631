"""What a job writes, exactly once; read `records.py` first."""
