"""Texts to tokens, on the host and ahead of the model; read `text_tokenizer.py` first."""
