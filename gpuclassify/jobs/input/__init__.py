"""The input of a job: files, their parts and columns; read `parts.py` first."""
