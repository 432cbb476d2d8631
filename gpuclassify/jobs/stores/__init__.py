"""Access to files by path or URL, one store per protocol; read `store.py` first."""
