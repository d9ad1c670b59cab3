"""A time budget on the command line, in the forms that people and schedulers write."""

from __future__ import annotations

import re
from typing import Annotated, Optional

import typer

from rlcli.errors import UserError

MaxTime = Annotated[
    Optional[str],
    typer.Option("--max-time", metavar="TIME", help="Time budget, as 90m, 4h, 1h30m or HH:MM:SS: then save, stop and exit with 3. Sets run.max_minutes."),
]
_UNITS = {"d": 1440.0, "h": 60.0, "m": 1.0, "s": 1 / 60}
_WORDS = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")  # Slurm's days-hours:minutes:seconds


def with_budget(overrides: Optional[list[str]], max_time: Optional[str]) -> list[str]:
    """The overrides, and the budget as one of them, last."""
    return [*(overrides or []), *([f"run.max_minutes={minutes(max_time):g}"] if max_time is not None else [])]


def minutes(text: str) -> float:
    """Minutes of "90m", "1h30m", "2d", "45s", "01:30:00" or "1-12:00:00"; UserError for anything else and for no time at all."""
    if clock := _CLOCK.fullmatch(text):
        days, hours, mins, seconds = (int(part or 0) for part in clock.groups())
        found = days * 1440 + hours * 60 + mins + seconds / 60
    elif _WORDS.fullmatch(text):
        found = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", text))
    else:
        raise UserError(f"--max-time {text}: must be a time as 90m, 4h, 1h30m or HH:MM:SS")
    if found <= 0:
        raise UserError(f"--max-time {text}: is no time at all")
    return found
