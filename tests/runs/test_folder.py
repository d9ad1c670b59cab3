"""The run folder: what is written, what survives a crash, what a resumed run finds."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlcli.config.load import load
from rlcli.errors import StoppedEarly, UserError
from rlcli.runs import environment, jsonl
from rlcli.runs.folder import RunFolder, read_state
from rlcli.types import Group, Prompt, Sample, Verdict


def config(tmp_path: Path, *overrides: str) -> Any:
    return load("dapo", None, ["model=m", "data.train=d", "train.steps=4", f"run.dir={tmp_path / 'runs'}", *overrides]).config


def group(correct: list[bool], number: int = 0) -> Group:
    """One prompt "5 6" whose samples are [number, 7] and so on, right or wrong as asked."""
    samples = [Sample(np.array([n, 7], np.int32), np.array([-0.5, -1.5], np.float32), "stop", 3) for n in range(len(correct))]
    verdicts = [Verdict(1.0 if right else -1.0, right, str(n), "correct" if right else "wrong") for n, right in enumerate(correct)]
    return Group(Prompt(number, np.array([5, 6], np.int32), "42"), samples, verdicts)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_leaves_its_configuration_environment_metrics_and_state(tmp_path: Path) -> None:
    out = io.StringIO()
    with RunFolder.create(config(tmp_path, "run.name=first"), "dapo", "demo", environment.describe(platform="cpu"), out) as run:
        run.log_eval(0, {"accuracy": 0.25, "pass@4": 0.5}, "before")
        run.log_step(1, {"sampled/reward": 0.125, "seconds/step": 2.5})
    assert run.path == tmp_path / "runs" / "first"
    assert yaml.safe_load((run.path / "config.yaml").read_text())["train"]["steps"] == 4
    start = json.loads((run.path / "environment.json").read_text())[0]
    assert start["platform"] == "cpu"
    assert start["packages"]["numpy"] == np.__version__
    first, second = rows(run.path / "metrics.jsonl")
    assert (first["step"], first["when"], first["eval/accuracy"], first["eval/pass@4"]) == (0, "before", 0.25, 0.5)
    assert (second["step"], second["sampled/reward"]) == (1, 0.125)
    state = read_state(run.path)
    assert (state["kind"], state["recipe"], state["state"], state["step"], state["total"]) == ("dapo", "demo", "finished", 1, 4)
    assert "evaluation before: 25.0% right, 50.0% pass@4" in out.getvalue()
    assert "1/4" in (run.path / "logs" / "run.log").read_text()
    assert (run.path / "report.html").is_file()


def test_metrics_are_exact_and_strict_json(tmp_path: Path) -> None:
    appender = jsonl.Appender(tmp_path / "m.jsonl")
    appender.append({"third": 1 / 3, "nan": math.nan, "inf": -math.inf, "text": "é\ud800"})
    line = (tmp_path / "m.jsonl").read_text(encoding="utf-8")
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"third": 1 / 3, "nan": None, "inf": None, "text": "é?"}


def test_rows_are_on_disk_when_the_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from rlcli.runs.jsonl import Appender; a = Appender(pathlib.Path(sys.argv[1]));"
        "[a.append({'step': n}) for n in range(50)]; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.jsonl")], check=False)
    assert done.returncode == -9
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == list(range(50))


def test_resuming_sets_later_rows_and_a_torn_line_aside_and_goes_on(tmp_path: Path) -> None:
    settings = config(tmp_path, "run.name=r")
    with RunFolder.create(settings, "dapo", out=io.StringIO()) as run:
        for step in (1, 2, 3):
            run.log_step(step, {"sampled/reward": step / 10})
            run.log_samples(step, [group([True, False])])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "sampled/rew')
    assert [row["step"] for row in jsonl.read(run.path / "metrics.jsonl")] == [1, 2, 3]

    out = io.StringIO()
    with RunFolder.reopen(run.path, settings, 2, out=out) as again:
        again.log_step(3, {"sampled/reward": 0.9})
    assert [(row["step"], row["sampled/reward"]) for row in rows(run.path / "metrics.jsonl")] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert [row["step"] for row in rows(run.path / "samples" / "train.jsonl")] == [1, 1, 2, 2]
    aside = (run.path / "metrics.jsonl.set-aside").read_text().splitlines()
    assert json.loads(aside[0])["sampled/reward"] == 0.3
    assert aside[1] == '{"step": 4, "sampled/rew'
    assert "4 lines of metrics and samples after step 2 were set aside" in out.getvalue()
    assert [start["step"] for start in json.loads((run.path / "environment.json").read_text())] == [0, 2]


def test_how_a_run_ended_is_recorded(tmp_path: Path) -> None:
    faults = (StoppedEarly("time is up"), KeyboardInterrupt(), RuntimeError("rank 1 died"))
    expected = (("stopped", "time is up"), ("stopped", "KeyboardInterrupt"), ("failed", "rank 1 died"))
    for fault, (state, message) in zip(faults, expected, strict=True):
        with pytest.raises(type(fault)), RunFolder.create(config(tmp_path), "dapo", out=io.StringIO()) as run:
            raise fault
        found = read_state(run.path)
        assert (found["state"], found["message"]) == (state, message)


def test_a_name_that_is_taken_is_refused_and_our_own_names_get_a_number(tmp_path: Path) -> None:
    named = config(tmp_path, "run.name=mine")
    RunFolder.create(named, "dapo", out=io.StringIO()).finish()
    with pytest.raises(UserError, match=r"run\.name=mine: .*mine exists already; choose another run\.name, or go on with it: msrl resume"):
        RunFolder.create(named, "dapo", out=io.StringIO())
    paths = []
    for _ in range(3):
        run = RunFolder.create(config(tmp_path), "dapo", "a/b", out=io.StringIO())
        run.finish()
        paths.append(run.path)
    assert len(set(paths)) == 3
    assert all(path.name.startswith("a-b-") for path in paths)


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    settings = config(tmp_path)
    settings.run.name = name
    with pytest.raises(UserError, match="is no folder name"):
        RunFolder.create(settings, "dapo", out=io.StringIO())


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    settings = config(tmp_path)
    run = RunFolder.create(settings, "dapo", out=io.StringIO())
    with pytest.raises(UserError, match="in use by another run"):
        RunFolder.reopen(run.path, settings, 0, out=io.StringIO())
    run.finish()
    RunFolder.reopen(run.path, settings, 0, out=io.StringIO()).finish()


def test_a_folder_of_something_else_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run folder: it has no run\.json"):
        read_state(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        read_state(tmp_path)


def test_samples_show_right_and_wrong_first_up_to_the_limit(tmp_path: Path) -> None:
    groups = [group([False, False, True], 1), group([True, True, True], 2), group([False, True, False], 3)]
    with RunFolder.create(config(tmp_path, "run.save_samples=4"), "dapo", out=io.StringIO()) as run:
        run.decode = lambda tokens: " ".join(f"<{token}>" for token in tokens)
        run.log_samples(1, groups)
    found = rows(run.path / "samples" / "train.jsonl")
    assert [(row["prompt_id"], row["response"], row["correct"]) for row in found] == [
        (1, "<0> <7>", False), (1, "<2> <7>", True), (2, "<0> <7>", True), (3, "<0> <7>", False),
    ]  # fmt: skip
    assert found[0] | {"step": 1, "prompt": "<5> <6>", "answer": "42", "logprob": -1.0, "group_correct": 1, "group_samples": 3} == found[0]


@pytest.mark.parametrize(("limit", "lines"), [(-1, 6), (0, 0), (1, 1)])
def test_the_number_of_saved_samples(tmp_path: Path, limit: int, lines: int) -> None:
    with RunFolder.create(config(tmp_path, f"run.save_samples={limit}"), "dapo", out=io.StringIO()) as run:
        run.log_samples(1, [group([True, False, False]), group([True, True, True])], kind="eval")
    path = run.path / "samples" / "eval.jsonl"
    assert (len(rows(path)) if path.exists() else 0) == lines


def test_a_faulty_batch_is_kept_whole(tmp_path: Path) -> None:
    with RunFolder.create(config(tmp_path), "dapo", out=io.StringIO()) as run:
        path = run.save_fault(7, [group([True, False], 9)])
    (row,) = rows(path)
    assert path.name == "step-000007.jsonl"
    assert (row["prompt_id"], row["prompt_token_ids"], row["responses"]) == (9, [5, 6], [[0, 7], [1, 7]])
    assert row["logprobs"] == [[-0.5, -1.5], [-0.5, -1.5]]
