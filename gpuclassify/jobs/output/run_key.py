"""The key of a run, which is part of the names of all its files, and whether it is current."""

from __future__ import annotations

import posixpath
import re

from gpuclassify.jobs.storage import Directory

METADATA = "_gpuclassify"  # readers of datasets pass over names that begin with an underscore
JOB = f"{METADATA}/job.json"
FUNCTION = "function"  # the digest of a stage's code in the identity of a job
KEY_DIGITS = 8
PART_NAME = re.compile(rf"part-\d{{5,}}-([0-9a-f]{{{KEY_DIGITS}}})\.")
_HEAD_BYTES = 64  # of job.json, which begins with the key


class JobChangedError(ValueError):
    """The output directory holds parts of a job with other settings, another model or input."""


def part_name(number: int, count: int, key: str, suffix: str) -> str:
    """The name of one of `count` parts of the run with this key."""
    return f"part-{number:0{max(5, len(str(count - 1)))}d}-{key}{suffix}"


def number_in(name: str) -> int:
    """The number of the part with this name."""
    return int(name.split("-")[1])


def key_in(name: str) -> str | None:
    """The key of the run whose part, record or quarantine file has this name."""
    match = PART_NAME.match(posixpath.basename(name))
    return match[1] if match else None


def check_current(directory: Directory, key: str | None) -> None:
    """Raise unless a directory still belongs to the run with this key; one small read.

    Raises
    ------
    JobChangedError
        Another run has started over there meanwhile, or the metadata is gone.
    """
    path = directory.path(JOB)
    try:  # the whole file names every input file
        head = directory.filesystem.cat_file(path, start=0, end=_HEAD_BYTES)
    except FileNotFoundError:
        raise metadata_gone(directory) from None
    if f'"key": "{key}"'.encode() not in head:
        raise JobChangedError(
            f"another run has started over in {directory}: this one stops, and what it wrote there "
            "does not count. Write to another directory to have the results of both"
        )


def metadata_gone(directory: Directory) -> JobChangedError:
    """What is raised where the metadata of a run is no more."""
    return JobChangedError(
        f"the metadata of this job is gone from {directory}: another run has started over there, "
        "or somebody has removed it. Run the job again, in a directory of its own"
    )
