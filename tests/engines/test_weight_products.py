"""Weight gradients that go straight into their float32 buffer: narrow, ordinary and very wide layers, the first and later passes of an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcli.engines import grads

TOKENS = 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 24), (24, 8), (8, 8), (grads.TILE + 70, 16), (2 * grads.TILE, 16)])
def test_products_add_up_and_padding_stays_zero(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    passes = [(torch.randn(TOKENS, outputs, generator=generator).to(dtype), torch.randn(TOKENS, inputs, generator=generator).to(dtype)) for _ in range(2)]
    param: Any = torch.nn.Parameter(torch.zeros(outputs + 5, inputs, dtype=dtype))
    param.main_grad = torch.full((outputs + 5, inputs), 7.0)  # of the update before
    grads.start(param)
    for grad, x in passes:
        grads.add_product(param, grad, x)
    want = sum(grad.double().t() @ x.double() for grad, x in passes)
    torch.testing.assert_close(param.main_grad[:outputs].double(), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=0.2 if dtype == torch.bfloat16 else 1e-4)
    assert not param.main_grad[outputs:].any()
