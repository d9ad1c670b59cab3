"""Packed attention against a plain softmax with the whole mask in float64, for short segments, long ones, and both together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlcli.data.pack import pack
from rlcli.engines import attention
from rlcli.engines.attention import Batch, Blocks, attend, plan
from rlcli.engines.packed import Segment, to_tensors
from rlcli.types import TrainRow

K, R, D = 2, 3, 32
Shape = tuple[int, tuple[int, ...]]

CASES: dict[str, list[Shape]] = {
    "equal": [(9, (3, 4))] * 5,
    "uneven": [(9, (3, 4)), (4, (1,)), (30, (2, 2, 2)), (10, (3, 3)), (9, ()), (1, (1, 1, 1))],
    "long": [(70, (5, 90, 33)), (3, (200,))],
    "both": [(9, (3, 4)), (70, (5, 90, 1)), (8, (4, 4)), (9, (3, 4))],
}


def segments_of(shapes: list[Shape]) -> list[Segment]:
    out, start = [], 0
    for prompt, responses in shapes:
        out.append(Segment(start, prompt, responses))
        start += out[-1].length
    return out


def whole_mask(shapes: list[Shape]) -> torch.Tensor:
    """[T, T]: written out token by token."""
    owner = [(s, r) for s, (prompt, responses) in enumerate(shapes) for r, n in enumerate((prompt, *responses)) for _ in range(n)]
    return torch.tensor([[k <= q and owner[k][0] == owner[q][0] and owner[k][1] in (0, owner[q][1]) for k in range(len(owner))] for q in range(len(owner))])


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    scores = torch.einsum("ktrd,ksd->krts", q, k) * scale
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
    return torch.einsum("krts,ksd->tkrd", weights, v).flatten(1)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_softmax(name: str, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and the gradients of queries, keys and values."""
    monkeypatch.setattr(attention, "DENSE", 1000 if dense else 0)
    monkeypatch.setattr(attention, "SHORT", 40)
    monkeypatch.setattr(attention, "BLOCK", 32)
    shapes = CASES[name]
    segments = segments_of(shapes)
    tokens = segments[-1].start + segments[-1].length
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(*size, D, generator=g) for size in ((K, tokens, R), (K, tokens), (K, tokens)))
    upstream = torch.randn(tokens, K * R * D, generator=g)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = plain(*exact, whole_mask(shapes), 0.2)
    (want * upstream).sum().backward()
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    how = plan(segments, torch.ones(tokens, 1, 1, D // 2), torch.zeros(tokens, 1, 1, D // 2), R, torch.float32)
    kinds = {"equal": {Batch}, "uneven": {Batch}, "long": {Blocks}, "both": {Batch, Blocks}}
    assert {type(part) for part in how.parts} == kinds[name]
    got = attend(*mine, how, 0.2)
    (got * upstream).sum().backward()
    np.testing.assert_allclose(got.detach().numpy(), want.detach().numpy(), atol=1e-5, rtol=1e-5)
    for a, b in zip(mine, exact, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), atol=2e-5, rtol=2e-5)


def test_equal_segments_need_no_reordering_and_one_mask() -> None:
    segments = segments_of(CASES["equal"])
    how = plan(segments, torch.ones(80, 1, 1, 4), torch.zeros(80, 1, 1, 4), R, torch.float32)
    assert how.gather is None
    (part,) = how.parts
    assert isinstance(part, Batch)
    assert part.mask.shape == (1, 1, 16 * R, 16)


def test_no_mask_of_a_long_segment_is_square() -> None:
    """16,000 tokens: the masks of its blocks are views of one tensor of BLOCK rows."""
    (part,) = plan([Segment(0, 8000, (8000,))], torch.ones(16000, 1, 1, 4), torch.zeros(16000, 1, 1, 4), R, torch.bfloat16).parts
    assert isinstance(part, Blocks)
    assert part.mask.shape == (attention.BLOCK, 16000 + attention.BLOCK)


def test_layout_of_a_shared_and_an_unshared_row_by_hand() -> None:
    row = TrainRow(
        np.array([1, 2, 3], np.int32),
        [np.array([4, 5], np.int32), np.array([6], np.int32)],
        {"weight": [np.array([0.5, 0.25], np.float32), np.array([2.0], np.float32)]},
    )
    shared = to_tensors(pack([row], 1, 100, "on")[0][0])
    assert shared.ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert shared.positions_T.tolist() == [0, 1, 2, 3, 4, 3]
    assert shared.segments == [Segment(0, 3, (2, 1))]
    assert shared.source_N.tolist() == [2, 3, 2]
    unshared = to_tensors(pack([row], 1, 100, "off")[0][0])
    assert unshared.ids_T.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6]
    assert unshared.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert unshared.segments == [Segment(0, 3, (2,)), Segment(5, 3, (1,))]
    assert unshared.source_N.tolist() == [2, 3, 7]
    for packed in (shared, unshared):
        assert packed.targets_N.tolist() == [4, 5, 6]
        assert packed.sample_N.tolist() == [0, 0, 1]
        assert packed.row_S.tolist() == [0, 0]
        assert packed.fields["weight"].tolist() == [0.5, 0.25, 2.0]
