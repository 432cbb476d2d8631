"""``python -m gpuclassify``."""

from gpuclassify.commands.cli import main

if __name__ == "__main__":
    main()
