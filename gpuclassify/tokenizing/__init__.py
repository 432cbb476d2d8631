"""Tokenizing of texts on the host, ahead of the model; read `text_tokenizer.py` first."""
