"""Encoder layers on texts end to end, without padding."""
