"""Versions: the package's, apart from its face so that every room can read it, and of others."""

__version__ = "0.1.0"


def installed_versions(*packages: str) -> dict[str, str]:
    """Map the name of each installed package among `packages` to its version."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
