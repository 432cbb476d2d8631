"""Heads of one's own: trained on the embeddings of annotated texts, evaluated, and saved."""
