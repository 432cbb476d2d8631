"""Files by path or URL, a store for each protocol, chosen once; read `store.py` first."""
