"""The folder that every run leaves behind, and the only place that writes to it.

    config.yaml         the resolved configuration            metrics.jsonl    one object a step or evaluation, append-only
    environment.json    machine and versions of each start    samples/*.jsonl  what the model wrote, append-only
    run.json            kind, state, steps                    logs/run.log     the console's lines, with times
    checkpoints/        what resuming needs                   faults/          batches whose loss or gradient was not finite
    final/              the trained model, an HF folder       report.html      made by `msrl report`, and when a run ends
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlcli.config.load import save_resolved, to_dict
from rlcli.errors import RunError, UserError
from rlcli.runs import jsonl, samples, trackers
from rlcli.runs.console import Console
from rlcli.runs.metrics import check_metric
from rlcli.types import Group

FINISHED, STOPPED, FAILED, RUNNING = "finished", "stopped", "failed", "running"


class RunFolder:
    """One run's folder, open for writing by this process alone. Made by `create` or `reopen`; a context manager that records how the run ended."""

    def __init__(self, path: Path, lock: int, config: Any, state: dict[str, Any], environment: Mapping[str, Any], out: TextIO | None) -> None:
        """`lock` is the open handle of `_lock`. Set `decode` to the tokenizer's decode before the first `log_samples`."""
        self.path, self.config, self.state = path, config, state
        self.decode: samples.Decode = _numbers
        self._lock = lock
        self._metrics = jsonl.Appender(path / "metrics.jsonl")
        self._samples: dict[str, jsonl.Appender] = {}
        self.log = _logger(path / "logs" / "run.log")
        self.console = Console(state["kind"], state.get("total", 0), out, self.log)
        self._record_environment(dict(environment))
        self.trackers = trackers.start(
            config.run.trackers, path, config.run.project, path.name, to_dict(config), state.get("step", 0), self.console.warn
        )

    # ---------------------------------------------------------------- opening

    @classmethod
    def create(cls, config: Any, kind: str, recipe: str | None = None, environment: Mapping[str, Any] | None = None, out: TextIO | None = None) -> RunFolder:
        """A new folder under `run.dir`, named `run.name` or recipe and time.

        kind: "dapo" or "dpo". environment: `environment.describe(...)`. Raises UserError where the folder exists already or cannot be written.
        """
        cls.check(config)
        path = _new_folder(Path(config.run.dir), config.run.name, recipe or kind)
        save_resolved(config, path / "config.yaml")
        steps = getattr(config.train, "steps", 0)
        state = {"kind": kind, "recipe": recipe, "state": RUNNING, "step": 0, "total": steps, "started": _now()}
        _write_json(path / "run.json", state)
        return cls(path, _lock(path), config, state, environment or {}, out)

    @staticmethod
    def check(config: Any) -> None:
        """Raise UserError for what `create` would refuse, without making anything: for before long preparations."""
        trackers.check(config.run.trackers)
        if best := config.checkpoint.keep_best:
            check_metric(f"checkpoint.keep_best={best}", best.removeprefix("-"))
        _check_name(Path(config.run.dir), config.run.name)

    @classmethod
    def reopen(cls, path: Path, config: Any, step: int, environment: Mapping[str, Any] | None = None, out: TextIO | None = None) -> RunFolder:
        """An existing folder, to go on after `step`: rows of later steps and torn lines are set aside, never lost.

        Raises UserError where the folder is none of a run, or another process writes to it.
        """
        state = read_state(path)
        lock = _lock(path)
        moved = sum(jsonl.rewind(file, lambda row: row.get("step", 0) <= step) for file in _streams(path))
        save_resolved(config, path / "config.yaml")
        state |= {"state": RUNNING, "step": step, "total": getattr(config.train, "steps", 0) or state.get("total", 0), "resumed": _now()}
        _write_json(path / "run.json", state)
        run = cls(path, lock, config, state, environment or {}, out)
        if moved:
            run.console.info(f"{moved} lines of metrics and samples after step {step} were set aside in {path}")
        return run

    # ---------------------------------------------------------------- writing

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A finished step: to metrics.jsonl, the console, the trackers."""
        self._metrics.append({"step": step, "time": _now(), **metrics})
        self.state["step"] = step
        self.console.step(step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def log_eval(self, step: int, measured: Mapping[str, float], when: str = "") -> None:
        """An evaluation after `step` steps; names get the prefix eval/. `when` is for the reader: before, after, after step 20."""
        metrics = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in measured.items()}
        self._metrics.append({"step": step, "time": _now(), "when": when, **metrics})
        self.console.evaluation(step, {name.removeprefix("eval/"): value for name, value in metrics.items()}, when or f"after step {step}")
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def log_samples(self, step: int, groups: Sequence[Group], kind: str = "train") -> None:
        """Some of the groups' samples (`run.save_samples`), as text by `decode`, to samples/KIND.jsonl."""
        if kind not in self._samples:
            self._samples[kind] = jsonl.Appender(self.path / "samples" / f"{kind}.jsonl")
        limit = self.config.run.save_samples
        self._samples[kind].extend(samples.rows(step, groups, limit, self.decode) if limit and groups else [])

    def save_fault(self, step: int, groups: Sequence[Group]) -> Path:
        """Keep the batch of a step whose loss or gradient was not finite; returns the file."""
        path = self.path / "faults" / f"step-{step:06d}.jsonl"
        keeper = jsonl.Appender(path)
        keeper.extend([samples.fault_row(group) for group in groups])
        keeper.close()
        return path

    def set_total(self, steps: int) -> None:
        """Tell how many steps the run has, where the configuration alone does not say."""
        self.state["total"] = self.console.total = steps

    # ---------------------------------------------------------------- ending

    def finish(self, state: str = FINISHED, message: str = "") -> None:
        """Record how the run ended, write report.html, close everything. Safe to call twice."""
        if self._lock < 0:
            return
        self.console.close()
        self._metrics.close()
        for appender in self._samples.values():
            appender.close()
        for tracker in self.trackers:
            tracker.close()
        self.state |= {"state": state, "ended": _now(), "message": message}
        _write_json(self.path / "run.json", self.state)
        self._write_report()
        for handler in list(self.log.handlers):
            self.log.removeHandler(handler)
            handler.close()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            stopped = getattr(error, "exit_code", 1) == 3 or isinstance(error, KeyboardInterrupt)
            self.finish(STOPPED if stopped else FAILED, str(error) or type(error).__name__)

    # ---------------------------------------------------------------- places

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def _record_environment(self, environment: dict[str, Any]) -> None:
        path = self.path / "environment.json"
        starts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        _write_json(path, [*starts, {**environment, "step": self.state.get("step", 0)}])

    def _write_report(self) -> None:
        """The report is a convenience: what goes wrong with it is said, and the run has ended all the same."""
        try:
            from rlcli.runs.report import write_report

            write_report(self.path)
        except Exception as error:
            self.console.warn(f"no report ({type(error).__name__}: {error})")


def read_state(path: Path) -> dict[str, Any]:
    """run.json of a run's folder. Raises UserError where it is none."""
    try:
        state = json.loads((path / "run.json").read_text(encoding="utf-8"))
        if state["kind"] not in ("dapo", "dpo"):
            raise ValueError(f"unknown kind {state['kind']}")
    except FileNotFoundError:
        raise UserError(f"{path} is no run folder: it has no run.json (runs lie under run.dir, by default runs/)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / 'run.json'} cannot be read: {error}") from error
    return dict(state)


def _streams(path: Path) -> list[Path]:
    """Files that are appended to."""
    return [path / "metrics.jsonl", *sorted((path / "samples").glob("*.jsonl"))]


def _check_name(parent: Path, name: str | None) -> None:
    """Raise UserError for a name of the user's that is none, or is taken."""
    if name is None:
        return
    if not name.strip(".") or "/" in name or "\0" in name:
        raise UserError(f"run.name={name!r} is no folder name: give one without slashes (run.dir says where it lies)")
    if (parent / name).exists():
        raise UserError(f"run.name={name}: {parent / name} exists already; choose another run.name, or go on with it: msrl resume --ckpt {parent / name}")


def _new_folder(parent: Path, name: str | None, recipe: str) -> Path:
    """Make the folder. A name of our own choosing gets a number where it is taken; the user's is an error then (`_check_name`)."""
    stem = name or f"{re.sub(r'[^A-Za-z0-9._-]+', '-', recipe)}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            _check_name(parent, name)
        except OSError as error:
            raise UserError(f"run.dir={parent}: cannot make {path}: {error.strerror}") from error
    raise UserError(f"run.dir={parent}: no free name like {stem}")


def _lock(path: Path) -> int:
    """A lock that the system takes back when this process ends, however it ends."""
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserError(f"{path} is in use by another run: wait until it has ended, or stop it") from None
    return handle


def _logger(path: Path) -> logging.Logger:
    """A logger of this run alone, that writes to its file with times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = logging.Logger(f"msrl {path}", logging.INFO)
    handler = logging.FileHandler(path, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return log


def _write_json(path: Path, value: Any) -> None:
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8", errors="replace")
        draft.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _numbers(tokens: Sequence[int]) -> str:
    """Stands where no tokenizer was given: the token ids themselves."""
    return " ".join(map(str, tokens))
