"""``python -m gpuclassify``."""

import sys
from pathlib import Path

# Python puts the working directory first, whose torch.py or struct.py would run in torch's place.
if sys.path[0] == str(Path.cwd()) != str(Path(__file__).parents[1]):
    del sys.path[0]

from gpuclassify.commands.cli import main

if __name__ == "__main__":
    main()
