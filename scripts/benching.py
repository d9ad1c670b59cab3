"""What the benchmarks against a peer share: a process and its peak memory, the peer's environment, its allocator."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PEER = ("torch==2.13.0", "trl==1.16.0")
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


class Memory(threading.Thread):
    """Watches a process and all that come from it, those included whose parents have ended; `peak` is the largest sum of their PSS in bytes."""

    def __init__(self, pid: int, every_s: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.known = {pid: psutil.Process(pid)}
        self.every_s, self.peak, self.done = every_s, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(self.every_s):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        total = 0
        for process in list(self.known.values()):
            try:
                for child in process.children(recursive=True):
                    self.known.setdefault(child.pid, child)
            except psutil.Error:
                continue
        for pid, process in list(self.known.items()):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                del self.known[pid]
        return total


def measure(command: list[str], env: dict[str, str], log: Path) -> tuple[list[str], float]:
    """Run a side to its end; its output's lines and its peak memory in GiB."""
    with log.open("w") as errors:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
        memory = Memory(process.pid)
        memory.start()
        lines = []
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                print(f"  {line.rstrip()}", flush=True)
            status = process.wait()
        finally:  # also when this script is told to stop: a side ends with it
            process.terminate()
            process.wait()
            memory.done.set()
            memory.join()
    if status:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"{command[0]} ended with {status}; its output is above")
    return lines, memory.peak / 2**30


def peer_environment(folder: Path) -> Path:
    """TRL in a virtual environment of its own, made on the first call; returns its python."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print(f"making {folder} with {', '.join(PEER)} (a few minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *PEER, "pyarrow"], check=True)
        (folder / ".ready").touch()
    return python


def tcmalloc() -> dict[str, str]:
    """The peer's environment with tcmalloc, where the system has one."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = [line.split()[-1] for name in TCMALLOC for line in listed.splitlines() if line.strip().startswith(name)]
    return {"LD_PRELOAD": found[0]} if found else {}
