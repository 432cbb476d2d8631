"""Run text classifiers over Dask DataFrames of any size, on GPUs or CPUs, in one line.

>>> from gpuclassify import DomainClassifier
>>> ddf = DomainClassifier()(ddf)  # doctest: +SKIP
"""

import lazy_loader

from gpuclassify._version import __version__ as __version__

# The public names and their homes are those of __init__.pyi. Each is imported on first use, so that
# importing the package costs milliseconds and loads no framework.
_public_value, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__:
        return _public_value(name)
    from gpuclassify.settings.checks import nearest

    raise AttributeError(f"gpuclassify has no {name!r}.{nearest(name, __all__)}", name=name)
