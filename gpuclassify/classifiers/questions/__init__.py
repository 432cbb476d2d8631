"""Mappers that run decoder language models; read `prompt_classifier.py` first."""
