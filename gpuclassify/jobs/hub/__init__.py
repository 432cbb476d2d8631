"""Datasets of the Hugging Face Hub as the input or the output of a job."""
