"""Signals and time budgets ask a run to stop; real signals to this very process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcli.errors import RunError, StoppedEarly
from rlcli.trainers import stopping
from rlcli.trainers.stopping import Stopper, saying_what_is_left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_to_stop_and_says_what_happens_next(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with Stopper(0) as stopper:
        assert not stopper.asked()
        os.kill(os.getpid(), number)
        assert stopper.reason == f"signal {number.name}"
    assert f"{number.name}: the run saves and stops at the next safe point" in capfd.readouterr().err


def test_a_second_ctrl_c_interrupts_but_its_echo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stopper(0) as stopper:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a wrapper passes on what the terminal has sent already
        assert stopper.asked()
        monkeypatch.setattr(stopping, "ECHO_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_twice_leaves_the_save_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_S", -1.0)
    with Stopper(0) as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.reason == "signal SIGTERM"


def test_the_handlers_of_before_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with Stopper(0):
        assert all(signal.getsignal(number) not in before for number in stopping.SIGNALS)
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before


def test_a_time_budget_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    stopper = Stopper(max_minutes=2.0)
    monkeypatch.setattr(time, "monotonic", lambda: now + 119.0)
    assert not stopper.asked()
    monkeypatch.setattr(time, "monotonic", lambda: now + 121.0)
    assert "run.max_minutes" in str(stopper.reason)
    assert Stopper(max_minutes=0.0).reason is None


def test_an_interrupted_run_says_what_there_is_to_go_on_from(tmp_path: Path) -> None:
    run = SimpleNamespace(path=tmp_path, checkpoints=tmp_path / "checkpoints")
    with pytest.raises(RunError, match="no checkpoint yet"), saying_what_is_left(run):
        raise KeyboardInterrupt
    for step in (9, 10):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    with pytest.raises(StoppedEarly, match=f"go on from step-00000010 with: msrl resume --ckpt {tmp_path}"), saying_what_is_left(run):
        raise KeyboardInterrupt


def test_a_failed_run_says_what_there_is_to_go_on_from(tmp_path: Path) -> None:
    run = SimpleNamespace(path=tmp_path, checkpoints=tmp_path / "checkpoints")
    with pytest.raises(RunError) as caught, saying_what_is_left(run):
        raise RunError("step 3, update: train rank 0 died")
    assert str(caught.value).splitlines() == ["step 3, update: train rank 0 died", "there is no checkpoint yet: start again"]
