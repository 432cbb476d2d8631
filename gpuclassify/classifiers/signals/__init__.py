"""Rule signals of texts as columns; read `signals.py` first."""
