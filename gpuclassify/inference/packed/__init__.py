"""Encoder layers on texts end to end, without padding; read `layout.py` first."""
