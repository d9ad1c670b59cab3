"""Optional sinks of a run's metrics: tensorboard, wandb, swanlab, trackio. metrics.jsonl stays the truth; a tracker never stops a run.

Each tracker works on a thread of its own behind a bounded queue: one that hangs loses its own rows and nothing else. Nothing is sent over a
network unless the user's environment asks for it (WANDB_MODE=online, SWANLAB_MODE=cloud, TRACKIO_SPACE_ID).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlcli.errors import UserError

QUEUE_ROWS = 1000
CLOSE_S = 15.0


class Sink(Protocol):
    """A tracker's own interface, behind three calls."""

    def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder."""

    def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)  # type: ignore[no-untyped-call]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


class Wandb:
    def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        self.run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder), config=config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Swanlab:
    def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None:
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "offline")
        self.run = swanlab.init(project=project, experiment_name=name, config=config, mode=mode, logdir=str(folder / "swanlab"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        import swanlab

        swanlab.finish()


class Trackio:
    def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None:
        import trackio

        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        self.run = trackio.init(project=project, name=name, config=config, resume="allow", space_id=os.environ.get("TRACKIO_SPACE_ID"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "swanlab": Swanlab, "trackio": Trackio}


class Tracker:
    """One sink on its thread. After its first fault, or once its queue is full, it is left alone; `warn` is told once."""

    def __init__(self, kind: str, sink: Sink, start: Callable[[], None], warn: Callable[[str], None], rows: int = QUEUE_ROWS) -> None:
        self.kind, self.sink, self._warn = kind, sink, warn
        self.rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(rows)
        self.failed = False
        self.thread = threading.Thread(target=self._work, args=(start,), name=f"tracker {kind}", daemon=True)
        self.thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a row; returns at once."""
        if self.failed:
            return
        try:
            self.rows.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._fail("does not keep up")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let it write what it holds, for a limited time."""
        if not self.failed:
            try:
                self.rows.put_nowait(None)
            except queue.Full:
                self._fail("does not keep up")
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            self._fail(f"did not finish within {timeout_s:.0f} s")

    def _work(self, start: Callable[[], None]) -> None:
        try:
            start()
            while (row := self.rows.get()) is not None:
                self.sink.log(*row)
            self.sink.close()
        except ImportError as error:
            self._fail(f"is not installed ({error})")
        except Exception as error:  # a tracker's fault of whatever kind must not touch the run
            self._fail(f"failed ({type(error).__name__}: {error})")

    def _fail(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            self._warn(f"tracker {self.kind} {why}; the run goes on without it, metrics.jsonl has everything")


def check(kinds: list[str]) -> None:
    """Raises UserError for a name that is no tracker."""
    unknown = [kind for kind in kinds if kind not in SINKS]
    if unknown:
        raise UserError(f"run.trackers: {', '.join(unknown)} is unknown; known are {', '.join(SINKS)}")


def start(
    kinds: list[str], folder: Path, project: str, name: str, config: dict[str, Any], step: int, warn: Callable[[str], None]
) -> list[Tracker]:
    """Trackers by name, started at `step` (above 0: a resumed run, continued where the tracker can)."""
    check(kinds)
    trackers = []
    for kind in kinds:
        sink = SINKS[kind]()
        trackers.append(Tracker(kind, sink, lambda sink=sink: sink.start(folder, project, name, config, step), warn))  # type: ignore[misc]
    return trackers
