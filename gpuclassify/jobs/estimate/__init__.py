"""What a job will take, from a sample: rows, tokens, time, memory."""
