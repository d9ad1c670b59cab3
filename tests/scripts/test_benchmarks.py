"""What the demo and the benchmark of DAPO read off a run, and how memory is counted."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rlcli.config.load import load

CHILD = "import sys, time; held = bytearray(64 << 20); held[::4096] = b'x' * len(held[::4096]); print('up', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdin=0); sys.stdin.read()"


def test_the_demo_reads_the_accuracy_of_each_evaluation(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.25}\n{"step": 1, "sampled/reward": 1}\n{"step": 1, "eval/accuracy": 0.5}\n')
    assert script("demo").evaluations(tmp_path) == [(0, 0.25), (1, 0.5)]


def test_the_memory_of_children_counts_and_their_end_is_seen(script: Callable[[str], ModuleType]) -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    memory = script("bench_dapo").Memory(process.pid)
    assert process.stdout.readline() == "up\n"
    memory.look()
    assert memory.peak > 64 << 20
    assert len(memory.known) == 2
    process.stdin.close()  # both end
    process.wait()
    process.stdout.read()
    before = memory.peak
    memory.look()
    assert sum(map(script("benching").private_bytes, memory.known)) == 0  # one may be there still, as a zombie
    assert memory.peak == before


def test_the_ratio_is_that_of_the_median_steps(script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    bench = script("bench_dapo")
    sides = [bench.Side("TRL", [40.0, 36.0, 50.0], 7.5), bench.Side("msrl", [8.0, 30.0, 6.0], 6.0, "update 4.00 s")]
    bench.report(sides, argparse.Namespace(prompts=16, samples=8, cores=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ratio 5.00"
    assert lines[-2].split() == ["msrl", "8.00", "16.00", "6.00", "3", "update", "4.00", "s"]


def test_our_side_is_measured_after_the_warm_up_with_settings_that_exist(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, seen = script("bench_dapo"), []

    def measure(command: list[str], env: dict[str, str], log: Path) -> tuple[list[str], float]:
        config = load("dapo", "demo", [part for part in command if "=" in part]).dapo
        seen.append((config.sampling.enabled, config.train.batch_prompts, config.train.steps, config.data.eval, config.optim.lr))
        folder = Path(config.run.dir) / str(config.run.name)
        folder.mkdir(parents=True)
        rows = [{"step": n, "seconds/step": 10.0 - n, "seconds/rollout": 2.0, "seconds/update": 5.0 + n} for n in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"step": 0, "eval/accuracy": 0.5}, *rows]))
        return [], 6.5

    monkeypatch.setattr(bench, "measure", measure)
    args = argparse.Namespace(model="m", data="d", samples=8, tokens=16, prompts=4, warmup=1, steps=2, settings=["optim.lr=1e-4"])
    side = bench.run_ours(args, tmp_path)
    assert seen == [(False, 4, 3, None, 1e-4)]
    assert (side.seconds, side.step, side.memory) == ([8.0, 7.0], 7.5, 6.5)
    assert side.stages == "rollout 2.00 s, update 7.50 s"
