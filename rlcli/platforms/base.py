"""What msrl asks of a kind of machine. Only this folder knows a device's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlcli.errors import UserError
from rlcli.platforms.threads import Threads

Role = Literal["driver", "train", "rollout", "reward"]

# Nothing of msrl's phones home or asks a hub for what is not on this machine.
PRIVATE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of this process now, its peak, and of the device: free and in all."""

    used: int
    peak: int
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Probe:
    """One line of `msrl doctor`: what was looked at, whether it is as it should be, and what to do if not."""

    name: str
    ok: bool
    text: str


class Platform(Protocol):
    """One kind of device. Instances hold no state; everything is asked of the machine when called."""

    name: str  # as in `cluster.platform`
    collectives: str  # torch.distributed's backend

    def device_count(self) -> int:
        """Devices of this machine that this process may use."""
        ...

    def memory(self) -> Memory: ...

    def env(self, role: Role, threads: Threads, preload: str = "") -> dict[str, str]:
        """Environment that a worker of `role` must be started with. `preload` is the value for LD_PRELOAD, "" for none."""
        ...

    def rollout_options(self, tensor_parallel: int) -> dict[str, Any]:
        """Arguments of vLLM's engine that this platform asks for."""
        ...

    def before_megatron(self) -> None:
        """Run in a training process before Megatron-core is imported."""
        ...

    def after_megatron(self, adam: type[Any]) -> None:
        """Run in a training process once Megatron-core is imported. `adam`: the optimizer that Megatron is to use where it finds no fused one."""
        ...

    def probes(self) -> list[Probe]:
        """What `msrl doctor` looks at on this machine."""
        ...


def _cpu() -> Platform:
    from rlcli.platforms.cpu import CpuPlatform

    return CpuPlatform()


PLATFORMS: dict[str, Callable[[], Platform]] = {"cpu": _cpu}


def pick(name: str = "auto") -> Platform:
    """The platform of that name; auto: the first whose devices this machine has, the CPU last.

    Raises UserError for a name that does not exist and for a platform without a device here.
    """
    if name == "auto":
        found = (make() for make in PLATFORMS.values())
        return next(platform for platform in found if platform.device_count() > 0)
    if name not in PLATFORMS:
        raise UserError(f"cluster.platform={name} is unknown: use one of auto, {', '.join(PLATFORMS)}")
    platform = PLATFORMS[name]()
    if platform.device_count() == 0:
        raise UserError(f"cluster.platform={name}, but this machine shows no such device: set cluster.platform=auto")
    return platform
