"""What users may set, and how it is checked; read `options.py` first."""
