"""Waiting for workers with a deadline: the first failure ends the wait at once and says who, when, and its last words."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rlcli.cluster.processes import ProcessId
from rlcli.errors import MsrlError, RunError, WorkerLost

# A rank's death makes its neighbours fail too, a moment before or after: wait so long to see who really died.
CULPRIT_WAIT_S = 2.0
LAST_WORDS_LINES = 12
ENGINE_ENDED = "lost vLLM's own process, which ended"


@dataclass(slots=True, eq=False)
class Worker:
    """One actor of a run. `name` is what a user reads: "train rank 0", "rollout engine 1"."""

    name: str
    actor: Any
    log: Path
    process: ProcessId | None = None

    def kill(self) -> None:
        """End the actor and, should Ray be gone already, its process."""
        with contextlib.suppress(Exception):  # Ray may be down; the process is what counts
            ray.kill(self.actor, no_restart=True)
        if self.process is not None:
            self.process.kill()


def last_words(log: Path, lines: int = LAST_WORDS_LINES) -> str:
    """The last lines a worker wrote, indented; empty where it wrote none."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, log.stat().st_size - 16_384))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    kept = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join("    " + line[:240] for line in kept)


def fault(worker: Worker, what: str, how: str, kind: type[RunError] = WorkerLost) -> RunError:
    """The error a user reads when a worker fails. kind: RunError where it only refused one call."""
    words = last_words(worker.log)
    tail = f"\n  its last words ({worker.log}):\n{words}" if words else f"\n  it wrote nothing to {worker.log}"
    return kind(f"{what}: {worker.name} {how}{tail}")


def _describe(error: BaseException) -> str:
    if isinstance(error, RayTaskError):
        cause = error.cause if getattr(error, "cause", None) is not None else error
        if type(cause).__name__ == "EngineDeadError":  # vLLM's, whose text says no more
            return ENGINE_ENDED
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
        return f"failed: {type(cause).__name__}: {first[:300]}"
    return "died"


def _cause(error: BaseException) -> BaseException:
    return getattr(error, "cause", None) or error


def _blame(failures: list[tuple[Worker, BaseException]], what: str) -> MsrlError:
    """The failure to report: a message meant for the user, else a death, else the first error that is not an echo of a lost connection."""
    for worker, error in failures:
        cause = _cause(error)
        if isinstance(cause, MsrlError):
            return type(cause)(f"{what}: {worker.name}: {cause}") if isinstance(cause, RunError) else cause
    for worker, error in failures:
        if isinstance(error, RayActorError) or (worker.process is not None and not worker.process.alive()):
            return fault(worker, what, "died")
    echoes = ("connection", "peer", "gloo", "timed out")
    own = [pair for pair in failures if not any(echo in str(pair[1]).lower() for echo in echoes)]
    worker, error = (own or failures)[0]
    return fault(worker, what, _describe(error), RunError if isinstance(error, RayTaskError) else WorkerLost)


def _collect_failures(pending: dict[Any, Worker], first: tuple[Worker, BaseException]) -> list[tuple[Worker, BaseException]]:
    failures, deadline = [first], time.monotonic() + CULPRIT_WAIT_S
    if isinstance(first[1], RayActorError):
        return failures
    while pending and time.monotonic() < deadline:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=0.2)
        for ref in done:
            worker = pending.pop(ref)
            try:
                ray.get(ref)
            except RayError as error:
                failures.append((worker, error))
                if isinstance(error, RayActorError):
                    return failures
    return failures


class Pulse:
    """Asks workers for signs of life, beside their work."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._asked: dict[Worker, tuple[Any, float]] = {}

    def check(self, workers: Sequence[Worker], what: str) -> None:
        """Raise where a worker has not answered for `silence_s`, or answers that the process it works with has ended.

        The second is not left to the call that waits for that process: vLLM fails what is asked of a dead engine from then on, but never
        answers a call that was on its way.
        """
        now = time.monotonic()
        for worker in workers:
            asked = self._asked.get(worker)
            if asked is not None:
                done, _ = ray.wait([asked[0]], timeout=0)
                if not done:
                    if now - asked[1] > self.silence_s:
                        raise fault(worker, what, f"gives no sign of life for {self.silence_s:.0f} s")
                    continue
                if not _alive(asked[0]):
                    raise fault(worker, what, ENGINE_ENDED)
            self._asked[worker] = (worker.actor.ping.remote(), now)

    def forget(self) -> None:
        self._asked.clear()


def _alive(answer: Any) -> bool:
    try:
        return bool(ray.get(answer))
    except RayError:
        return True  # the worker itself is gone: the call that is waited for says how


def wait_next(pending: dict[Any, Worker], what: str, deadline: float, pulse: Pulse | None = None) -> Any:
    """The first reference of `pending` that is ready; its value is fetched by the caller. `deadline` is by time.monotonic().

    Raises RunError, naming the worker, where one fails, gives no sign of life, or the deadline passes.
    """
    while True:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
        if done:
            return done[0]
        if pulse is not None:
            pulse.check(list(dict.fromkeys(pending.values())), what)
        if time.monotonic() > deadline:
            names = sorted({worker.name for worker in pending.values()})
            worker = next(worker for worker in pending.values() if worker.name == names[0])
            raise fault(worker, what, f"did not finish in time (still waiting for: {', '.join(names)})")


def fetch(ref: Any, worker: Worker, others: dict[Any, Worker], what: str) -> Any:
    """The value of a ready reference, or the error that names the worker to blame."""
    try:
        return ray.get(ref)
    except (RayError, GetTimeoutError) as error:
        raise _blame(_collect_failures(dict(others), (worker, error)), what) from error


def wait_all(calls: Sequence[tuple[Worker, Any]], what: str, timeout_s: float, pulse: Pulse | None = None) -> list[Any]:
    """The values of all calls, in order. The first failure ends the wait.

    Args:
        calls: pairs of a worker and the reference of a call to it.
        what: the step and stage, for the message: "step 7, update".
        timeout_s: seconds for all of them together.
    """
    pending = {ref: worker for worker, ref in calls}
    values: dict[Any, Any] = {}
    deadline = time.monotonic() + timeout_s
    while pending:
        ref = wait_next(pending, what, deadline, pulse)
        worker = pending.pop(ref)
        values[ref] = fetch(ref, worker, pending, what)
    return [values[ref] for _, ref in calls]
