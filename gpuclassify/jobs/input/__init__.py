"""What a job reads: files, their parts and columns; read `parts.py` first."""
