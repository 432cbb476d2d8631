"""What checkpoints are, and the torch modules with their tensors; read `checkpoint.py` first."""
