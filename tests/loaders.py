"""The loaders that this Python can have."""

import sys

# CrossFit has no release for Python 3.13 and later; where it can be installed, it has to be.
OTHER_LOADERS = ("crossfit",) if sys.version_info < (3, 13) else ()
LOADERS = ("sorted", *OTHER_LOADERS)
