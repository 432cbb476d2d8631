"""Examples: a small instance of each mapper, which the tests of the contract run.

An example is a function in ``EXAMPLES`` of a file ``examples.py`` next to its mapper's tests, by
the mapper's name (of a family, its name on the command line). Its parameters are names of fixtures;
`options` are options of the mapper. An example without such an option as `max_chars` changes
another setting if it is given, and ignores the other options that its mapper lacks.
"""

import functools
import importlib
import inspect
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.replicas import sample_texts

TEXTS = [*sample_texts(14, seed=4, max_words=40), "", "twice", "twice", "\n\t ", None, "天気 🙂"]
INDEX = [3, 3, *range(10, 28)]
VECTORS = [None, [0.0, 0.0], *np.random.default_rng(0).normal(size=(18, 2)).tolist()]
FRAME = pd.DataFrame(
    {
        "id": range(20),
        "text": pd.Series(TEXTS, dtype="str"),
        "weight": np.linspace(0, 1, 20),
        "vector": pd.Series(VECTORS, dtype=pd.ArrowDtype(pa.list_(pa.float32()))),
    }
).set_axis(INDEX)


@functools.cache
def examples():
    """Return all examples by name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/**/examples.py")):
        names = path.relative_to(Path(__file__).parents[1]).with_suffix("").parts
        found |= importlib.import_module(".".join(names)).EXAMPLES
    return found


def make_example(name, request, **options):
    """Return the example of this name; `request` is pytest's."""
    if name not in examples():
        pytest.fail(
            f"no example of {name!r}: write a function that returns a small one, and add it to "
            "EXAMPLES in the examples.py next to its tests (see tests/classifiers/examples.py)",
            pytrace=False,
        )
    example = examples()[name]
    fixtures = [key for key in inspect.signature(example).parameters if key != "options"]
    return example(*map(request.getfixturevalue, fixtures), **options)


def known_options(kind, options):
    """Return the options that a class has."""
    return {key: options[key] for key in inspect.signature(kind).parameters if key in options}
