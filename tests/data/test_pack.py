"""Packing: every response exactly once, the bound never exceeded, the same micro-batches each time, even ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.data.pack import MicroBatch, cut, fill, pack, spread, unpack
from rlcli.errors import UserError
from rlcli.types import TrainRow

BOUND = 60


def row_of(prompt: int, lengths: list[int], start: int = 0, splittable: bool = True) -> TrainRow:
    """A row whose tokens are all different, so that every one of them can be followed."""
    numbers = itertools.count(start)
    responses = [np.array([next(numbers) for _ in range(length)], np.int32) for length in lengths]
    fields = {"number": [response.astype(np.float32) for response in responses]}
    return TrainRow(np.arange(prompt, dtype=np.int32), responses, fields, splittable)


@st.composite
def many_rows(draw: st.DrawFn) -> list[TrainRow]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=0, max_size=6)), max_size=12))
    return [row_of(prompt, lengths, start=1000 * i) for i, (prompt, lengths) in enumerate(shapes)]


def computed(batch: MicroBatch) -> int:
    """Tokens of a micro-batch, counted from its rows."""
    total = 0
    for piece, row in zip(batch.pieces, batch.rows, strict=True):
        prompts = 1 if piece.shared else len(row.responses)
        total += len(row.prompt) * prompts + sum(len(response) for response in row.responses)
    return total


@given(many_rows(), st.integers(1, 5), st.sampled_from(["auto", "on", "off"]))
@settings(max_examples=150, deadline=None)
def test_every_response_is_packed_once_within_the_bound(rows: list[TrainRow], ranks: int, sharing: str) -> None:
    packed = pack(rows, ranks, BOUND, sharing)
    batches = [batch for share in packed for batch in share]
    assert len(packed) == ranks
    for batch in batches:
        assert 0 < computed(batch) == batch.tokens <= BOUND
    seen = [token for batch in batches for row in batch.rows for response in row.responses for token in response.tolist()]
    assert sorted(seen) == sorted(token for row in rows for response in row.responses for token in response.tolist())
    for piece, row in ((piece, row) for batch in batches for piece, row in zip(batch.pieces, batch.rows, strict=True)):
        assert row.prompt.tolist() == rows[piece.row].prompt.tolist()
        assert [values.tolist() for values in row.fields["number"]] == [response.tolist() for response in row.responses]
    again = pack(rows, ranks, BOUND, sharing)
    assert [[batch.pieces for batch in share] for share in again] == [[batch.pieces for batch in share] for share in packed]


@given(many_rows(), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_unpacking_gives_every_token_its_value(rows: list[TrainRow], ranks: int) -> None:
    batches = [batch for share in pack(rows, ranks, BOUND) for batch in share]
    values = [np.concatenate([np.asarray(r, np.float32) for row in batch.rows for r in row.responses]) for batch in batches]
    got = unpack(rows, batches, values)
    assert [[a.tolist() for a in row] for row in got] == [[r.tolist() for r in row.responses] for row in rows]


def test_unpacking_refuses_a_response_without_values() -> None:
    rows = [row_of(3, [2]), row_of(3, [2])]
    batches = [batch for share in pack(rows[:1], 1, BOUND) for batch in share]
    with pytest.raises(ValueError, match="do not cover"):
        unpack(rows, batches, [np.zeros(2, np.float32)])


def test_sharing_computes_the_prompt_once() -> None:
    rows = [row_of(10, [2, 3, 4])]
    assert [batch.tokens for batch in pack(rows, 1, BOUND, "on")[0]] == [10 + 9]
    assert [batch.tokens for batch in pack(rows, 1, BOUND, "off")[0]] == [3 * 10 + 9]
    assert [batch.tokens for batch in pack(rows, 1, BOUND, "auto")[0]] == [19]


def test_a_row_over_the_bound_is_parted_between_responses() -> None:
    """Prompt 10, bound 25: 15 response tokens a part. 9 + 6 and 8 + 7 fit exactly."""
    parts = cut(0, row_of(10, [9, 8, 7, 6]), 25)
    assert sorted(part.responses for part in parts) == [(0, 3), (1, 2)]
    assert [part.tokens for part in parts] == [25, 25]


def test_a_pair_is_never_parted() -> None:
    pair = row_of(10, [9, 8], splittable=False)
    assert len(cut(0, pair, 27)) == 1
    with pytest.raises(UserError, match=r"row 3 needs 27 tokens .* raise it to at least 27"):
        cut(3, pair, 26)


def test_a_response_over_the_bound_is_refused_with_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"row 0 needs 61 tokens .*micro_batch_tokens=60.*at least 61"):
        pack([row_of(20, [41, 3])], 1, BOUND)
    assert pack([row_of(20, [40, 3])], 1, BOUND)


def test_an_empty_prompt_is_refused_and_a_row_without_responses_is_left_out() -> None:
    with pytest.raises(UserError, match="row 1 has an empty prompt"):
        pack([row_of(1, [2]), row_of(0, [2])], 1, BOUND)
    assert pack([row_of(5, []), row_of(5, [0, 0])], 2, BOUND) == [[], []]


def test_karmarkar_karp_by_hand() -> None:
    """8, 7, 6, 5, 4 on two ranks. Largest differences: 8-7=1, 6-5=1, 4-1=3, 3-1=2; the sums end 16 and 14."""
    costs = [8, 7, 6, 5, 4]
    sums = sorted(sum(costs[i] for i in share) for share in spread(costs, 2))
    assert sums == [14, 16]


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_ranks_differ_by_no_more_than_the_largest_item(costs: list[float], ranks: int) -> None:
    shares = spread(costs, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    sums = [sum(costs[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs) + 1e-9


def test_long_sequences_weigh_more_than_their_tokens() -> None:
    """One row of 400 tokens against ten of 40: the same tokens, but far more attention, so it does not stand for all ten."""
    rows = [row_of(200, [200])] + [row_of(20, [20]) for _ in range(10)]
    light, heavy = (pack(rows, 2, 1000, pair_cost=cost) for cost in (0.0, 1.0))
    assert sorted(sum(len(batch.pieces) for batch in share) for share in light) == [1, 10]
    assert [piece.row for batch in heavy[0] for piece in batch.pieces] == [0]
    assert pack(rows, 1, 1000, pair_cost=1.0)[0][0].pieces[0].cost == 400 + 200 * 201 / 2 + 200 * (200 + 201 / 2)


@given(st.lists(st.integers(1, 60), max_size=40))
@settings(max_examples=100, deadline=None)
def test_bins_are_few(sizes: list[int]) -> None:
    """No two bins would fit into one: best-fit decreasing opens a bin only where nothing fits."""
    bins = fill(sizes, 60)
    loads = sorted(sum(sizes[i] for i in members) for members in bins)
    assert all(load <= 60 for load in loads)
    assert all(a + b > 60 for a, b in itertools.pairwise(loads))
