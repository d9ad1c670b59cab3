"""Advantages of a group's samples: how much better each was than the others drawn from the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KINDS = ("group_norm", "group_mean", "rloo")


def advantages(rewards: Sequence[float], kind: str = "group_norm", std_floor: float = 1e-6) -> npt.NDArray[np.float64]:
    """Advantages [G] of one group, in float64 from the rewards on.

    group_norm: (reward - mean) / max(std, std_floor), std with Bessel's correction (DeepSeekMath, arXiv 2402.03300; DAPO Eq. 9).
    group_mean: reward - mean (Dr.GRPO, arXiv 2503.20783).
    rloo: reward - mean of the other samples' rewards (arXiv 2402.14740).

    A group of one, and one whose rewards are all equal, gives exact zeros: it says nothing about what is better.
    Raises ValueError for an unknown kind and for rewards that are not finite.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown advantage {kind!r}; one of {', '.join(KINDS)}")
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, not {rewards_G.tolist()}")
    size = len(rewards_G)
    if size < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros(size)
    centred_G = rewards_G - rewards_G.mean()
    if kind == "group_mean":
        return centred_G
    if kind == "rloo":
        return centred_G * (size / (size - 1))
    return centred_G / max(float(rewards_G.std(ddof=1)), std_floor)
