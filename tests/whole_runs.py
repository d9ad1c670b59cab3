"""Whole runs of `msrl` on a tiny model: a recipe that trains in seconds, the command in a process of its own, and what it left behind.

Every run gets a mark in its environment, which all its processes inherit, and a folder of its own for temporary files: so a test can find
each process and each file of just this run, whatever else the machine does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

MARK = "MSRL_TEST_MARK"
SCREENS = "MSRL_TEST_SCREENS"  # names a folder that keeps what each command printed
ROOT = Path(__file__).resolve().parent.parent
# Of a step, what the clock and the neighbours decide.
UNSTEADY = ("time", "seconds/", "rate/", "memory/")


def tiny_recipe(folder: Path, model: Path, prompts: int = 6, **sections: dict[str, Any]) -> Path:
    """Write rows and a recipe into `folder`; `sections` are merged into it. A random model finds one of eight letters about every fifth time."""
    rows = [{"prompt": f"Say word number {number}.", "answer": str(number)} for number in range(prompts)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "eval.jsonl").write_text("".join(line.replace("word", "name") for line in lines[:3]))
    recipe: dict[str, Any] = {
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_prompt_tokens": 96},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8, "max_running_samples": 16, "probe_prompts": 1},
        "reward": {"verifiers": ["regex"], "weights": [1.0], "options": ["regex.pattern=[a-h]"], "workers": 1},
        "train": {"steps": 6, "batch_prompts": 4, "micro_batch_tokens": 1024, "dtype": "float32", "deterministic": True, "seed": 3},
        "optim": {"lr": 2e-4},
        "eval": {"before": False, "after": False, "samples_per_prompt": 4},
        "checkpoint": {"every": 1, "keep_last": 3},
        "run": {"dir": str(folder / "runs"), "name": "run"},
        "cluster": {"heartbeat_s": 20.0},
    }
    for name, settings in sections.items():
        recipe[name] = {**recipe.get(name, {}), **settings}
    recipe["model"] = str(model)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def pair_recipe(folder: Path, model: Path, data: Path, **sections: dict[str, Any]) -> Path:
    """Write a recipe of `msrl train dpo` into `folder` that learns from the demo's pairs in `data`; `sections` are merged into it."""
    recipe: dict[str, Any] = {
        "model": str(model),
        "data": {"train": str(data / "pairs.train.jsonl"), "eval": str(data / "pairs.test.jsonl"), "max_tokens": 256, "max_prompt_tokens": 224},
        "train": {"steps": 8, "batch_pairs": 16, "micro_batch_tokens": 1024, "dtype": "float32", "deterministic": True},
        "optim": {"lr": 3e-4, "weight_decay": 0.0},
        "eval": {"every": 2},
        # The margin rises, so the smallest one is that of the first checkpoint, which the newest would push out.
        "checkpoint": {"every": 2, "keep_last": 1, "keep_best": "-eval/margin"},
        "run": {"dir": str(folder / "runs"), "name": "run"},
    }
    for name, settings in sections.items():
        recipe[name] = {**recipe.get(name, {}), **settings}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "tiny.yaml"


class Command:
    """One `msrl` command in a process of its own. `program`: python's arguments that run msrl."""

    def __init__(self, *args: str, cwd: Path | None = None, env: dict[str, str] | None = None, program: tuple[str, ...] = ("-m", "rlcli.app")) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="mt", dir="/tmp"))  # short: Ray's sockets lie below
        self.log = self.temporary.with_suffix(".out")
        own = {MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *program, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def family(self) -> list[psutil.Process]:
        """Every live process that carries this run's mark, the driver first."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return sorted(found, key=lambda process: (process.pid != self.process.pid, process.create_time()))

    def has(self, words: str) -> bool:
        """Whether a process with `words` in its command line is there."""
        return any(words in " ".join(_command_line(process)) for process in self.family())

    def member(self, words: str) -> psutil.Process:
        """The process whose command line holds `words`."""
        return next(process for process in self.family() if words in " ".join(_command_line(process)))

    def until(self, ready: Callable[[], bool], what: str, seconds: float = 400.0) -> None:
        """Wait for something that the run is to do; it must not have ended."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode} before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def until_step(self, run: Path, step: int) -> None:
        """Wait until a step is recorded."""
        self.until(lambda: any(row["step"] >= step for row in steps_of(run)), f"step {step}")

    def signal_group(self, number: int) -> None:
        """As a terminal does it: to every process of the group."""
        os.killpg(self.process.pid, number)

    def wait(self, seconds: float = 400.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {seconds} s:\n{self.output}") from None

    def leftovers(self, seconds: float = 20.0) -> list[str]:
        """Processes and files that are still there so long after the end."""
        deadline = time.monotonic() + seconds
        while (found := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _leftovers(self) -> list[str]:
        processes = [f"process {process.pid} {' '.join(_command_line(process))[:80]}" for process in self.family()]
        files = [str(path) for path in self.temporary.iterdir()] + [str(path) for path in Path("/dev/shm").glob(f"msrl-weights-{self.process.pid}-*")]
        return processes + files

    def clean(self) -> None:
        """End what is left, and remove the temporary files."""
        for process in self.family():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        if screens := os.environ.get(SCREENS):
            test = os.environ.get("PYTEST_CURRENT_TEST", "run").split("::")[-1].split(" ")[0]
            Path(screens).mkdir(parents=True, exist_ok=True)
            shutil.copy(self.log, Path(screens) / f"{test}-{self.mark[:6]}.txt")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.log.unlink(missing_ok=True)


@contextmanager
def command(*args: str, **how: Any) -> Iterator[Command]:
    """A running command; whatever happens, nothing of it outlives the block."""
    running = Command(*args, **how)
    try:
        yield running
    finally:
        running.clean()


def finish(*args: str, cwd: Path | None = None, env: dict[str, str] | None = None, code: int = 0) -> str:
    """Run a command to its end; checks the exit code and that nothing is left, and returns what it printed."""
    with command(*args, cwd=cwd, env=env) as running:
        assert running.wait() == code, running.output
        assert running.leftovers() == []
        return running.output


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a jsonl file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The rows of finished steps, without those of evaluations."""
    return [row for row in rows_of(run / "metrics.jsonl") if "seconds/step" in row]


def steady(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what the clock decides."""
    return [{name: value for name, value in row.items() if not name.startswith(UNSTEADY)} for row in rows]


def samples_of(run: Path) -> list[dict[str, Any]]:
    return rows_of(run / "samples" / "train.jsonl")


def weights_of(folder: Path) -> dict[str, Any]:
    """All tensors of a HF folder."""
    from safetensors.numpy import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def differences(one: Path, other: Path) -> list[str]:
    """Where two finished runs differ, bit for bit: metrics of every step and evaluation, samples, final weights. Empty where nowhere."""
    found = []
    for name in ("metrics.jsonl", "samples/train.jsonl", "samples/eval.jsonl"):
        ours, theirs = steady(rows_of(one / name)), steady(rows_of(other / name))
        if len(ours) != len(theirs):
            found.append(f"{name}: {len(ours)} rows and {len(theirs)}")
        for mine, its in zip(ours, theirs, strict=False):
            keys = [key for key in {**mine, **its} if mine.get(key) != its.get(key)]
            if keys:
                found.append(f"{name}, step {mine['step']}: {keys[0]} is {mine.get(keys[0])} and {its.get(keys[0])}, and {len(keys) - 1} more")
                break
    ours, theirs = weights_of(one / "final"), weights_of(other / "final")
    unequal = [name for name in {**ours, **theirs} if name not in ours or name not in theirs or ours[name].tobytes() != theirs[name].tobytes()]
    return found + ([f"final weights: {unequal[0]} and {len(unequal) - 1} more differ"] if unequal else [])


def checkpoints_of(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@dataclass(frozen=True)
class Finished:
    """A run that nothing disturbed: its folder, what it printed, the model it began with, and the recipe's own settings."""

    run: Path
    output: str
    model: Path
    settings: dict[str, dict[str, Any]]


# Several updates a step, two passes, few prompts: surplus groups in flight, ends of epochs within a step.
THOROUGH: dict[str, dict[str, Any]] = {"train": {"steps": 16, "mini_batch_prompts": 2}, "dapo": {"epochs": 2}, "eval": {"before": True, "after": True}}


def run_undisturbed(folder: Path, model: Path) -> Finished:
    """Train the thorough recipe to its end."""
    settings = {name: dict(values) for name, values in THOROUGH.items()}
    recipe = tiny_recipe(folder, model, **settings)
    output = finish("train", "dapo", "--recipe", str(recipe))
    return Finished(folder / "runs" / "run", output, model, settings)
