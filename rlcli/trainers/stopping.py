"""When a run ends early and well: a signal or a used-up time budget asks for it, and the loop stops at the next safe point."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopper:
    """Context manager that turns the first signal into a request to stop; a second Ctrl-C interrupts at once."""

    def __init__(self, max_minutes: float) -> None:
        self._deadline = time.monotonic() + max_minutes * 60 if max_minutes else None
        self._reason: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopper:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._reason = f"signal {signal.Signals(number).name}"

    @property
    def reason(self) -> str | None:
        """Why the run should stop, or None while it need not."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = "the time budget of run.max_minutes is used up"
        return self._reason

    def asked(self) -> bool:
        return self.reason is not None
