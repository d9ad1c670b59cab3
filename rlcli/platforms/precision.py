"""The same bits from a CPU's mathematical functions whichever thread asks first.

torch's wheels compute cos, exp, sqrt and their like by oneMKL, which looks at the processor when it is first asked for one of them. Where two
threads ask first, one may compute its part of that call with a kernel of half the digits (relative errors of 1e-4; oneMKL before 2025.0,
github.com/pytorch/pytorch/issues/188792). A rotary table made by such a call stays so for the life of a process, and its run is no longer
repeatable bit for bit. `settle` asks once for each function, on one thread.
"""

from __future__ import annotations

FUNCTIONS = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2",
    "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)

_settled = False


def settle() -> None:
    """To be called in a process that computes with torch, before it does; a second call does nothing."""
    global _settled
    if _settled:
        return
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")  # a single element stays on the calling thread
        for name in FUNCTIONS:
            getattr(torch, name)(one)
    _settled = True


def settled() -> bool:
    """Whether this process has done so."""
    return _settled
