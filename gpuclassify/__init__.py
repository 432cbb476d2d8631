"""Run text classifiers over Dask DataFrames of any size, on GPUs or CPUs, in one line.

>>> from gpuclassify import DomainClassifier
>>> ddf = DomainClassifier()(ddf)  # doctest: +SKIP
"""

import lazy_loader

from gpuclassify._version import __version__ as __version__

# The public names and their homes are those of __init__.pyi. Each is imported on first use, so that
# importing the package costs milliseconds and loads no framework.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
