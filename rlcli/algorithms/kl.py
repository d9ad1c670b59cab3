"""Estimators of KL(p || q) from log-probs of tokens drawn from p (J. Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

CLAMP_NATS = 20.0  # beyond this the exponential overflows before the estimate means anything
K3_CLAMP = 10.0


def k1(logp: Tensor, logq: Tensor) -> Tensor:
    """log p - log q: unbiased, of either sign, large variance."""
    return logp - logq


def k2(logp: Tensor, logq: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance; its gradient is that of the true KL on policy."""
    return 0.5 * (logp - logq).square()


def k3(logp: Tensor, logq: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative, low variance.

    The log-ratio is clamped to +-20 and the value to 10, so that one wild token cannot drown the mean or overflow.
    """
    delta = (logp - logq).clamp(-CLAMP_NATS, CLAMP_NATS)
    return (torch.expm1(-delta) + delta).clamp(max=K3_CLAMP)
