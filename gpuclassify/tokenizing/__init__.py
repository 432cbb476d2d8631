"""Texts to tokens: host and GPU tokenizers, prefetch, token cache."""
