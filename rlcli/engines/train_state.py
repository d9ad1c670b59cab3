"""Saving and loading of model and optimizer in Megatron's torch_dist format: every rank writes its share, any layout reads it.

Megatron says where each tensor belongs; the files are written and read here. Its own writer copies the optimizer's state two to three
times and forks, its loader has every data parallel rank hold the whole of it; here each rank writes and reads the part that it owns, from and to
where it lies.

Import this only where the platform has prepared the process for Megatron (`Platform.before_megatron`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from rlcli.checkpoint.dist_records import describe
from rlcli.checkpoint.shard_reader import ShardReader
from rlcli.checkpoint.shard_writer import Piece, ShardWriter, runs

if TYPE_CHECKING:
    from rlcli.engines.optimizer import Trainer

LAYOUT = {"distrib_optim_sharding_type": "fully_reshardable"}  # the optimizer's state has the shapes of the model's parameters
PREFIX = "optimizer.state"  # Megatron's, of the names of what belongs to a parameter

Share = Callable[[Any], list[Any]]  # every rank's value, in rank order


class Store:
    """Writes and reads the training state of this rank; every call but `settle` is made by all ranks."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.writer: ShardWriter | None = None
        self.folder, self.common = Path(), dict[str, Any]()

    def save(self, model: Any, trainer: Trainer, folder: Path, asynchronous: bool, optimizer: bool) -> None:
        """Write into `folder`, which exists and is empty. asynchronous: returns at once; `settle` before weights or optimizer change."""
        self.finished(wait=True)
        if optimizer:
            begin_moments(trainer)
        state, self.common = save_preprocess(sharded_state(model, trainer, loading=False, optimizer=optimizer), validate_access_integrity=False)
        mine = [part for part in nested_values(state) if is_main_replica(part.replica_id)]
        pieces = [piece_of(part) for part in mine if isinstance(part, ShardedTensor)]
        objects = {part.unique_key: [part.data] for part in mine if isinstance(part, ShardedObject)}
        self.folder, rank = folder, torch.distributed.get_rank()
        self.writer = ShardWriter(folder / f"__{rank}_0.distcp", pieces, objects)
        if not asynchronous:
            self.finished(wait=True)

    def settle(self) -> None:
        """Return when this rank's weights and optimizer may change."""
        if self.writer is not None:
            self.writer.settle()

    def finished(self, wait: bool) -> bool:
        """Whether nothing is being written any more, on all ranks; `wait`: return only then. Raises, on every rank, what any rank's writing raised."""
        if self.writer is None:
            return True
        done = self.writer.done(wait)
        answers = self.share((done, self.writer.placed if done else None, self.writer.error if done else None))
        if not all(answer[0] for answer in answers):
            return False
        self.writer = None
        error = next((answer[2] for answer in answers if answer[2] is not None), None)
        if error is None:
            error = next(filter(None, self.share(self.describe(answers))), None)
        if error is not None:
            raise error
        return True

    def describe(self, answers: list[Any]) -> Exception | None:
        """On the first rank, write what makes the files of all one checkpoint; what went wrong."""
        if torch.distributed.get_rank() == 0:
            try:
                describe(self.folder, itertools.chain.from_iterable(answer[1] for answer in answers), self.common)
            except Exception as error:
                return error
        return None

    def load(self, model: Any, trainer: Trainer, folder: Path, optimizer: bool) -> None:
        """Set weights, and optimizer state if asked, to what lies in `folder`."""
        self.finished(wait=True)
        state = sharded_state(model, trainer, loading=True, optimizer=optimizer)
        weights, rest = extract_sharded_tensors_and_factories(state)
        rest = dist_checkpointing.load(rest, str(folder))  # what is no tensor
        reader = ShardReader(folder)
        with torch.no_grad():
            for place in nested_values(weights):
                fill(reader, place)
            if not optimizer:
                trainer.optimizer.reload_model_params()
                return
            load_groups(trainer, rest["optimizer"])
            for part in trainer.optimizer.chained_optimizers:
                for shard in owned_state(part, state["model"]):
                    fill(reader, shard)
            trainer.reset_decay()

    def close(self) -> None:
        """Wait for what is being written."""
        if self.writer is not None:
            self.writer.done(wait=True)


def begin_moments(trainer: Trainer) -> None:
    """Adam's state before the first step, which a save at the start holds too: zeros, at step 0, the same as without."""
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
            for param in group["params"]:
                if not part.optimizer.state[param]:
                    part.optimizer.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))


def load_groups(trainer: Trainer, state: Any) -> None:
    """Set what the optimizer holds beside tensors, step counts and parameter groups, and make room for its tensors."""
    for part in [state] if len(trainer.optimizer.chained_optimizers) == 1 else state.values():
        part.pop("param_state", None)  # empty, see `sharded_state`
    trainer.optimizer.load_state_dict(state)


def fill(reader: ShardReader, place: ShardedTensor | ShardedTensorFactory) -> None:
    """Read what Megatron's shard, or the shards that a factory makes of a parameter, name: into their own memory."""
    for shard in [place] if isinstance(place, ShardedTensor) else nested_values(place.build()):
        reader.fill(piece_of(shard), padded=shard.allow_shape_mismatch)


def sharded_state(model: Any, trainer: Trainer, loading: bool, optimizer: bool) -> dict[str, Any]:
    """This rank's shards of model and optimizer, with their places in the whole."""
    state = {"model": model.sharded_state_dict()}
    if optimizer:
        for part in trainer.optimizer.chained_optimizers:
            part.sharded_param_state_fully_reshardable = no_state if loading else partial(owned_state, part)
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=LAYOUT)
    return state


def no_state(*unused: Any, **also_unused: Any) -> list[ShardedTensor]:
    """Stands in for Megatron's list of whole tensors to be loaded: `Store.load` reads what the rank owns, once there is room for it."""
    return []


def owned_state(part: Any, model_state: dict[str, Any], *unused: Any, **also_unused: Any) -> list[ShardedTensor]:
    """What this rank owns of the optimizer's state: master weights and moments, as boxes of tensors shaped like the parameters.

    Stands in for Megatron's gathering of everything on every data parallel rank.
    """
    places = {id(value.data): value for value in nested_values(model_state) if isinstance(value, (ShardedTensor, ShardedTensorFactory))}
    out: list[ShardedTensor] = []
    for maps in part.gbuf_ranges:
        for owned in (owned for buckets in maps.values() for bucket in buckets for owned in bucket["param_map"].items()):
            param, begin = owned[0], owned[1]["param"].start
            for name, values in part._get_main_param_and_optimizer_states(param).items():
                if torch.is_tensor(values) and values.dim():
                    out += boxes(places[id(param)], param, begin, values, f"{PREFIX}.{name}.")
    return out


def boxes(place: Any, param: torch.Tensor, begin: int, values: torch.Tensor, prefix: str) -> Iterator[ShardedTensor]:
    """`values`, which belong to the parameter's elements from `begin` on in row order, as boxes of the whole tensor that `place` tells."""
    flat, end = values.detach().reshape(-1), begin + values.numel()
    for shard in [place] if isinstance(place, ShardedTensor) else nested_values(place.build()):
        first = shard.data.storage_offset() - param.storage_offset()  # a factory's shards are runs of the parameter's rows
        start, stop = max(begin, first), min(end, first + shard.data.numel())
        for corner, size, number in runs(start - first, stop - first, tuple(shard.local_shape)):
            at, lead = first + number - begin, shard.prepend_axis_num
            yield replace(
                shard,
                key=prefix + shard.key,
                data=flat[at : at + math.prod(size)].view(size),
                dtype=flat.dtype,
                local_shape=size,
                global_offset=(*shard.global_offset[:lead], *(o + c for o, c in zip(shard.global_offset[lead:], corner, strict=True))),
                axis_fragmentations=None,
                replica_id=(*shard.replica_id[:2], 0),  # data parallel ranks own different parts
            )


def piece_of(shard: ShardedTensor) -> Piece:
    """What the writer needs of Megatron's shard."""
    lead = shard.prepend_axis_num
    return Piece(shard.key, tuple(shard.global_shape), tuple(shard.global_offset), (*(1,) * lead, *shard.local_shape), shard.data, lead)
