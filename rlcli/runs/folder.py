"""The folder that every run leaves behind, and the only place that writes to it.

    config.yaml         the resolved configuration            metrics.jsonl    one object a step or evaluation, append-only
    environment.json    machine and versions of each start    samples/*.jsonl  what the model wrote, append-only
    run.json            kind, state, steps                    logs/run.log     the console's lines, with times
    checkpoints/        what resuming needs                   faults/          batches whose loss or gradient was not finite
    final/              the trained model, an HF folder       report.html      made by `msrl report`, and when a run ends
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlcli.checkpoint import disk
from rlcli.checkpoint.find import FOLDER, complete
from rlcli.config.load import save_resolved, to_dict
from rlcli.errors import MsrlError, RunError, UserError
from rlcli.runs import jsonl, samples, trackers
from rlcli.runs.console import Console
from rlcli.runs.metrics import check_metric
from rlcli.types import Group

COPY = "make it writable, or copy the checkpoint elsewhere and go on from there: msrl resume --ckpt COPY run.dir=DIR"
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
        steps = getattr(config.train, "steps", 0)
        state = {"kind": kind, "recipe": recipe, "state": RUNNING, "step": 0, "total": steps, "started": _now()}
        with _writing(path, "choose a folder that can be written to (run.dir=...)"):
            save_resolved(config, path / "config.yaml")
            _write_json(path / "run.json", state)
            return cls(path, _lock(path), config, state, environment or {}, out)

    @staticmethod
    def check(config: Any) -> None:
        """Raise UserError for what `create` would refuse, without making anything: for before long preparations."""
        trackers.check(config.run.trackers)
        if best := config.checkpoint.keep_best:
            check_metric(f"checkpoint.keep_best={best}", best.removeprefix("-"))
        _check_place(Path(config.run.dir))
        _check_name(Path(config.run.dir), config.run.name)

    @classmethod
    def reopen(
        cls,
        path: Path,
        config: Any,
        step: int,
        environment: Mapping[str, Any] | None = None,
        out: TextIO | None = None,
        sequence: int | None = None,
    ) -> RunFolder:
        """An existing folder, to go on after the checkpoint of `step`: rows of other steps and torn lines are set aside, never lost.

        sequence: that of the checkpoint's manifest, where `step` may have been saved more than once; without it the newest is meant.
        Raises UserError where the folder is none of a run or cannot be written, or another process writes to it.
        """
        state = read_state(path)
        lock = _lock(path)
        state |= {"state": RUNNING, "step": step, "total": getattr(config.train, "steps", 0) or state.get("total", 0), "resumed": _now()}
        with _writing(path):
            save_resolved(config, path / "config.yaml")
            _write_json(path / "run.json", state)  # first: a finished run's record must not say so with rows set aside
            moved, back = _rewind(path, step, sequence)
            run = cls(path, lock, config, state, environment or {}, out)
        if moved:
            run.console.info(f"{moved} lines of metrics and samples {'of another course' if back else f'after step {step}'} were set aside in {path}")
        if back:
            run.console.info(f"{back} lines up to step {step} that had been set aside are back")
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
        try:
            _write_json(self.path / "run.json", self.state)
            self._write_report()
        finally:
            for handler in list(self.log.handlers):
                self.log.removeHandler(handler)
                handler.close()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        stopped = getattr(error, "exit_code", 1) == 3 or isinstance(error, KeyboardInterrupt)
        try:
            self.finish(FINISHED if error is None else STOPPED if stopped else FAILED, "" if error is None else str(error) or type(error).__name__)
        except RunError as late:
            if error is None:
                raise RunError(f"{late}\nthe run is at its end but for this record; to have it written: msrl resume --ckpt {self.path}") from late
            self.console.warn(str(late))  # what ended the run is the error to report

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


def record_finished(path: Path, step: int, sequence: int | None = None) -> None:
    """Let the record of a run that was found finished, at this checkpoint, say so, as after a resumption that came to nothing.

    Nothing is done where it says so already, of this step or a later one, or cannot be written.
    """
    state = read_state(path)
    if state.get("state") == FINISHED or step < state.get("total", 0):
        return
    with contextlib.suppress(MsrlError):
        lock = _lock(path)
        try:
            with _writing(path):
                _rewind(path, step, sequence)
            _write_json(path / "run.json", state | {"state": FINISHED, "step": step, "ended": _now(), "message": ""})
        finally:
            os.close(lock)


def require_free(path: Path) -> None:
    """Raise UserError where another process writes to the run that `path` is or lies in. For before reading its checkpoints, which that run prunes.

    Makes nothing, and asks nothing of what is no run.
    """
    for folder in (path, *path.absolute().parents[:2]):
        lock = folder / ".lock"
        if (folder / "run.json").is_file() and lock.is_file():
            with _writing(folder):
                handle = os.open(lock, os.O_RDONLY)
            _take(handle, folder)
            os.close(handle)
            return


def _rewind(path: Path, step: int, sequence: int | None) -> tuple[int, int]:
    """Bring metrics and samples to where they were at a checkpoint: lines set aside, lines taken back."""
    known = complete(path / FOLDER)
    newest = max((checkpoint.manifest.sequence for checkpoint in known), default=0)
    if sequence is None:
        sequence = max((checkpoint.manifest.sequence for checkpoint in known if checkpoint.step == step), default=newest + 1)
    counts = [jsonl.rewind(file, step, sequence, newest) for file in _streams(path)]
    return sum(moved for moved, _ in counts), sum(back for _, back in counts)


def _streams(path: Path) -> list[Path]:
    """Files that are appended to."""
    return [path / "metrics.jsonl", *sorted((path / "samples").glob("*.jsonl"))]


def _check_place(parent: Path) -> None:
    """Raise UserError where a run's folder cannot be made, whatever its name."""
    above = parent
    while not os.path.exists(above) and above != above.parent:
        above = above.parent
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise UserError(f"run.dir={parent}: {above} {'cannot be written to' if above.is_dir() else 'is no folder'}; choose a folder that can be written to")


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
    with _writing(path):
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    return _take(handle, path)


def _take(handle: int, path: Path) -> int:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserError(f"{path} is in use by another run: wait until it has ended, or stop it") from None
    return handle


@contextlib.contextmanager
def _writing(path: Path, elsewhere: str = COPY) -> Iterator[None]:
    """Turns the system's errors of a run's folder into one line."""
    try:
        yield
    except OSError as error:
        raise disk.explained(f"cannot write to {path}", path, error, "or choose another folder (run.dir=...)", elsewhere) from error


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is told by what the run cannot do without, not by a traceback for each line."""


def _logger(path: Path) -> logging.Logger:
    """A logger of this run alone, that writes to its file with times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = logging.Logger(f"msrl {path}", logging.INFO)
    handler = _LogFile(path, encoding="utf-8", errors="replace")
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
