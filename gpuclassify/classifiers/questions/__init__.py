"""Decoders asked about rows, by answers in their logits; read `prompt_classifier.py` first."""
