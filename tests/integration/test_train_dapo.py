"""`msrl train dapo` as a user runs it, on a tiny model: everything a run leaves, the same at other layouts, measured again by `msrl eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from whole_runs import Finished, checkpoints_of, finish, rows_of, samples_of, steps_of, tiny_recipe, weights_of

from rlcli.platforms import allocator
from rlcli.runs.metrics import MEANINGS, meaning

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

# What a step always has, beside counts and seconds.
ALWAYS = {
    "sampled/reward", "sampled/accuracy", "sampled/response_tokens", "sampled/truncated", "sampling/sampled", "sampling/trained",
    "sampling/dropped_all_right", "sampling/dropped_all_wrong", "sampling/dropped_stale", "sampling/carried_out", "sampling/acceptance",
    "batch/reward", "batch/reward_shaped", "batch/accuracy", "batch/response_tokens", "batch/truncated",
    "update/loss", "update/entropy", "update/clip_low", "update/clip_high", "update/kl", "update/ratio", "update/gap", "update/grad_norm",
    "update/lr", "update/updates", "update/skipped", "rate/rollout_tokens_per_s", "rate/update_tokens_per_s", "rate/trained_tokens_per_s",
    "seconds/step", "seconds/rollout", "seconds/update", "seconds/sync", "memory/all_gib", "sync/probe_gap",
}  # fmt: skip


def test_the_run_says_what_it_does(undisturbed: Finished) -> None:
    lines = undisturbed.output.splitlines()
    allocator_line = f"allocator of the workers: {allocator.find('auto').note}"
    assert lines[:4] == [f"run folder {undisturbed.run}", allocator_line, "6 training prompts", "3 held-out prompts"]
    assert f"the trained model is in {undisturbed.run / 'final'}" in undisturbed.output
    assert "Traceback" not in undisturbed.output


def test_the_folder_is_complete(undisturbed: Finished) -> None:
    run = undisturbed.run
    state = json.loads((run / "run.json").read_text())
    assert (state["kind"], state["state"], state["step"], state["total"]) == ("dapo", "finished", 16, 16)
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["mini_batch_prompts"] == 2
    (start,) = json.loads((run / "environment.json").read_text())
    assert {"torch", "ray", "megatron-core"} <= set(start["packages"])
    assert start["allocator"] == allocator.find("auto").note
    assert (run / "report.html").stat().st_size > 1000
    assert [path.name for path in checkpoints_of(run)] == ["step-00000014", "step-00000015", "step-00000016"]
    assert (run / "logs" / "train-rank-0.log").is_file()
    assert not list(run.glob("faults/*"))


def test_every_step_has_every_metric_and_each_is_explained(undisturbed: Finished) -> None:
    steps = steps_of(undisturbed.run)
    assert [row["step"] for row in steps] == list(range(1, 17))
    for row in steps:
        needed = ALWAYS if row["sampling/sampled"] else {name for name in ALWAYS if not name.startswith("sampled/") and name != "sampling/acceptance"}
        assert set(row) >= needed
        assert all(meaning(name) for name in row if name not in ("step", "time"))
        assert all(math.isfinite(row[name]) for name in needed)
        assert row["update/updates"] == 4  # 4 prompts in mini-batches of 2, twice
        assert row["update/lr"] == 2e-4
        assert row["sampling/sampled"] == sum(value for name, value in row.items() if name.startswith("sampling/dropped") and "stale" not in name) + (
            row["sampling/trained"] + row["sampling/carried_out"] + row["sampling/dropped_stale"] - row["sampling/carried_in"]
        )
    assert len(set(ALWAYS) - set(MEANINGS)) == 0


def test_the_updates_of_a_step_move_away_from_its_start(undisturbed: Finished) -> None:
    """Four updates against the log-probs at the step's start: the ratio leaves 1, and some tokens reach the clip."""
    steps = steps_of(undisturbed.run)
    assert all(row["update/ratio_max"] > 1.001 for row in steps)
    assert max(row["update/clip_high"] + row["update/clip_low"] for row in steps) > 0
    assert all(row["update/gap"] < 5e-3 for row in steps[:1])
    assert all(row["sync/probe_gap"] < 1e-3 for row in steps)


def test_the_filter_and_the_surplus_were_at_work(undisturbed: Finished) -> None:
    """The seed and the data are chosen so that steps drop groups, carry groups over, and cross the end of an epoch."""
    steps = steps_of(undisturbed.run)
    assert sum(row["sampling/dropped_all_wrong"] + row["sampling/dropped_all_right"] for row in steps) > 0
    assert sum(row["sampling/carried_in"] for row in steps) > 0
    assert sum(row["sampling/sampled"] for row in steps) > 10 * 6


def test_samples_show_text_verdict_and_place(undisturbed: Finished) -> None:
    rows = samples_of(undisturbed.run)
    assert {row["step"] for row in rows} == set(range(1, 17))
    for row in rows:
        assert row["prompt"].startswith("user\nSay word number")
        assert row["correct"] == any("a" <= letter <= "h" for letter in row["response"])
        assert 0 < row["group_correct"] < row["group_samples"] == 4
    assert {row["step"] for row in rows_of(undisturbed.run / "samples" / "eval.jsonl")} == {0, 16}


def test_the_final_model_loads_in_transformers_and_has_learnt(undisturbed: Finished) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = undisturbed.run / "final"
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(final)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Say word number 1."}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model(**ids).logits.isfinite().all()
    before, after = weights_of(undisturbed.model), weights_of(final)
    assert before.keys() == after.keys()
    assert all(not np.array_equal(before[name], after[name]) for name in before)
    first, last = (np.mean([row["sampled/accuracy"] for row in part]) for part in (steps_of(undisturbed.run)[:4], steps_of(undisturbed.run)[-4:]))
    assert last > first


def test_eval_of_the_run_agrees_with_the_trainings_own(undisturbed: Finished) -> None:
    """The same prompts, seeds, weights and batches: the very same samples, and so the same figures."""
    out = finish("eval", "--run", str(undisturbed.run), "--json", "--out", str(undisturbed.run.parent / "eval.jsonl"))
    measured = json.loads(out.splitlines()[-1])
    after = rows_of(undisturbed.run / "metrics.jsonl")[-1]
    assert after["when"] == "after"
    assert {f"eval/{name}": value for name, value in measured.items()} == {name: value for name, value in after.items() if name.startswith("eval/")}
    rows = rows_of(undisturbed.run.parent / "eval.jsonl")
    seen = {(row["prompt_id"], row["response"]) for row in rows_of(undisturbed.run / "samples" / "eval.jsonl") if row["step"] == 16}
    assert len(rows) == 12
    assert seen
    assert seen <= {(row["prompt_id"], row["response"]) for row in rows}


CLOSE = {"update/loss": 1e-3, "update/entropy": 1e-4, "update/grad_norm": 1e-2, "sampled/accuracy": 1e-9, "batch/reward": 1e-9}


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, tolerance in CLOSE.items():
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name


def test_other_layouts_train_alike_and_resume_each_other(tiny_model_factory: Callable[..., Path], undisturbed: Finished, tmp_path: Path) -> None:
    """TP=2 for two steps, PP=2 for a third, DP=2 for a fourth: the steps of one device, up to the order of floating-point sums."""
    recipe = tiny_recipe(tmp_path, tiny_model_factory("qwen2"), **{**undisturbed.settings, "eval": {"before": False, "after": False}})
    run = tmp_path / "runs" / "run"
    finish("train", "dapo", "--recipe", str(recipe), "train.steps=2", "parallel.devices=2", "parallel.tensor=2")
    finish("resume", "--ckpt", str(run), "train.steps=3", "parallel.tensor=1", "parallel.pipeline=2")
    finish("resume", "--ckpt", str(run), "train.steps=4", "parallel.pipeline=1")
    steps, reference = steps_of(run), steps_of(undisturbed.run)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert_close(steps[0], reference[0])
    for ours, theirs in zip(steps[1:], reference[1:4], strict=True):
        assert ours["update/entropy"] == pytest.approx(theirs["update/entropy"], rel=0.05)
        assert ours["sync/probe_gap"] < 1e-3
    layouts = [json.loads((path / "manifest.json").read_text())["layout"] for path in checkpoints_of(run)]
    assert [(layout["tensor"], layout["pipeline"], layout["data"]) for layout in layouts] == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
