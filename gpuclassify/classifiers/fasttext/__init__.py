"""fastText classifiers, whose model is loaded once per machine; read `runner.py` first."""
