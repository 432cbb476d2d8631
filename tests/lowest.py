"""Writes the lowest versions that setup.cfg allows as constraints for `make test-lowest`."""

import configparser
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

# Of those that the contract's tests run; others are for hardware, clusters and pages.
EXTRAS = ("crossfit", "dedup", "fasttext", "s3", "safety", "sentencepiece", "signals", "train")


def requirements(extras: Iterable[str] = EXTRAS) -> Iterator[Requirement]:
    """What the package needs itself, and for these extras."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[1] / "setup.cfg")
    lists = [config["options"]["install_requires"]]
    lists += [config["options.extras_require"][name] for name in extras]
    yield from map(Requirement, filter(None, "\n".join(lists).splitlines()))


def lowest(requirement: Requirement) -> str:
    """The lowest version of its range."""
    (version,) = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    return version


if __name__ == "__main__":
    sys.stdout.writelines(f"{each.name}=={lowest(each)}\n" for each in requirements())
