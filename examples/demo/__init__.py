"""The demonstration: a small classifier trained and run on text that is already installed."""

from examples.demo.run import DemoResult, load_demo, run_demo

__all__ = ["DemoResult", "load_demo", "run_demo"]
