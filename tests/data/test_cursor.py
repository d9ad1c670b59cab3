"""The cursor: every row once an epoch, and an exact return to any place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.cursor import Cursor, epoch_order
from rlcli.errors import UserError

SIZES = st.integers(1, 30)
TAKES = st.lists(st.integers(0, 70), max_size=8)


@given(SIZES, st.integers(0, 5), st.booleans(), TAKES)
def test_epochs_hold_every_row_once(n: int, seed: int, shuffle: bool, takes: list[int]) -> None:
    cursor = Cursor(n, seed, shuffle)
    walked = [row for k in takes for row in cursor.take(k)]
    assert len(walked) == sum(takes) == cursor.taken
    for begin in range(0, len(walked) - n + 1, n):
        assert sorted(walked[begin : begin + n]) == list(range(n))
    rest = walked[len(walked) - len(walked) % n :]
    assert len(set(rest)) == len(rest)
    assert (cursor.epoch, cursor.position) == divmod(len(walked), n)


@given(SIZES, st.integers(0, 5), TAKES, TAKES)
def test_restored_goes_on_alike(n: int, seed: int, before: list[int], after: list[int]) -> None:
    cursor = Cursor(n, seed)
    for k in before:
        cursor.take(k)
    restored = Cursor.restore(json.loads(json.dumps(cursor.state())), n)
    assert [restored.take(k) for k in after] == [cursor.take(k) for k in after]
    assert restored.state() == cursor.state()


@given(SIZES, st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_the_walk_does_not_depend_on_how_it_is_cut(n: int, takes: list[int]) -> None:
    pieces = Cursor(n, 3)
    assert [row for k in takes for row in pieces.take(k)] == Cursor(n, 3).take(sum(takes))


def test_epoch_edge_is_the_next_epochs_beginning() -> None:
    cursor = Cursor(4, seed=2)
    first = cursor.take(4)
    assert (cursor.epoch, cursor.position) == (1, 0)
    second = Cursor.restore(cursor.state()).take(4)
    assert sorted(first) == sorted(second) == [0, 1, 2, 3]


def test_orders_differ_by_epoch_and_seed_and_stay_as_they_are() -> None:
    orders = [epoch_order(8, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    # pinned: a release that changes this breaks every resumed run
    assert epoch_order(8, 1, 0, True).tolist() == PINNED
    assert epoch_order(3, 1, 7, False).tolist() == [0, 1, 2]


PINNED = [2, 4, 7, 5, 0, 6, 3, 1]


def test_other_data_is_refused() -> None:
    with pytest.raises(UserError, match="a data set of 5 rows, this one has 6"):
        Cursor.restore(Cursor(5).state(), 6)
    with pytest.raises(UserError, match="damaged"):
        Cursor.restore(Cursor(5).state() | {"position": 5})
    with pytest.raises(UserError, match="no rows"):
        Cursor(0)
