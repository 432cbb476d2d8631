"""Probe, tests and benchmarks for a machine with a GPU, online or offline, in one command."""
