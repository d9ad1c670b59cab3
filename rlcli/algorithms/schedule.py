"""The learning rate of each step."""

from __future__ import annotations

import math

from rlcli.config.schema import OptimConfig


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of step number `step` (from 0) of `total_steps`.

    Linear warm-up reaches `lr` at step `warmup_steps`: step 0 already learns, with lr / (warmup_steps + 1).
    After it `constant` stays, and `cosine` falls to `min_lr` at the last step (SGDR, arXiv 1608.03983, Eq. 5, without restarts).
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    if optim.schedule == "constant":
        return optim.lr
    span = max(total_steps - 1 - optim.warmup_steps, 1)
    progress = min((step - optim.warmup_steps) / span, 1.0)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
