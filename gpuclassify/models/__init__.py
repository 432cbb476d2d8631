"""Descriptions of checkpoints, and torch modules with their tensors; read `checkpoint.py` first."""
