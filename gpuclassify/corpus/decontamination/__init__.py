"""Find documents that contain test items: an index of the items' n-grams, a mapper, and a job.

Read `words.py` first, which normalizes texts, then `index.py` and `mapper.py`. Importing the
package raises ModuleNotFoundError without numba.
"""

import importlib.util

from gpuclassify.settings.checks import install

if importlib.util.find_spec("numba") is None:
    raise ModuleNotFoundError(
        f"Decontaminate needs numba, which is not here: {install('dedup')}", name="numba"
    )
