"""Advantages, by hand."""

import math

import numpy as np
import pytest

from rlcli.algorithms.advantage import advantages


def test_group_norm_by_hand():
    # rewards 1, -1, -1, -1: mean -0.5, deviations 1.5, -0.5 x 3; Bessel variance (2.25 + 0.75) / 3 = 1
    assert advantages([1, -1, -1, -1]).tolist() == [1.5, -0.5, -0.5, -0.5]
    # rewards 0, 1: mean 0.5, Bessel variance 0.25 + 0.25 = 0.5
    np.testing.assert_allclose(advantages([0, 1]), [-0.5 / math.sqrt(0.5), 0.5 / math.sqrt(0.5)], rtol=1e-15)


def test_group_mean_and_rloo_by_hand():
    assert advantages([1, 0, 0, 0], "group_mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    # each against the mean of the other three: 1 - 0, and 0 - 1/3
    np.testing.assert_allclose(advantages([1, 0, 0, 0], "rloo"), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-15)


@pytest.mark.parametrize("kind", ["group_norm", "group_mean", "rloo"])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [-1.0] * 16])
def test_nothing_to_compare_gives_exact_zeros(kind, rewards):
    out = advantages(rewards, kind)
    assert out.dtype == np.float64
    assert out.tolist() == [0.0] * len(rewards)


def test_floor_bounds_nearly_equal_rewards():
    # deviations of +-5e-9 over a floor of 1e-3: 5e-6, where the group's own std would give +-0.7
    np.testing.assert_allclose(advantages([1.0, 1.0 + 1e-8], std_floor=1e-3), [-5e-6, 5e-6], rtol=1e-6)


def test_float64_keeps_small_differences_on_large_rewards():
    # in float32 100000.001 and 100000.002 are the same number
    np.testing.assert_allclose(advantages([100000.001, 100000.002], "group_mean"), [-0.0005, 0.0005], rtol=1e-6)


def test_refuses_nonsense():
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, float("nan")])
    with pytest.raises(ValueError, match="one of group_norm"):
        advantages([1.0], "norm")
