"""Run text classifiers over Dask DataFrames of any size."""

__version__ = "0.1.0"
