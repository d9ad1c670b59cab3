"""Find a memory allocator that can be preloaded into the workers: tcmalloc first, then jemalloc.

glibc's allocator gives large blocks back to the kernel and faults them in again, which costs a tensor program on CPUs up to a
third of its time. A candidate counts only after a trial start: the loader merely warns about a library that it cannot preload.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlcli.errors import UserError

NAMES = ("tcmalloc_minimal", "tcmalloc", "jemalloc")
TRIAL_SECONDS = 20.0
NOT_FOUND = "off (none found: install tcmalloc, in Debian libtcmalloc-minimal4, for speed)"


@dataclass(frozen=True, slots=True)
class Allocator:
    """`path` is None where none is used; `note` is for people: the path, or "off", with the remedy where none was found."""

    path: str | None
    note: str

    def preload(self, existing: str = "") -> str:
        """The value of LD_PRELOAD: what was there before, then this library."""
        parts = [part for part in existing.replace(" ", ":").split(":") if part]
        if self.path and self.path not in parts:
            parts.append(self.path)
        return ":".join(parts)


def find(setting: str = "auto") -> Allocator:
    """The allocator for this machine. `setting`: auto, off, or the path of a library.

    Raises UserError only for a path that the user named and that cannot be preloaded; a machine without one is no error.
    """
    if setting == "off":
        return Allocator(None, "off")
    if setting != "auto":
        fault = trial(setting)
        if fault:
            raise UserError(f"cluster.preload_allocator={setting} cannot be preloaded ({fault}): name a tcmalloc or jemalloc library, or auto, or off")
        return Allocator(setting, setting)
    for candidate in candidates():
        if trial(candidate) is None:
            return Allocator(candidate, candidate)
    return Allocator(None, NOT_FOUND)


def candidates() -> list[str]:
    """Existing libraries to try, the best first: the loader's own answer, then the folders that systems put them in."""
    found: list[str] = []
    for name in NAMES:
        soname = ctypes.util.find_library(name)
        files = [str(path) for folder in _folders() for path in sorted(folder.glob(f"lib{name}.so*"))]
        found += [path for path in files if soname and Path(path).name == soname] + files
    return list(dict.fromkeys(found))


def _folders() -> list[Path]:
    machine = platform.machine()
    folders = [Path(prefix) for prefix in (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/local/lib64", "/usr/local/lib", "/usr/lib", "/lib64")]
    vllm = importlib.util.find_spec("vllm")  # some vLLM wheels carry a tcmalloc; finding it imports nothing
    if vllm and vllm.submodule_search_locations:
        folders.append(Path(vllm.submodule_search_locations[0]) / "libs")
    return [folder for folder in folders if folder.is_dir()]


@functools.cache
def trial(library: str) -> str | None:
    """Start a Python process with `library` preloaded, once for each; None if that works, else what went wrong."""
    if not Path(library).is_file():
        return "no such file"
    environment = {**os.environ, "LD_PRELOAD": library}
    try:
        done = subprocess.run([sys.executable, "-c", "pass"], env=environment, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"a trial start took longer than {TRIAL_SECONDS:.0f} s"
    if done.returncode != 0:
        return f"a trial start ended with {done.returncode}"
    if "cannot be preloaded" in done.stderr or "ERROR: ld.so" in done.stderr:
        return "the loader refuses it"
    return None
