"""The CPU as a platform: gloo, threads shared out by role, memory of processes in place of devices."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

from rlcli.platforms import allocator
from rlcli.platforms.base import PRIVATE, Memory, Probe, Role
from rlcli.platforms.threads import Threads, allowed_cores, ranges

# Waiting OpenMP threads give their core back after so many turns (about a millisecond), so that a role that is waiting for
# its turn takes nothing from the one that computes. Fewer turns would put threads to sleep between the small operations of a decode step.
SPIN_TURNS = "20000"


class CpuPlatform:
    """One device: all cores that this process may use."""

    name = "cpu"
    collectives = "gloo"

    def device_count(self) -> int:
        return len(allowed_cores())

    def memory(self) -> Memory:
        page = resource.getpagesize()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Memory(resident, peak, _meminfo("MemAvailable"), _meminfo("MemTotal"))

    def env(self, role: Role, threads: Threads, preload: str = "") -> dict[str, str]:
        count = "1" if role == "reward" else str(threads.count)
        variables = {
            **PRIVATE,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "GOMP_SPINCOUNT": SPIN_TURNS,
            "KMP_BLOCKTIME": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if role == "rollout":
            variables |= self._rollout_env(threads)
        if preload:
            variables["LD_PRELOAD"] = preload
        return variables

    @staticmethod
    def _rollout_env(threads: Threads) -> dict[str, str]:
        """With one rank the model runs in the engine's own process, its threads unbound; more ranks are processes bound to their cores.

        vLLM's automatic binding would leave a core idle.
        """
        alone = len(threads.ranks) == 1
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if alone else "|".join(ranges(rank) for rank in threads.ranks),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # vLLM would compile a small function of its sampler at the first step: that needs a C++ compiler and many seconds, and saves little.
            "TORCH_COMPILE_DISABLE": "1",
        }

    def rollout_options(self, tensor_parallel: int) -> dict[str, Any]:
        # Blocks of 32 tokens are the smallest that vLLM's CPU attention takes: whole blocks of a prompt are shared by its samples.
        return {
            "enforce_eager": True,
            "block_size": 32,
            "distributed_executor_backend": "uni" if tensor_parallel == 1 else "mp",
        }

    def before_megatron(self) -> None:
        from rlcli.platforms import megatron_cpu, precision

        precision.settle()
        megatron_cpu.install()

    def after_megatron(self, adam: type[Any]) -> None:
        from rlcli.platforms import megatron_cpu

        megatron_cpu.patch_megatron(adam)

    def probes(self) -> list[Probe]:
        cores, memory = allowed_cores(), self.memory()
        found = allocator.find("auto")
        shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
        free = shared.f_bavail * shared.f_frsize if shared else 0
        flags = _cpu_flags()
        bf16 = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
        return [
            Probe("cores", True, f"{len(cores)} of {os.cpu_count()} usable ({ranges(cores)}), {platform.machine()}"),
            Probe("memory", memory.free > 4 << 30, f"{memory.free / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"),
            Probe("bfloat16", bf16, "the cores compute it natively" if bf16 else "no native bfloat16: train.dtype=float32 may be as fast"),
            Probe("allocator", found.path is not None, found.note),
            Probe("shared memory", free > 1 << 30, f"/dev/shm has {free / 2**30:.1f} GiB free; weight sync needs twice the model's size"),
        ]


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()
