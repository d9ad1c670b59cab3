"""Trackers get every row; one that fails or hangs is left behind and the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcli.errors import UserError
from rlcli.runs import trackers


class Recorder:
    def __init__(self, fault: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self.fault, self.gate = fault, gate

    def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None:
        return

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.fault is not None:
            raise self.fault
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def run(sink: Recorder, steps: int, rows: int = 1000, timeout_s: float = 10.0) -> list[str]:
    """Log that many steps through a tracker; the warnings it gave."""
    warnings: list[str] = []
    tracker = trackers.Tracker("test", sink, lambda: None, warnings.append, rows)
    for step in range(steps):
        tracker.log(step, {"x": float(step)})
    tracker.close(timeout_s)
    return warnings


def test_every_row_arrives_in_order_and_the_sink_is_closed() -> None:
    sink = Recorder()
    assert run(sink, 5) == []
    assert sink.rows == [(step, {"x": float(step)}) for step in range(5)]
    assert sink.closed


def test_a_fault_is_told_once() -> None:
    warnings = run(Recorder(fault=ConnectionError("no route")), 5)
    assert warnings == ["tracker test failed (ConnectionError: no route); the run goes on without it, metrics.jsonl has everything"]


def test_a_sink_that_hangs_stops_nothing() -> None:
    gate = threading.Event()
    warnings = run(Recorder(gate=gate), 10, rows=3, timeout_s=0.05)
    gate.set()
    assert len(warnings) == 1
    assert "does not keep up" in warnings[0]


def test_a_package_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Missing(Recorder):
        def start(self, folder: Path, project: str, name: str, config: dict[str, Any], step: int) -> None:
            raise ModuleNotFoundError("No module named 'elsewhere'")

    monkeypatch.setitem(trackers.SINKS, "wandb", Missing)
    warnings: list[str] = []
    (tracker,) = trackers.start(["wandb"], tmp_path, "p", "n", {}, 0, warnings.append)
    tracker.close()
    assert warnings == ["tracker wandb is not installed (No module named 'elsewhere'); the run goes on without it, metrics.jsonl has everything"]


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UserError, match=r"run\.trackers: tensorbord is unknown; known are tensorboard, wandb, swanlab, trackio"):
        trackers.check(["wandb", "tensorbord"])


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings: list[str] = []
    (tracker,) = trackers.start(["tensorboard"], tmp_path, "p", "n", {}, 0, warnings.append)
    for step in (1, 2):
        tracker.log(step, {"sampled/reward": step / 4})
    tracker.close(60.0)
    assert warnings == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("sampled/reward")] == [(1, 0.25), (2, 0.5)]
