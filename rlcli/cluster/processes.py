"""Processes are known by pid and start time, never by name: a pid alone may have passed to somebody else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    started: float  # seconds since the epoch, as the kernel counts it

    @classmethod
    def own(cls) -> ProcessId:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises psutil.NoSuchProcess where there is none."""
        return cls(pid, psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """True while this very process runs; a zombie no longer does."""
        try:
            process = psutil.Process(self.pid)
            # The start time is derived from the boot time, which may be read a tick apart.
            return abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        """End this very process at once; nothing happens where it is gone already."""
        if self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).kill()

    def tidies(self) -> bool:
        """Whether this is multiprocessing's own helper that removes shared memory and semaphores of processes that were killed."""
        with contextlib.suppress(psutil.Error):
            return any("multiprocessing.resource_tracker" in word for word in psutil.Process(self.pid).cmdline())
        return False

    def tree(self) -> list[ProcessId]:
        """This process and all that descend from it, as they are now."""
        if not self.alive():
            return []
        family = [self]
        for child in psutil.Process(self.pid).children(recursive=True):
            try:
                family.append(ProcessId(child.pid, child.create_time()))
            except psutil.NoSuchProcess:
                continue
        return family


def marked(name: str, value: str) -> list[ProcessId]:
    """Every live process that was started with this environment variable; children inherit it, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(ProcessId(process.pid, process.create_time()))
    return found


# What asks a run to stop. The driver hears it, saves, and ends all others itself; they must go on until then.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def be_out_of_reach() -> None:
    """Leave this process's session and be deaf to STOP_SIGNALS; both pass to all that it starts or becomes.

    A terminal signals its foreground group, `timeout` the driver's group, some schedulers every process of a job. SIGKILL still ends it.
    """
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def ignore_stop_signals() -> None:
    """Be deaf to STOP_SIGNALS whatever the signal mask says, which multiprocessing opens again; from any thread, over any handler of before."""
    sig_ign = ctypes.c_void_p(1)
    for number in STOP_SIGNALS:
        ctypes.CDLL(None).signal(number, sig_ign)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends, however it ends (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def tree_memory(process: ProcessId) -> int:
    """Proportional memory (PSS) of a process and its descendants in bytes: shared pages are counted once."""
    return sum(proportional_bytes(member.pid) for member in process.tree())


def proportional_bytes(pid: int) -> int:
    """PSS of one process; 0 where it has ended or may not be looked at."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0
