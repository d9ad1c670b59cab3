"""What the benchmarks against a peer share: a process and its peak memory, the peer's environment, its allocator."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from rlcli.cluster.processes import proportional_bytes

ROOT = Path(__file__).resolve().parent.parent
PEER = ("torch==2.13.0", "trl==1.16.0")
LEAST_RISE = 0.01  # of the counters, for PSS to be read again
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


class Memory(threading.Thread):
    """Watches a process and all that come from it, those included whose parents have ended; `peak` is the largest sum of their PSS in bytes.

    Reading PSS walks over all pages, and takes a core from what is measured: more of it the more processes a side has. So PSS is read only
    when the kernel's own counters, which cost nothing, stand higher than ever by LEAST_RISE: the peak is that near to the true one.
    """

    def __init__(self, pid: int, every_s: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.known = {pid}
        self.every_s, self.peak, self.highest, self.done = every_s, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(self.every_s):
            self.look()

    def look(self) -> None:
        """Take note of new processes, and of the memory where there is more of it than before."""
        parents = parents_of_all()
        self.known &= parents.keys()
        while new := {pid for pid, parent in parents.items() if parent in self.known} - self.known:
            self.known |= new
        counted = sum(private_bytes(pid) for pid in self.known)
        if counted > self.highest * (1 + LEAST_RISE):
            self.highest = counted
            self.peak = max(self.peak, sum(proportional_bytes(pid) for pid in self.known))


def parents_of_all() -> dict[int, int]:
    """The parent of every process of the machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def private_bytes(pid: int) -> int:
    """Resident pages that are no file's, shared memory included, as the kernel counts them."""
    with contextlib.suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(("RssAnon", "RssShmem")))
        return sum(int(value.split()[0]) for value in lines.values()) * 1024
    return 0


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
