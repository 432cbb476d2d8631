"""The version of the package, apart from its face so that every room can read it."""

__version__ = "0.1.0"
