"""What a job would be: rows, tokens, time and memory, told from a sample of its input."""
