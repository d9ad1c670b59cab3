"""What msrl adds to vLLM's own worker processes: taking new weights, scoring at a temperature, and ending with their owner."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

from rlcli.cluster.processes import ProcessId, ignore_stop_signals
from rlcli.engines.base import WeightHandle
from rlcli.engines.weights import read_files
from rlcli.platforms import precision

OWNER = "MSRL_ROLLOUT_OWNER"  # "pid start-time" of the actor that these processes belong to


class WorkerExtension:
    """Mixed into vLLM's worker (worker_extension_cls); called on every rank by collective_rpc."""

    model_runner: Any

    def msrl_update_weights(self, version: int, files: list[str], tied_head: bool) -> int:
        """Take the weights of `version` into the running model; returns the version.

        Raises RunError where a file cannot be read or is of another version.
        """
        handle = WeightHandle(version, tuple(files), tied_head)
        for _ in read_files(handle):  # all of it first, which costs little: a reload that is broken off leaves a model without weights
            pass
        self.model_runner.reload_weights(weights_iterator=read_files(handle))
        if tied_head:
            self.msrl_repack_head()
        return version

    def msrl_repack_head(self) -> None:
        """A tied head that keeps a packed copy of the embedding would go on with the old weights: pack it anew."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        method = getattr(head, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(head)

    def msrl_score_temperature(self, temperature: float) -> None:
        """Divide all logits by `temperature` until it is set to 1 again: log-probs of given tokens know no temperature of their own."""
        model = self.model_runner.get_model()
        model.__dict__.pop("compute_logits", None)
        if temperature != 1.0:
            compute: Callable[..., Any] = model.compute_logits
            model.__dict__["compute_logits"] = lambda *args, **kwargs: _divided(compute(*args, **kwargs), temperature)


def _divided(logits: Any, temperature: float) -> Any:
    return None if logits is None else logits / temperature


def end_with_owner(owner: ProcessId) -> None:
    """Start a thread that kills this process, and vLLM's process above it, as soon as the owner is gone, however it ended."""
    threading.Thread(target=_watch, args=(owner, os.getppid()), daemon=True, name="msrl-owner").start()


def _watch(owner: ProcessId, parent: int) -> None:
    if owner.alive():
        with contextlib.suppress(ProcessLookupError):  # it ended just now, which is what is waited for
            select.select([os.pidfd_open(owner.pid)], [], [])  # readable once the process has ended
    above = os.getppid()
    if above == parent and parent not in (owner.pid, 1):
        os.kill(parent, signal.SIGKILL)  # the engine's process, which would wait for ever
    os.kill(os.getpid(), signal.SIGKILL)


if OWNER in os.environ:
    ignore_stop_signals()  # vLLM would end by them
    precision.settle()  # vLLM imports this before it makes the model, whose rotary table is computed but once
    _pid, _started = os.environ[OWNER].split()
    end_with_owner(ProcessId(int(_pid), float(_started)))
