"""Files of an output: encodings, part names, records, the manifest; read `records.py` first."""
