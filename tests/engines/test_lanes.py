"""Work side by side: the same results as one after another, in order, and torch left as it was."""

from __future__ import annotations

import pytest
import torch

from rlcli.engines.lanes import side_by_side


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_stand_in_order_and_threads_stay_what_they_were(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight = torch.ones(3, requires_grad=True)
    try:
        found = side_by_side(lambda number: (weight * number, torch.get_num_threads()), list(range(20)))
        assert [int(value[0]) for value, _ in found] == list(range(20))
        assert not any(value.requires_grad for value, _ in found)
        assert {count for _, count in found} == {1}
        assert torch.get_num_threads() == threads
        assert torch.is_grad_enabled()
    finally:
        torch.set_num_threads(before)


def test_an_error_comes_through() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        side_by_side(work, list(range(8)))
