"""One worker process of the pool, seen from the parent: started, spoken to, ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from rlcli.config.schema import RewardConfig
from rlcli.rewards import wire

MOST_REPLY = 1 << 20  # bytes
START_S = 120.0  # a worker imports its verifiers in this time, or something is wrong
GRACE_S = 5.0  # beyond the time limit, before a worker whose own timer did not end it is killed from here
BOOT = "import sys; sys.path[:] = sys.argv[3:]; from rlcli.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class WorkerProcess:
    """Started on construction; `ready` waits until its verifiers are imported. It ends with the thread that started it."""

    def __init__(self, config: RewardConfig) -> None:
        self.timeout_s = config.timeout_s
        self.ended = False
        self.channel, theirs = socket.socketpair()
        with theirs:
            path = [entry or os.getcwd() for entry in sys.path]
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(theirs.fileno()), str(os.getpid()), *path, os.getcwd()],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | SINGLE_THREAD,
                start_new_session=True,  # Ctrl-C is the parent's business; and its own children can be ended with it
            )
        settings = {
            "names": list(config.verifiers),
            "weights": list(config.weights),
            "options": list(config.options),
            "memory_mib": config.memory_mib,
            "timeout_s": config.timeout_s,
        }
        self.channel.settimeout(START_S)
        with contextlib.suppress(OSError):  # it is dead already, which `ready` shows
            wire.send(self.channel, settings)

    def ready(self) -> dict[str, Any]:
        """What it says once its verifiers are imported. Errors: EOFError, OSError, ValueError."""
        message: dict[str, Any] = wire.receive(self.channel, MOST_REPLY)
        self.channel.settimeout(self.timeout_s + GRACE_S)
        return message

    def idle(self) -> bool:
        """Whether it waits for work. One that died while it had none has closed its end, and reads as ready to be read."""
        return not self.ended and not select.select([self.channel], [], [], 0.0)[0]

    def send(self, items: list[Any]) -> None:
        """Give it items to judge. Errors: OSError."""
        wire.send(self.channel, items)

    def receive(self) -> dict[str, Any]:
        """Its reply on the next item. Errors: EOFError, OSError (TimeoutError), ValueError."""
        reply: dict[str, Any] = wire.receive(self.channel, MOST_REPLY)
        return reply

    def interrupt(self) -> None:
        """Wake the thread that waits for a reply: it sees the end."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self, patience: float = 0.0) -> int:
        """Kill it with whatever it started, and return its exit status as Popen's (negative: the signal that ended it).

        patience: seconds that it may take to end by itself, where it is known to be ending, so that its own status is seen.
        """
        self.channel.close()
        if not self.ended:
            if patience:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.ended = True
        return self.process.wait()
