"""The command line, a file a command; read `cli.py` first."""
