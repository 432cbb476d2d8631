"""Checkpoints: descriptions, torch modules with weights, tokenizers; read `checkpoint.py` first."""
