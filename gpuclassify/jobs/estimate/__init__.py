"""What a job will take, told from a sample: rows, tokens, time, memory; read `plan.py` first."""
