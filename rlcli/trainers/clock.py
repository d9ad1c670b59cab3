"""Seconds of each stage of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds spent in named stages since the last `read`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - started

    def read(self) -> dict[str, float]:
        """Seconds by stage and of everything since the last reading, as metrics; starts anew."""
        now = time.monotonic()
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        seconds["seconds/step"] = now - self._started
        self._seconds.clear()
        self._started = now
        return seconds
