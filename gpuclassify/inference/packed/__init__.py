"""Encoder layers on concatenated texts, without padding; read `packed_layers.py` first."""
