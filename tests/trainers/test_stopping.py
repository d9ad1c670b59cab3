"""Signals and time budgets ask a run to stop; real signals to this very process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcli.cluster.processes import STOP_SIGNALS
from rlcli.errors import RunError, StoppedEarly
from rlcli.trainers import stopping
from rlcli.trainers.stopping import Stopper, saying_what_is_left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_says_what_happens_next(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with Stopper(0) as stopper:
        assert not stopper.asked()
        os.kill(os.getpid(), number)
        assert stopper.reason == f"signal {number.name}"
    assert f"{number.name}: the run saves and stops at the next safe point" in capfd.readouterr().err


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts_but_an_echo_of_the_first_does_not(first: int, second: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stopper(0) as stopper:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)  # a wrapper passes on what the whole group was sent already
        assert stopper.asked()
        monkeypatch.setattr(stopping, "ECHO_S", -1.0)
        with pytest.raises(KeyboardInterrupt, match=second.name):
            os.kill(os.getpid(), second)


def test_a_warning_beforehand_does_not_make_the_first_sigterm_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers send SIGUSR1 some time before the end, once or more, and SIGTERM at the end."""
    monkeypatch.setattr(stopping, "ECHO_S", -1.0)
    with Stopper(0) as stopper:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.reason == "signal SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_lost_connection_is_told_more_than_once_and_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and every shell on the way send SIGHUP, and some systems SIGTERM at last."""
    monkeypatch.setattr(stopping, "ECHO_S", -1.0)
    with Stopper(0) as stopper:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stopper.reason == "signal SIGHUP"


def test_a_run_below_nohup_goes_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper(0) as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopper.asked()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


LEFT = """
import os, sys, time
from rlcli.runs.console import Console
from rlcli.trainers.stopping import Stopper
with Stopper(0) as stopper:
    console = Console("dapo", 4)
    console.step(1, {})
    end = time.monotonic() + 20
    while not (stopper.asked() or os.path.exists(sys.argv[2])) and time.monotonic() < end:
        time.sleep(0.02)
    for number in range(3):
        console.info("saved")
    print("to stderr", file=sys.stderr, flush=True)
    console.close()
open(sys.argv[1], "w").write(str(stopper.reason))
sys.exit(3)
"""


def test_a_run_whose_terminal_is_gone_stops_well(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "--wait", sys.executable, "-c", LEFT, str(tmp_path / "reason"), str(tmp_path / "never")]
    left = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.read(ours, 10)  # its first line
    os.close(ours)
    assert left.wait(60) == 3
    assert (tmp_path / "reason").read_text() == "signal SIGHUP"


def test_a_run_whose_reader_is_gone_goes_on(tmp_path: Path) -> None:
    """As `msrl train | tee log` when tee is ended."""
    left = subprocess.Popen([sys.executable, "-c", LEFT, str(tmp_path / "reason"), str(tmp_path / "go")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert left.stdout is not None
    left.stdout.readline()
    left.stdout.close()
    (tmp_path / "go").write_text("")
    assert left.wait(60) == 3
    assert (tmp_path / "reason").read_text() == "None"


def test_a_signal_after_the_time_budget_is_the_first() -> None:
    with Stopper(max_minutes=1e-9) as stopper:
        assert "run.max_minutes" in str(stopper.reason)
        os.kill(os.getpid(), signal.SIGTERM)
        assert "run.max_minutes" in str(stopper.reason)


def test_the_handlers_of_before_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with Stopper(0):
        assert all(number == signal.SIGHUP or signal.getsignal(number) not in before for number in STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


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
