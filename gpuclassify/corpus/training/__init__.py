"""Custom heads, trained on the embeddings of annotated texts; read `trained_head.py` first.

`labels.py` reads rows and embeds them, `split.py` parts them, `fitting.py` trains for one of
the tasks in `tasks.py`, and `evaluation.py` measures how good a head is, and how certain that is.
"""
