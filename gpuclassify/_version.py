"""Version of this package, in a module that every folder may import, and of other packages."""

__version__ = "0.1.0"


def installed_versions(*packages: str) -> dict[str, str]:
    """Map each of `packages` (names of distributions, as for pip) that is installed to its version.

    Packages that are not installed are omitted.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
