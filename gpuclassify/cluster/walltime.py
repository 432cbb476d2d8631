"""Slurm's ways to write a time limit."""

import re

# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
# days-hours:minutes and days-hours:minutes:seconds.
WITHOUT_DAYS = re.compile(
    r"(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)|(?P<only>\d+))"
)
WITH_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?")
UNLIMITED = ("infinite", "unlimited")
SECONDS = {"days": 86_400, "hours": 3_600, "minutes": 60, "only": 60, "seconds": 1}


def parse_walltime(walltime: str) -> int | None:
    """Seconds of a time limit as Slurm writes it; None is no limit.

    Raises
    ------
    ValueError
        It is in none of Slurm's forms, or is no time at all.
    """
    text = str(walltime).strip().lower()
    if text in UNLIMITED:
        return None
    match = WITHOUT_DAYS.fullmatch(text) or WITH_DAYS.fullmatch(text)
    seconds = 0
    if match:
        parts = match.groupdict(default="0")
        seconds = sum(int(number) * SECONDS[unit] for unit, number in parts.items())
    if seconds <= 0:
        raise ValueError(
            f'walltime={walltime!r} is no time limit of Slurm\'s: give minutes ("30"), '
            '"hours:minutes:seconds" or "days-hours:minutes:seconds"'
        )
    return seconds
