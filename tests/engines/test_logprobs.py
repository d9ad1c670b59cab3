"""The head in chunks against a plain log_softmax over whole logits in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import launch

from rlcli.engines import logprobs as module
from rlcli.engines.logprobs import head_logprobs

N, H, V, PADDED = 23, 16, 101, 104


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight with three rows of padding that would win every softmax, targets, and a gradient of each output."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, H, generator=g), torch.randn(PADDED, H, generator=g)
    weight[V:] = 1e4
    targets = torch.randint(0, V, (N,), generator=g)
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(N, generator=g), torch.randn(N, generator=g)


def plain(entropy_grad: bool, temperature: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and weight, all in float64."""
    hidden, weight, targets, grad_l, grad_e = inputs(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    every = torch.log_softmax(hidden @ weight[:V].t() / temperature, -1)
    chosen, entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    total = (chosen * grad_l).sum() + ((entropy * grad_e).sum() if entropy_grad else 0)
    total.backward()
    return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]


def chunked(entropy_grad: bool, temperature: float, chunk: int, dtype: torch.dtype = torch.float32, **shard: Any) -> list[torch.Tensor]:
    hidden, weight, targets, grad_l, grad_e = inputs(dtype)
    first, rows, size = shard.get("first", 0), shard.get("rows", V), shard.get("size", PADDED)
    weight = weight[first : first + size]
    hidden, weight = hidden.requires_grad_(), weight.detach().clone().requires_grad_()
    chosen, entropy = head_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, entropy_grad=entropy_grad, first=first, rows=rows, group=shard.get("group")
    )
    assert chosen.dtype == entropy.dtype == torch.float32
    assert entropy.requires_grad == entropy_grad
    total = (chosen * grad_l).sum() + ((entropy * grad_e).sum() if entropy_grad else 0)
    total.backward()
    return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_equals_log_softmax(entropy_grad: bool, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3 * V)  # three tokens at a time, so that blocks do not fit chunks evenly
    for got, want in zip(chunked(entropy_grad, temperature, chunk), plain(entropy_grad, temperature), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-5, rtol=2e-5)


def test_bfloat16_is_as_near_as_its_logits_are() -> None:
    """Logits of size 4 to 10 are rounded to 8 bits, by up to 0.03; log-probs and entropies are off by no more than a few of those."""
    got, want = chunked(True, 1.0, 7, torch.bfloat16), plain(True, 1.0, torch.bfloat16)
    assert float((got[0] - want[0]).abs().max()) < 0.08
    assert float((got[1] - want[1]).abs().max()) < 0.08
    for mine, exact in zip(got[2:], want[2:], strict=True):
        assert float((mine - exact).norm() / exact.norm()) < 0.02


def test_padding_gets_no_gradient_and_a_gradient_buffer_takes_the_weights() -> None:
    hidden, weight, targets, grad_l, _ = inputs()
    want = chunked(False, 1.0, 7)[3]
    assert not want[V:].any()
    weight.requires_grad_()
    weight.main_grad = torch.ones(PADDED, H)  # type: ignore[attr-defined]
    (head_logprobs(hidden, weight, targets, chunk=7, rows=V)[0] * grad_l).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + want)  # type: ignore[attr-defined]


def test_no_logits_of_all_tokens_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that autograd or the passes ask for is smaller than [N, V]."""
    sizes: list[int] = []
    real = module.shifted
    monkeypatch.setattr(module, "shifted", lambda logits, *rest: sizes.append(logits.numel()) or real(logits, *rest))
    hidden, weight, targets, grad_l, _ = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        out = head_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk=4, rows=V)[0]
    (out * grad_l).sum().backward()
    assert max(sizes) == max(weight.numel(), 4 * V)
    assert max(sizes) < N * V


def slices(rank: int, world: int, folder: Path) -> list[Any]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    size = PADDED // world
    rows = max(0, min(V - rank * size, size))
    out = [chunked(entropy, 0.6, 7, first=rank * size, rows=rows, size=size, group=dist.group.WORLD) for entropy in (False, True)]
    dist.destroy_process_group()
    return out


@pytest.mark.engine
def test_vocabulary_slices_give_the_same(tmp_path: Path) -> None:
    """Four tensor ranks of 26 rows, the last with three of padding: log-probs, entropies and hidden gradients everywhere, each its weight rows."""
    answers = launch(slices, 4, tmp_path)
    for which, entropy_grad in enumerate((False, True)):
        want = plain(entropy_grad, 0.6)
        for rank, answer in enumerate(answers):
            got = answer[which]
            for mine, exact in zip(got[:3], want[:3], strict=True):
                np.testing.assert_allclose(mine.numpy(), exact.numpy(), atol=2e-5, rtol=2e-5)
            np.testing.assert_allclose(got[3].numpy(), want[3][rank * 26 : (rank + 1) * 26].numpy(), atol=2e-5, rtol=2e-5)
