"""Float32 gradient buffers that are never cleared: the first gradient of an update overwrites what was there, the others are added.

Clearing and then adding would pass over every buffer twice more, and adding bfloat16 to float32 makes a float32 copy first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

Tensor = torch.Tensor

WIDE = 8  # times as many outputs as inputs: a head
TILE = 1024  # columns of a product that are made and added at once, while they are in the cache


def start(param: Any) -> None:
    """A new update: what stands in the buffer counts no more."""
    param.stale = True


def add(param: Any, grad: Tensor) -> None:
    """Add `grad` to the parameter's `main_grad`."""
    add_parts(param, [(slice(0, len(grad)), grad)], len(grad))


def add_product(param: Any, grad_TO: Tensor, input_TI: Tensor) -> None:
    """Add grad' input to `main_grad` [O or more, I]; further rows, which are padding, have a gradient of 0."""
    add_parts(param, products(grad_TO, input_TI), grad_TO.shape[1])


def add_parts(param: Any, parts: Iterable[tuple[slice, Tensor]], count: int) -> None:
    """Add the gradient of the first `count` rows, given as rows and their part of it; it is 0 for the rest."""
    fresh, param.stale = getattr(param, "stale", False), False
    for at, part in parts:
        if fresh:
            param.main_grad[at].copy_(part)
        else:
            param.main_grad[at].add_(part)
    if fresh:
        param.main_grad[count:].zero_()


def products(grad_TO: Tensor, input_TI: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their part of grad' input [O, I]).

    A CPU takes a product that sums over the first dimension of both at half its speed in bfloat16. It is worth laying a factor out anew
    where that is the smaller part of the work: the gradient where it is narrow, the input where the gradient is very wide.
    """
    outputs, inputs = grad_TO.shape[1], input_TI.shape[1]
    slow = grad_TO.device.type == "cpu" and grad_TO.dtype == torch.bfloat16
    if slow and outputs < inputs:
        yield slice(0, outputs), grad_TO.t().contiguous() @ input_TI
    elif slow and outputs > WIDE * inputs:
        input_IT = input_TI.t().contiguous()
        for start in range(0, outputs, TILE):
            at = slice(start, min(start + TILE, outputs))
            yield at, (input_IT @ grad_TO[:, at]).t().contiguous()
    else:
        yield slice(0, outputs), grad_TO.t() @ input_TI


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
