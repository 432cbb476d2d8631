"""What a machine with a GPU runs, connected or not: probe, tests and benchmarks, in one command."""
