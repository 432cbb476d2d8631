"""Files in, files out, each part exactly once, continued by the same call; read `job.py` first."""
