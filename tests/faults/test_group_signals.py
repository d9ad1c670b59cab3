"""Signals that reach more than the driver: its process group, as `timeout`, a terminal and schedulers send them, or every process of a run.

The driver alone decides: it saves, ends all others, and the run goes on later as if nothing had been.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from whole_runs import Command, checkpoints_of, command, finish, steps_of, tiny_recipe

from rlcli.checkpoint.find import verify

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

MANY = 500  # steps: more than a run gets to here


def pairs_recipe(folder: Path, model: Path) -> Path:
    rows = [f'{{"prompt": "Say word number {number}.", "chosen": "{number}", "rejected": "no"}}\n' for number in range(32)]
    (folder / "pairs.jsonl").write_text("".join(rows))
    recipe = {
        "model": str(model),
        "data": {"train": str(folder / "pairs.jsonl"), "max_tokens": 128, "max_prompt_tokens": 96},
        "train": {"steps": MANY, "batch_pairs": 16, "micro_batch_tokens": 1024, "dtype": "float32"},
        "checkpoint": {"every": 0},
        "run": {"dir": str(folder / "runs"), "name": "run"},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "tiny.yaml"


def recipe_of(kind: str, folder: Path, model: Path) -> Path:
    """A recipe that saves nothing unless the run is stopped."""
    if kind == "dpo":
        return pairs_recipe(folder, model)
    return tiny_recipe(folder, model, train={"steps": MANY}, checkpoint={"every": 0})


@pytest.mark.parametrize("kind", ["dapo", "dpo"])
def test_a_run_whose_every_process_was_asked_to_stop_has_saved_and_goes_on(kind: str, tmp_path: Path, tiny_model_factory: Callable[..., Path]) -> None:
    run = tmp_path / "runs" / "run"
    with command("train", kind, "--recipe", str(recipe_of(kind, tmp_path, tiny_model_factory("qwen2")))) as running:
        running.until_step(run, 2)
        assert in_the_session_of_the_driver(running) == []
        for process in running.family()[1:]:  # as a scheduler does it that asks each; all others are quicker than the driver
            process.send_signal(signal.SIGTERM)
        running.signal_group(signal.SIGTERM)
        assert running.wait() == 3, running.output
        assert running.leftovers() == []
        output = running.output
    step = steps_of(run)[-1]["step"]
    assert f"stopped: stopped after step {step} of {MANY} (signal SIGTERM); go on with: msrl resume --ckpt {run}" in output
    (saved,) = checkpoints_of(run)
    assert saved.name == f"step-{step:08d}"
    assert verify(saved) == []
    finish("resume", "--ckpt", str(run), f"train.steps={step + 2}")
    assert [row["step"] for row in steps_of(run)] == list(range(1, step + 3))
    assert (run / "final" / "config.json").is_file()


def in_the_session_of_the_driver(running: Command) -> list[str]:
    """Processes that a signal to the driver's group or session may reach. The driver of these tests leads a session of its own."""
    return [" ".join(process.cmdline()) for process in running.family() if process.pid != running.process.pid and os.getsid(process.pid) == running.process.pid]


def test_a_second_sigterm_ends_at_once(tmp_path: Path, tiny_model_factory: Callable[..., Path]) -> None:
    """Here while the engines start, which takes seconds, so that no safe point comes before it."""
    with command("train", "dapo", "--recipe", str(recipe_of("dapo", tmp_path, tiny_model_factory("qwen2")))) as running:
        running.until(lambda: running.has("ray::RolloutWorker"), "the start of an engine")
        running.signal_group(signal.SIGTERM)
        running.until(lambda: "SIGTERM: the run saves" in running.output, "an answer to the first")
        time.sleep(0.7)  # longer than what counts as an echo of the first
        running.signal_group(signal.SIGTERM)
        assert running.wait() == 1, running.output  # there is no checkpoint to go on from
        assert running.leftovers() == []
        assert "error: ended at once, asked a second time; there is no checkpoint yet: start again" in running.output
