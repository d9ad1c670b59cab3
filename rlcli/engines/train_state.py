"""Saving and loading of model and optimizer by Megatron's distributed checkpointing: every rank writes its share, any layout reads it.

Import this only where the platform has prepared the process for Megatron (`Platform.before_megatron`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

if TYPE_CHECKING:
    from rlcli.engines.optimizer import Trainer

# The optimizer's state is gathered over data parallel ranks, so that it loads at any TP, PP and DP.
OPTIMIZER_LAYOUT = {"distrib_optim_sharding_type": "fully_reshardable"}


class Store:
    """Writes and reads the training state of this rank; every call is made by all ranks."""

    def __init__(self) -> None:
        self.writing: AsyncCallsQueue | None = None

    def save(self, model: Any, trainer: Trainer, folder: Path, asynchronous: bool, optimizer: bool) -> None:
        """Write into `folder`, which exists and is empty. asynchronous: a forked process writes what stood in memory at the time of the call."""
        self.finished(wait=True)
        if optimizer:
            begin_moments(trainer)
        state = sharded_state(model, trainer, loading=False, optimizer=optimizer)
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=asynchronous)
        if asynchronous:
            self.writing = self.writing or AsyncCallsQueue()
            self.writing.schedule_async_request(request)

    def finished(self, wait: bool) -> bool:
        """Whether nothing is being written any more, on all ranks; `wait`: return only then. Raises what the writing raised."""
        if self.writing is None:
            return True
        self.writing.maybe_finalize_async_calls(blocking=wait)
        return self.writing.get_num_unfinalized_calls() == 0

    def load(self, model: Any, trainer: Trainer, folder: Path, optimizer: bool) -> None:
        """Set weights, and optimizer state if asked, to what lies in `folder`."""
        with torch.no_grad():
            state = dist_checkpointing.load(sharded_state(model, trainer, loading=True, optimizer=optimizer), str(folder))
            model.load_state_dict(state["model"])
            if optimizer:
                trainer.optimizer.load_state_dict(state["optimizer"])
                trainer.reset_decay()
            else:
                trainer.optimizer.reload_model_params()

    def close(self) -> None:
        """Wait for what is being written."""
        self.finished(wait=True)
        if self.writing is not None:
            self.writing.close()
            self.writing = None


def begin_moments(trainer: Trainer) -> None:
    """Give parameters that were never updated the moments that their first update begins with: Megatron saves only what is there."""
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
            for param in group["params"]:
                if not part.optimizer.state[param]:
                    part.optimizer.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))


def sharded_state(model: Any, trainer: Trainer, loading: bool, optimizer: bool) -> dict[str, Any]:
    """This rank's shards of model and optimizer, with their places in the whole."""
    state = {"model": model.sharded_state_dict()}
    if optimizer:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=OPTIMIZER_LAYOUT)
    return state
