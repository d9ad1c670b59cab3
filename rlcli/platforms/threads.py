"""How the CPU cores of one machine are shared out among the processes of one role.

Colocated roles take turns, so every role gets all the cores, divided by the processes of that role alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rlcli.errors import UserError


@dataclass(frozen=True, slots=True)
class Threads:
    """The cores of one worker: one tuple of core numbers for each of its ranks (a training rank is its own worker)."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Threads of one rank."""
        return len(self.ranks[0])

    @property
    def cores(self) -> tuple[int, ...]:
        """All cores of the worker, ascending."""
        return tuple(sorted({core for rank in self.ranks for core in rank}))


def allowed_cores(limit: int = 0) -> list[int]:
    """Cores that this process may run on, ascending; the first `limit` of them, or all (0).

    Raises UserError where `limit` asks for more than there are.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if limit > len(cores):
        raise UserError(f"cluster.threads={limit}, but this process may use only {len(cores)} cores: lower it, or set 0 for all of them")
    return cores[: limit or len(cores)]


def share(cores: Sequence[int], workers: int, ranks: int = 1) -> list[Threads]:
    """Share `cores` out among `workers` of one role, each of `ranks` processes that compute at the same time.

    Every process gets neighbouring cores, as many as any other; with more processes than cores they are dealt in turn.
    """
    processes = workers * ranks
    each = max(1, len(cores) // processes)
    dealt = [tuple(cores[(i * each + k) % len(cores)] for k in range(each)) for i in range(processes)]
    return [Threads(tuple(dealt[i * ranks : (i + 1) * ranks])) for i in range(workers)]


def ranges(cores: Sequence[int]) -> str:
    """Core numbers in the kernel's list form: 0,1,2,5 -> "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
