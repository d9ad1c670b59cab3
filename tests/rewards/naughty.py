"""Verifiers that misbehave, for the tests of the pool. What each does is told by its text; "fine" is always judged."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rlcli.rewards.verdicts import decide, verifier
from rlcli.types import Verdict


@verifier(wrong=-3.0)
def act(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """Do what the text says, then judge it as equal to the truth."""
    deed = DEEDS.get(text)
    if deed is not None:
        deed()
    return decide(text == truth, text)


def sleep() -> None:
    time.sleep(600)


def sleep_deaf() -> None:
    """Sleep with every signal ignored that can be; the time limit's own timer too."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(600)


def spin_in_c() -> None:
    """Code that never comes back to the interpreter: the digits of a huge power."""
    str(len(str(pow(7, 10**8))))


def allocate() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(1 << 26))


def segfault() -> None:
    ctypes.string_at(0)


def close_all() -> None:
    os.closerange(3, 256)


def chatter() -> None:
    print("\x00garbage\xff" * 100_000)
    sys.stderr.write("more garbage" * 100_000)
    os.write(1, b"\x10\x00\x00\x00{}" * 1000)


DEEDS = {
    "sleep": sleep,
    "deaf": sleep_deaf,
    "spin": spin_in_c,
    "allocate": allocate,
    "exit": lambda: sys.exit(0),
    "hard exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": segfault,
    "raise": lambda: 1 / 0,
    "recurse": lambda: recurse(0),
    "close": close_all,
    "chatter": chatter,
}


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


def record_pid(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """Write the process's id to the file that the row names, and wait if told to."""
    Path(extra["dir"], str(os.getpid())).touch()
    if text == "wait":
        time.sleep(600)
    return decide(True, str(os.getpid()))


def modules(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    """Which of the modules named by the truth this process has imported."""
    return decide(True, ",".join(name for name in truth.split(",") if name in sys.modules))


def as_number(text: str, truth: str, extra: dict[str, Any], *, factor: float = 1.0) -> float:
    return factor * len(text)


def as_nothing(text: str, truth: str, extra: dict[str, Any]) -> None:
    return None


def as_nan(text: str, truth: str, extra: dict[str, Any]) -> float:
    return float("nan")


def odd_reason(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    return Verdict(1.0, True, None, "because")


def long_answer(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    return decide(True, "\U0001f600" * 10_000_000)


def columns(text: str, truth: str, extra: dict[str, Any]) -> Verdict:
    return decide(extra == {"level": 3, "tags": ["a", "b"], "note": "\ud800\x00"}, None)


def too_few(text: str, truth: str) -> Verdict:
    return decide(True, text + truth)


NOT_CALLABLE = 5
