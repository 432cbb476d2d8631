"""fastText models: file, process that holds it, runner and heads; read `runner.py` first."""
