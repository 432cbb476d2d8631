"""Train heads (small classifier networks) on embeddings; read `trained_head.py` first.

`labels.py` reads and embeds rows, `split.py` splits them, `fitting.py` trains for a task in
`tasks.py`, and `evaluation.py` computes figures with intervals.
"""
