# /// script
# requires-python = ">=3.11"
# dependencies = ["gpuclassify[dedup]"]
# ///
r"""Write the documents of a dataset without test items into another dataset.

    uv run decontaminate.py hf://datasets/OWNER/NAME hf://datasets/OWNER/CLEAN \
        --against hf://datasets/OWNER/EVALS --against-field question

Pass INPUT and OUTPUT first, then any options of ``gpuclassify decontaminate``. A dataset gets one
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
    main(["decontaminate", *staging, *words])
