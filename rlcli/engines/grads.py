"""Float32 gradient buffers that are never cleared: the first gradient of an update overwrites what was there, the others are added.

Clearing and then adding would pass over every buffer twice more, and adding bfloat16 to float32 makes a float32 copy first.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def start(param: Any) -> None:
    """A new update: what stands in the buffer counts no more."""
    param.stale = True


def add(param: Any, grad: Tensor, rows: int | None = None) -> None:
    """Add `grad` to the parameter's `main_grad`; rows: it is that of the first so many rows, and 0 for the rest."""
    count = len(grad) if rows is None else rows
    if getattr(param, "stale", False):
        param.main_grad[:count].copy_(grad)
        param.main_grad[count:].zero_()
        param.stale = False
    else:
        param.main_grad[:count].add_(grad)


def take(param: Any) -> None:
    """As a hook after autograd's last word on `param.grad`: move it into the buffer. None came where the head added its own."""
    if param.grad is not None:
        add(param, param.grad)
        param.grad = None


def finish(param: Any) -> None:
    """All passes are done: a parameter that had no part in them has no gradient."""
    if param.stale:
        param.main_grad.zero_()
        param.stale = False
