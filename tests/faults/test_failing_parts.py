"""Runs whose verifiers or numbers fail: nothing of it is silent, nothing reaches the weights, and what happened can be looked into."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from whole_runs import checkpoints_of, finish, rows_of, steps_of, tiny_recipe, weights_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"}


@pytest.fixture
def model(tiny_model_factory: Callable[..., Path]) -> Path:
    return tiny_model_factory("qwen2")


def test_a_verifier_that_crashes_hangs_and_gives_nan_is_counted_and_truncated_batches_make_no_update(model: Path, tmp_path: Path) -> None:
    """Of each 4 samples about one crashes, one hangs, one has the score NaN. Nearly all are cut at 2 tokens and masked: nothing to train on is left."""
    own = {"verifiers": ["verifiers_that_fail:moody"], "options": [], "timeout_s": 0.3, "workers": 4}
    settings = {"train": {"steps": 2}, "dapo": {"mask_truncated": True}, "rollout": {"max_response_tokens": 2}, "sampling": {"enabled": False}}
    recipe = tiny_recipe(tmp_path, model, reward=own, **settings)
    output = finish("train", "dapo", "--recipe", str(recipe), env=HERE)
    run = tmp_path / "runs" / "run"
    steps = steps_of(run)
    assert len(steps) == 2
    for row in steps:
        assert row["update/empty"] == float(row["batch/truncated"] == 1.0) == 1 - row["update/updates"]
        assert row["reward/timeout"] > 0
        assert row["reward/crashed"] > 0
        assert row["reward/correct"] + row["reward/wrong"] + row["reward/timeout"] + row["reward/crashed"] == row["sampled/samples"]
        assert None not in [value for name, value in row.items() if name.startswith(("batch/", "sampled/"))]
        assert f"step {row['step']}: of {row['sampled/samples']:.0f} samples, {row['reward/timeout']:.0f} were not judged within reward.timeout_s" in output
    assert "moody today" in output or "nan" in output
    assert sum(row["update/empty"] for row in steps) > 0
    assert all(np.isfinite(tensor).all() for tensor in weights_of(run / "final").values())


def test_updates_that_are_not_finite_are_skipped_kept_and_in_the_end_stop_the_run(model: Path, tmp_path: Path) -> None:
    own = {"verifiers": ["verifiers_that_fail:boundless"], "options": []}
    recipe = tiny_recipe(tmp_path, model, reward=own, train={"steps": 5, "max_nonfinite": 2})
    output = finish("train", "dapo", "--recipe", str(recipe), env=HERE, code=1)
    run = tmp_path / "runs" / "run"
    assert "step 1: loss or gradient is not finite" in output
    assert "the update was skipped" in output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "step 2: loss or gradient is not finite" in error
    assert "2 in a row, train.max_nonfinite=2" in error
    assert f"msrl resume --ckpt {run}" in error
    (row,) = steps_of(run)
    assert (row["update/skipped"], row["update/updates"], row["update/skipped_in_all"]) == (1, 0, 1)
    faults = [rows_of(path) for path in sorted((run / "faults").glob("*.jsonl"))]
    assert [len(rows) for rows in faults] == [4, 4]
    assert all(len(row["responses"]) == 4 and len(row["prompt_token_ids"]) > 0 for rows in faults for row in rows)
    assert json.loads((run / "run.json").read_text())["state"] == "failed"
    assert checkpoints_of(run)
