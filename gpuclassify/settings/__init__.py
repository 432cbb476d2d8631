"""User settings and their checks; read `options.py` first."""
