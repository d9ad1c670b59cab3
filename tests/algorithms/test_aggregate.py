"""Token weights, by hand: two groups, three samples that count, one masked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.algorithms.aggregate import KINDS, token_weights

LENGTHS = [[2, 0], [3, 5]]  # 10 tokens


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [[0.1, 0.0], [0.1, 0.1]]),
        ("prompt_mean", [[1 / 4, 0.0], [1 / 16, 1 / 16]]),  # 1/2 over groups, then 2 and 8 tokens
        ("seq_mean", [[1 / 6, 0.0], [1 / 9, 1 / 15]]),  # 1/3 over samples, then 2, 3 and 5 tokens
        ("seq_sum", [[1 / 60, 0.0], [1 / 60, 1 / 60]]),  # 3 samples x 20
    ],
)
def test_by_hand(kind, expected):
    assert token_weights(kind, LENGTHS, 20) == [pytest.approx(row, rel=1e-15) for row in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_trainable(kind):
    assert token_weights(kind, [[0, 0], [], [0]], 8) == [[0.0, 0.0], [], [0.0]]


@given(st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=6), st.sampled_from(KINDS))
def test_means_sum_to_one_and_masked_parts_change_nothing(lengths, kind):
    weights = token_weights(kind, lengths, 50)
    total = sum(weight * length for row, counts in zip(weights, lengths, strict=True) for weight, length in zip(row, counts, strict=True))
    if kind == "seq_sum":
        assert total <= 1 + 1e-9
    else:
        assert total == pytest.approx(1.0 if any(map(sum, lengths)) else 0.0)
    padded = token_weights(kind, [[*counts, 0] for counts in lengths] + [[0, 0]], 50)
    assert [row[:-1] for row in padded[:-1]] == weights


def test_unknown_kind():
    with pytest.raises(ValueError, match="token_mean"):
        token_weights("mean", [[1]], 1)
