"""Installs packages for `make`, and changes no version that somebody else has installed.

``python tests/environment.py ARGUMENT...`` passes the arguments to ``pip install`` in its own
environment. ``.`` and ``.[EXTRA]`` are this checkout, editable. Versions are those of
constraints.txt; but a package that was installed, or changed, by anything other than this file
keeps its version, because jobs that are running may use it. A copy of the checkout that somebody
has installed stays, too: then only its requirements are installed.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

ROOT, PREFIX = Path(__file__).parents[1], Path(sys.prefix)
RECORD, CONSTRAINTS = PREFIX / "installed-by-make.json", PREFIX / "constraints.txt"
PACKAGE = "gpuclassify"
# Packages that a new environment has in some version, and that no running job uses.
SEEDED = ("pip", "setuptools", "wheel")


def normal(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return the versions of all packages of this environment, by name."""
    lines = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"],
        check=True,
        capture_output=True,
    ).stdout
    return {normal(known["name"]): known["version"] for known in json.loads(lines)}


def has_copy() -> bool:
    """Return whether somebody has installed the package, not as an editable one."""
    try:
        origin = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return not json.loads(origin or "{}").get("dir_info", {}).get("editable")


def required(extras: Iterable[str]) -> Iterator[str]:
    """Yield the requirements of the checkout, with these extras."""
    from tests.lowest import requirements

    for one in requirements(extras):
        if one.name == PACKAGE:
            yield from required(one.extras)
        else:
            yield str(one)


def arguments(words: Iterable[str]) -> Iterator[str]:
    """Yield pip's arguments, with the checkout in place of ``.``."""
    for word in words:
        checkout = re.fullmatch(r"\.(?:\[(.*)\])?", word)
        if checkout and has_copy():
            yield from required(filter(None, (checkout[1] or "").split(",")))
        elif checkout:
            yield from ("--editable", f"{ROOT}{word[1:]}")
        else:
            yield word


def main(words: list[str]) -> int:
    """Install, and record the versions that this file has installed."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept = {name: v for name, v in installed().items() if recorded.get(name) != v}
    for name in (PACKAGE, *SEEDED):
        kept.pop(name, None)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in pinned if normal(line.partition("==")[0]) not in kept]
    lines += [f"{name}=={version}" for name, version in kept.items()]
    CONSTRAINTS.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*command, "--constraint", CONSTRAINTS, *arguments(words)], check=False)
    by_make = {name: v for name, v in installed().items() if name not in kept}
    RECORD.write_text(json.dumps(by_make, indent=1))
    return done.returncode


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
