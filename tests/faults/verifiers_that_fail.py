"""Verifiers of a user's own that go wrong in every way, for `reward.verifiers=[verifiers_that_fail:NAME]`."""

from __future__ import annotations

import time
from typing import Any


def moody(text: str, truth: str, extra: dict[str, Any]) -> float:
    """Fails on every fourth length, hangs on the next, gives what is no number on a third, and judges the rest."""
    kind = sum(text.encode()) % 4
    if kind == 0:
        raise RuntimeError("moody today")
    if kind == 1:
        time.sleep(600)
    if kind == 2:
        return float("nan")
    return 1.0


def boundless(text: str, truth: str, extra: dict[str, Any]) -> float:
    """Finite scores whose mean is not: advantages, loss and gradient come out as NaN."""
    return 1.7e308 if any("a" <= letter <= "h" for letter in text) else -1.7e308
