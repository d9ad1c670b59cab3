"""Lengths in tokens: their statistics, and a histogram to look at."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

_COLUMNS = {"prompts": ("prompt",), "pairs": ("prompt", "chosen", "rejected")}


class Lengths:
    """Collects the lengths of a data set's rows, 4 bytes each."""

    def __init__(self, kind: str) -> None:
        self._of = {name: array("i") for name in _COLUMNS[kind]}

    def add(self, item: dict[str, Any]) -> None:
        for name, lengths in self._of.items():
            lengths.append(item[f"{name}_tokens"])

    def summary(self) -> dict[str, dict[str, float]]:
        """min, mean, p50, p90, p99 and max of each column; empty for no rows."""
        return {name: statistics(lengths) for name, lengths in self._of.items() if lengths}


def statistics(lengths: Sequence[int]) -> dict[str, float]:
    values = np.asarray(lengths)
    p50, p90, p99 = (int(value) for value in np.percentile(values, (50, 90, 99), method="higher"))
    return {
        "min": int(values.min()), "mean": round(float(values.mean()), 1), "p50": p50, "p90": p90, "p99": p99,
        "max": int(values.max()), "sum": int(values.sum()),
    }


def histogram(lengths: Sequence[int], bars: int = 12) -> list[tuple[int, int, int]]:
    """(from, to, rows) of equally wide bars over all lengths; `to` inclusive."""
    values = np.asarray(lengths)
    low, high = int(values.min()), int(values.max())
    width = max(1, -(-(high - low + 1) // bars))
    counts = np.bincount((values - low) // width)
    return [(low + i * width, min(high, low + (i + 1) * width - 1), int(count)) for i, count in enumerate(counts)]
