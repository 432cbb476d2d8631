"""The demonstration: a small classifier trained and run on text that is already installed."""
