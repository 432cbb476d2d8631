"""Custom heads, trained on the embeddings of annotated texts; read `trained_head.py` first.

`labels.py` reads and embeds rows, `split.py` splits them, `fitting.py` trains for a task in
`tasks.py`, and `evaluation.py` computes figures with intervals.
"""
