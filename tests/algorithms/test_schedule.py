"""Learning rates by hand."""

from __future__ import annotations

import pytest

from rlcli.algorithms.schedule import learning_rate
from rlcli.config.schema import OptimConfig


def rates(optim: OptimConfig, steps: int) -> list[float]:
    return [learning_rate(step, optim, steps) for step in range(steps)]


def test_constant_without_warmup_is_constant() -> None:
    assert rates(OptimConfig(lr=3.0), 4) == [3.0, 3.0, 3.0, 3.0]


def test_warmup_is_linear_and_the_first_step_already_learns() -> None:
    # three warm-up steps: quarters of the peak, which step 3 reaches
    assert rates(OptimConfig(lr=4.0, warmup_steps=3), 5) == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_cosine_starts_at_the_peak_and_ends_at_the_minimum() -> None:
    got = rates(OptimConfig(lr=2.0, min_lr=1.0, schedule="cosine"), 5)
    # 1 + (1 + cos(pi k / 4)) / 2 for k = 0 .. 4
    assert got == pytest.approx([2.0, 1.8535533905932737, 1.5, 1.1464466094067263, 1.0])


def test_cosine_after_warmup_spans_what_is_left() -> None:
    got = rates(OptimConfig(lr=2.0, schedule="cosine", warmup_steps=2), 5)
    assert got == pytest.approx([2 / 3, 4 / 3, 2.0, 1.0, 0.0])


def test_beyond_the_last_step_it_stays_at_the_minimum() -> None:
    assert learning_rate(50, OptimConfig(lr=2.0, min_lr=0.5, schedule="cosine"), 5) == pytest.approx(0.5)
