# /// script
# requires-python = ">=3.11"
# dependencies = ["gpuclassify[fasttext,safety,sentencepiece]"]
# ///
"""Write a classifier's columns, and no text, into a dataset of the Hub.

    uv run annotate.py hf://datasets/OWNER/NAME hf://datasets/OWNER/NOTES --classifier quality

Pass INPUT and OUTPUT first, then any options of ``gpuclassify annotate``. A dataset gets one
commit, with a dataset card. Its files are staged in the working directory.
"""

import itertools
import sys

from gpuclassify.commands.cli import main

if __name__ == "__main__":  # workers import this file
    words = sys.argv[1:]
    *_, output = ["", *itertools.takewhile(lambda word: not word.startswith("-"), words)]
    folder = f"staging-{output.removeprefix('hf://').replace('/', '-')}"
    staging = ["--staging", folder] if output.startswith("hf://") else []
    main(["annotate", *staging, *words])
