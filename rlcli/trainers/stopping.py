"""When a run ends early and well: a signal or a used-up time budget asks for it, and the loop stops at the next safe point."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from rlcli.cluster.processes import STOP_SIGNALS
from rlcli.errors import RunError, StoppedEarly
from rlcli.runs.console import leave_screen
from rlcli.runs.folder import RunFolder

FOREWARNINGS = (signal.SIGUSR1, signal.SIGHUP)  # a scheduler's, and a lost connection's, which every shell on the way passes on: more may follow
ECHO_S = 0.5  # a wrapper (timeout, make, uv run) passes on the signal that the whole group was given already


class Stopper:
    """Context manager that turns the first signal into a request to stop; the second Ctrl-C or SIGTERM interrupts at once."""

    def __init__(self, max_minutes: float) -> None:
        self._deadline = time.monotonic() + max_minutes * 60 if max_minutes else None
        self._reason: str | None = None
        self._first: tuple[int, float] | None = None  # the signal that asked, and when
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopper:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # by nohup: the run is to outlive its terminal
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGHUP:
            leave_screen()
        if self._first is not None:
            first, since = self._first
            if first in FOREWARNINGS and number == signal.SIGTERM:
                self._first = number, now  # this is the first word to end
            elif number not in FOREWARNINGS and now - since > ECHO_S:
                raise KeyboardInterrupt(name)
            return
        self._first = number, now
        self._reason = self._reason or f"signal {name}"
        # Not by print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: the run saves and stops at the next safe point; Ctrl-C{' again' * (number == signal.SIGINT)} ends it at once\n".encode())

    @property
    def reason(self) -> str | None:
        """Why the run should stop, or None while it need not."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = "the time budget of run.max_minutes is used up"
        return self._reason

    def asked(self) -> bool:
        return self.reason is not None


@contextmanager
def saying_what_is_left(run: RunFolder) -> Iterator[None]:
    """Add to a failure, and to an interruption, what there is to go on from."""
    try:
        yield
    except KeyboardInterrupt:
        raise (StoppedEarly if _newest(run) else RunError)(f"ended at once, asked a second time; {_way_on(run)}") from None
    except RunError as error:
        if "msrl resume" in str(error):
            raise
        raise RunError(f"{error}\n{_way_on(run)}") from error


def _newest(run: RunFolder) -> str | None:
    return max((path.name for path in run.checkpoints.glob("step-*")), default=None)


def _way_on(run: RunFolder) -> str:
    newest = _newest(run)
    return f"go on from {newest} with: msrl resume --ckpt {run.path}" if newest else "there is no checkpoint yet: start again"
