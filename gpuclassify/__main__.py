"""``python -m gpuclassify``."""

from gpuclassify.cli import main

if __name__ == "__main__":
    main()
