"""Encoder layers on texts end to end, without padding; read `packed_layers.py` first."""
