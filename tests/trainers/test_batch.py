"""From judged groups to training rows, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlcli.config.schema import DapoRecipe
from rlcli.trainers.batch import group_metrics, mini_batches, shaped_rewards, training_rows, updates_per_step
from rlcli.types import Group, Prompt, Sample, Verdict


def group(lengths: list[int], correct: list[bool], finish: list[str] | None = None, prompt: int = 3) -> Group:
    reasons = finish or ["stop"] * len(lengths)
    samples = [
        Sample(np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32), reason, 1) for length, reason in zip(lengths, reasons, strict=True)
    ]
    verdicts = [Verdict(1.0 if right else -1.0, right, "7", "correct" if right else "wrong") for right in correct]
    return Group(Prompt(0, np.arange(prompt, dtype=np.int32), "7"), samples, verdicts)


def recipe(**sections: dict[str, object]) -> DapoRecipe:
    config = DapoRecipe(model="m")
    for name, values in sections.items():
        for key, value in values.items():
            setattr(getattr(config, name), key, value)
    return config


def test_the_overlong_penalty_comes_on_top_of_the_score() -> None:
    # limit 10, buffer 4: nothing up to 6 tokens; at 8 tokens (6 - 8) / 4 = -0.5, times the factor 2
    config = recipe(rollout={"max_response_tokens": 10}, reward={"overlong_buffer_tokens": 4, "overlong_penalty": 2.0})
    assert shaped_rewards(group([6, 8], [True, False]), config.reward, config.rollout) == pytest.approx([1.0, -1.0 - 2 * 0.5])


def test_token_mean_weights_span_the_whole_mini_batch() -> None:
    groups = [group([1, 3], [True, False]), group([2, 4], [False, True])]
    rows = training_rows(groups, recipe(), None)
    assert sum(len(values) for row in rows for values in row.fields["weight"]) == 10
    np.testing.assert_allclose(np.concatenate([v for row in rows for v in row.fields["weight"]]), np.full(10, 0.1), rtol=1e-6)


def test_advantages_are_normalised_in_the_group_and_spread_over_its_tokens() -> None:
    (row,) = training_rows([group([2, 3], [True, False])], recipe(), None)
    # rewards 1 and -1: mean 0, Bessel standard deviation sqrt(2)
    np.testing.assert_allclose(row.fields["advantage"][0], np.full(2, 1 / np.sqrt(2)), rtol=1e-6)
    np.testing.assert_allclose(row.fields["advantage"][1], np.full(3, -1 / np.sqrt(2)), rtol=1e-6)
    assert "old_logprobs" not in row.fields


def test_truncated_samples_leave_numerator_and_denominator_when_masked() -> None:
    config = recipe(dapo={"mask_truncated": True})
    (row,) = training_rows([group([2, 4], [True, False], ["stop", "length"])], config, None)
    np.testing.assert_allclose(row.fields["weight"][0], [0.5, 0.5])
    np.testing.assert_allclose(row.fields["weight"][1], np.zeros(4))


def test_old_logprobs_go_with_their_samples() -> None:
    old = [[np.full(2, -1.0, np.float32), np.full(3, -2.0, np.float32)]]
    (row,) = training_rows([group([2, 3], [True, False])], recipe(), old)
    assert [values.tolist() for values in row.fields["old_logprobs"]] == [[-1.0, -1.0], [-2.0, -2.0, -2.0]]


def test_mini_batches_cover_a_partial_batch() -> None:
    config = recipe(train={"batch_prompts": 6, "mini_batch_prompts": 2}, dapo={"epochs": 3})
    groups = [group([1], [True]) for _ in range(5)]
    assert [len(batch) for batch in mini_batches(groups, config)] == [2, 2, 1]
    assert updates_per_step(config) == 9


def test_metrics_are_means_over_samples() -> None:
    groups = [group([2, 4], [True, False], ["stop", "length"]), group([6, 8], [False, False], prompt=5)]
    measured = group_metrics(groups, recipe())
    assert measured["batch/accuracy"] == 0.25
    assert measured["batch/reward"] == -0.5
    assert measured["batch/response_tokens"] == 5.0
    assert measured["batch/response_tokens_max"] == 8.0
    assert measured["batch/prompt_tokens"] == 4.0
    assert measured["batch/truncated"] == 0.25
    assert group_metrics([], recipe()) == {}
