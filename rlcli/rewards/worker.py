"""The process that runs verifiers on hostile text. It is killed, not asked, when one takes too long.

The time limit is the kernel's: a real-time timer armed for each answer whose signal ends the process, whatever code is running.
So only time spent in here counts, not time in a queue; the pool sees which signal ended the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from rlcli.errors import UserError
from rlcli.rewards import wire
from rlcli.rewards.verifiers import Combined, Verifier, resolve
from rlcli.types import Verdict

MOST_REQUEST = 1 << 30
MOST_ANSWER = 1000  # characters of an extracted answer that are sent back
PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the pool over the inherited socket until it closes."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # to stop a run is its driver's business, even where every process is asked
        signal.signal(number, lambda *_: None)
    channel = socket.socket(fileno=descriptor)
    settings = wire.receive(channel, MOST_REQUEST)
    try:
        verifier = resolve(settings["names"], settings["weights"], settings["options"])
        verifier.warm_up()
    except UserError as error:
        wire.send(channel, {"error": str(error)})
        return
    silence()
    limit_memory(settings["memory_mib"])
    wire.send(channel, {"wrong_score": verifier.wrong_score})
    with contextlib.suppress(EOFError):
        while serve(channel, verifier, settings["timeout_s"]):
            pass


def serve(channel: socket.socket, verifier: Combined, timeout_s: float) -> bool:
    """Judge one request's answers, replying to each as it is done. False: this process is spent."""
    for text, truth, extra, explain in wire.receive(channel, MOST_REQUEST):
        reply = judge(verifier, text, truth, extra, timeout_s, explain)
        wire.send(channel, reply)
        if reply.get("spent"):
            return False
    return True


def judge(verifier: Combined, text: str, truth: str, extra: dict[str, Any], timeout_s: float, explain: bool = False) -> dict[str, Any]:
    """One verdict as a message, with the parts' own where asked for; an exception of the verifier is `crashed`, and memory that ran out also spends the process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a verifier may have set a handler of its own
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        verdicts = verifier.verdicts(text, truth, extra)
        reply: dict[str, Any] = {"verdict": plain(verifier.combine(verdicts))}
        if explain:
            reply["parts"] = [describe(part, verdict, truth) for part, verdict in zip(verifier.parts, verdicts, strict=True)]
    except MemoryError:
        reply = {"crashed": "out of memory", "spent": True}
    except Exception as error:
        reply = {"crashed": f"{type(error).__name__}: {error}"[:MOST_ANSWER]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return reply | {"seconds": time.perf_counter() - started}


def plain(verdict: Verdict) -> list[Any]:
    answer = None if verdict.answer is None else str(verdict.answer)[:MOST_ANSWER]
    return [float(verdict.score), bool(verdict.correct), answer, verdict.reason]


def describe(part: Verifier, verdict: Verdict, truth: str) -> dict[str, Any]:
    """A part's verdict, with the answer and the truth in the form in which they were compared, where the verifier can show it."""
    sides = (verdict.answer, truth) if part.shown is not None else ()
    shown = [part.shown(side)[:MOST_ANSWER] if part.shown is not None and side is not None else None for side in sides]
    return {"name": part.name, "verdict": plain(verdict), "compared": shown}


def die_with(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends, also by SIGKILL (Linux; elsewhere the socket's end is seen)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(0)


def silence() -> None:
    """Whatever verifiers print is thrown away: it could flood the log of the run."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.close(sink)


def limit_memory(mib: int) -> None:
    """Let the process take `mib` MiB of address space beyond what it has now, and leave no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = now + (mib << 20)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
