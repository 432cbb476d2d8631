"""The published filters as conditions on signals, of the recipe's page."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/recipes/signals.md"


def conditions():
    """Return a `Select` by the name of its set of signals, as the page's code makes them."""
    code = re.search(r"```python\n(from gpuclassify import Select\n.*?)```", PAGE.read_text(), re.S)
    found = {}
    exec(code[1], found)
    return found["FILTERS"]
