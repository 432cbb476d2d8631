"""Decoders asked about texts, by LlamaGuard with adapters; read `runners.py` first."""
