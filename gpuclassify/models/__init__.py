"""Checkpoints: what they declare, how their weights load, and the modules with their names."""
