"""Megatron-core on a CPU: every "current accelerator" that it asks for is made to mean the CPU.

Megatron names CUDA devices, streams and generators throughout. `install()` replaces those names in torch, before Megatron
is imported; `patch_megatron()` afterwards repairs what needs Transformer Engine. Both change the whole process and belong in
training processes only. `torch.cuda.is_available()` stays False: Megatron asks it to choose paths that a CPU must not take.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
PAGE_BYTES = resource.getpagesize()
# Functions that make a tensor on a device that they are told.
FACTORIES = [
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "eye", "zeros_like", "ones_like", "empty_like", "full_like",
    "arange", "linspace", "rand", "randn", "randint",
]

_installed = False
_patched = False


class Stream:
    """A stream where everything runs in order anyway: nothing to wait for."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    """A point in time on such a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Generators:
    """One random generator for each device: here the CPU's, whatever the index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def install() -> None:
    """Make torch's names for an accelerator mean the CPU; once, and only where there is no CUDA device. Call it before Megatron is imported."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    from torch import _dynamo  # noqa: F401  it lists torch's functions when first imported, and must see the original ones

    _replace_devices()
    _replace_streams()
    _replace_random()
    _replace_memory()
    _replace_tensors()
    # Without a GPU, compiling costs time and needs a C++ compiler that a user's machine may lack.
    torch.compile = lambda model=None, *args, **kwargs: model if callable(model) else (lambda function: function)  # type: ignore[assignment]
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    _installed = True


def patch_megatron(adam: type[torch.optim.Optimizer]) -> None:
    """After Megatron is imported: make `adam` (of apex FusedAdam's contract) its Adam, which else needs apex or Transformer Engine."""
    global _patched
    if _patched:
        return
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    optimizers.Adam = distrib_optimizer.Adam = adam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.USING_APEX_OPTIMIZER = True, True
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads the name even without Transformer Engine
    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = _split_sizes  # 0.16 makes host lists of split sizes only if they are on CUDA
    _patched = True


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _null_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _set_all(owner: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(owner, name, value)


def _replace_devices() -> None:
    _set_all(
        torch.cuda,
        current_device=lambda: CPU,
        device_count=lambda: 1,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        ipc_collect=_nothing,
        device=_null_context,
        _lazy_call=lambda function, **kwargs: function(),
        _lazy_init=_nothing,
        get_device_name=lambda *args: "cpu",
        get_device_capability=lambda *args: (0, 0),
    )
    _set_all(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, range=_null_context)


def _replace_streams() -> None:
    _set_all(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        current_stream=lambda *args, **kwargs: Stream(),
        default_stream=lambda *args, **kwargs: Stream(),
        stream=_null_context,
        set_stream=_nothing,
    )
    torch.Tensor.record_stream = _nothing  # type: ignore[assignment,method-assign]


def _replace_random() -> None:
    for module in (torch.cuda, torch.cuda.random):
        _set_all(
            module,
            get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
            set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
            manual_seed=lambda seed: torch.default_generator.manual_seed(int(seed)),
            manual_seed_all=lambda seed: torch.default_generator.manual_seed(int(seed)),
            default_generators=Generators(),
        )


def _replace_memory() -> None:
    _set_all(
        torch.cuda,
        memory_allocated=resident_bytes,
        memory_reserved=resident_bytes,
        max_memory_allocated=peak_resident_bytes,
        max_memory_reserved=peak_resident_bytes,
        reset_peak_memory_stats=_nothing,
        memory_stats=lambda *args, **kwargs: {},
    )


def resident_bytes(*args: Any, **kwargs: Any) -> int:
    """Memory that this process has resident now, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def peak_resident_bytes(*args: Any, **kwargs: Any) -> int:
    """Most memory that this process ever had resident, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _replace_tensors() -> None:
    """device="cuda", .cuda(), pinned memory, autocast("cuda") and tensor types by name."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        _set_all(owner, to=_on_cpu(owner.to), cuda=lambda self, *args, **kwargs: self)
    plain_type, autocast_init = torch.Tensor.type, torch.autocast.__init__

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = plain_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    _set_all(
        torch.Tensor,
        new_empty=_on_cpu(torch.Tensor.new_empty),
        pin_memory=lambda self, *args, **kwargs: self,
        type=tensor_type,
    )
    torch.autocast.__init__ = autocast  # type: ignore[method-assign]


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a CUDA device among its arguments replaced by the CPU, and no pinned memory."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if any(_is_cuda(argument) for argument in args):
            args = tuple(CPU if _is_cuda(argument) else argument for argument in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper
