"""One run, broken off in every way there is and resumed each time: what a user is told, what is left behind, and that in the end nothing differs.

The tests of this module are one story, in order: each resumes the run as the one before left it. The last finishes it and compares it with
a run that nothing disturbed, bit for bit. The instants of the blows are random.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from whole_runs import THOROUGH, Command, Finished, checkpoints_of, command, differences, finish, steps_of, tiny_recipe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

RANK, ROLLOUT, ENGINE_CORE = "ray::Host", "ray::RolloutWorker", "VLLM::EngineCore"


class Story:
    """The run that is broken off again and again."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.recipe = tiny_recipe(folder, model, **{name: dict(values) for name, values in THOROUGH.items()})
        self.run = folder / "runs" / "run"
        self.seed = random.SystemRandom().randrange(10**6)
        self.random = random.Random(self.seed)

    def go_on(self, *overrides: str) -> list[str]:
        """The command that begins the run, or resumes it."""
        if checkpoints_of(self.run):
            return ["resume", "--ckpt", str(self.run), *overrides]
        shutil.rmtree(self.run, ignore_errors=True)
        return ["train", "dapo", "--recipe", str(self.recipe), *overrides]

    def saved(self) -> int:
        return max((int(path.name.split("-")[1].split(".")[0]) for path in checkpoints_of(self.run)), default=0)

    def reach(self, running: Command, steps: int = 1) -> None:
        """Wait until some more steps and a checkpoint are done, and then for a random instant of the step after."""
        begun = self.saved()
        running.until(lambda: self.saved() >= begun + steps, f"checkpoint {begun + steps} (seed {self.seed})")
        time.sleep(self.random.uniform(0.0, 1.0) * steps_of(self.run)[-1]["seconds/step"])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model_factory: Callable[..., Path]) -> Story:
    return Story(tmp_path_factory.mktemp("story"), tiny_model_factory("qwen2"))


@pytest.mark.parametrize(("words", "name"), [(RANK, "train rank 0"), (ROLLOUT, "rollout engine 0"), (ENGINE_CORE, "rollout engine 0")])
def test_a_killed_worker_ends_the_run_and_is_named(story: Story, words: str, name: str) -> None:
    with command(*story.go_on()) as running:
        story.reach(running)
        running.member(words).send_signal(signal.SIGKILL)
        assert running.wait() == 1, running.output
        assert running.leftovers() == []
        errors = [line for line in running.output.splitlines() if line.startswith("error: ")]
        assert "was not saved" not in running.output  # a save that it dies in ends the run too, by the same error
    assert errors, running.mark
    assert errors[0].startswith("error: step ")
    assert name in errors[0]
    assert any("last words" in line or "it wrote nothing" in line for line in errors)
    assert f"msrl resume --ckpt {story.run}" in errors[-1]
    assert checkpoints_of(story.run)


def test_a_frozen_rank_is_found_by_its_silence(story: Story) -> None:
    with command(*story.go_on("cluster.heartbeat_s=3")) as running:
        story.reach(running)
        rank = running.member(RANK)
        rank.send_signal(signal.SIGSTOP)
        assert running.wait() == 1, running.output
        assert running.leftovers() == []
        error = next(line for line in running.output.splitlines() if line.startswith("error: "))
        assert "was not saved" not in running.output
    assert "train rank 0 gives no sign of life for 3 s" in error
    assert error.startswith("error: step ")


def test_kill_9_of_the_driver_leaves_nothing(story: Story) -> None:
    with command(*story.go_on()) as running:
        story.reach(running)
        running.process.kill()
        running.wait()
        assert running.leftovers(20.0) == []


def test_ctrl_c_saves_and_stops(story: Story) -> None:
    """As a terminal does it: every process of the group gets the signal."""
    with command(*story.go_on()) as running:
        story.reach(running)
        running.signal_group(signal.SIGINT)
        assert running.wait() == 3, running.output
        assert running.leftovers() == []
        output = running.output
    step = steps_of(story.run)[-1]["step"]
    assert f"stopped: stopped after step {step} of 16 (signal SIGINT); go on with: msrl resume --ckpt {story.run}" in output
    assert story.saved() == step
    assert len(list(story.run.glob(f"checkpoints/step-{step:08d}*"))) == 1  # the one that was due anyway


def test_sigterm_saves_and_stops_even_before_the_first_step(story: Story) -> None:
    before = story.saved()
    with command(*story.go_on()) as running:
        running.until(lambda: running.has(ENGINE_CORE), "the engine's start")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 3, running.output
        assert running.leftovers() == []
        assert f"stopped after step {before} of 16 (signal SIGTERM)" in running.output
    assert story.saved() == before


def test_ctrl_c_twice_ends_at_once(story: Story) -> None:
    with command(*story.go_on()) as running:
        running.until(lambda: running.has(ENGINE_CORE), "the engine's start")
        running.signal_group(signal.SIGINT)
        running.until(lambda: "SIGINT: the run saves" in running.output, "an answer to the first Ctrl-C")
        time.sleep(0.7)  # longer than what counts as an echo of the first
        running.signal_group(signal.SIGINT)
        assert running.wait() == 3, running.output
        assert running.leftovers() == []
        assert f"ended at once, asked a second time; go on from step-{story.saved():08d}" in running.output


def test_the_finished_run_equals_an_undisturbed_one(story: Story, undisturbed: Finished) -> None:
    """Its newest checkpoint is damaged first: the one before is taken, and it says so."""
    *_, good, newest = checkpoints_of(story.run)
    spoil(next(newest.rglob("*.distcp")))
    output = finish(*story.go_on())
    assert f"checkpoint {newest.name} is damaged" in output
    assert "taking the one before" in output
    assert f"from {good}" in output
    assert differences(story.run, undisturbed.run) == []


@pytest.mark.skipif(not os.environ.get("MSRL_TORTURE"), reason="kills at random instants take minutes: set MSRL_TORTURE=1")
def test_a_few_rounds_of_torture(script: Callable[..., ModuleType], tmp_path: Path, undisturbed: Finished) -> None:
    """Two kills of a random process at random instants, one resume each; `scripts/torture_resume.py --rounds 100` does the same at length."""
    torture = script("torture_resume")
    recipe = tiny_recipe(tmp_path, undisturbed.model, **undisturbed.settings)
    assert torture.torture(torture.Target("dapo", recipe, tmp_path / "runs" / "run"), undisturbed.run, rounds=2, seed=random.SystemRandom().randrange(10**6))


def spoil(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
