"""HF weights into a live Megatron model: each rank reads only its slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.errors import RunError
from rlcli.models.files import Reader
from rlcli.models.layout import Layout
from rlcli.models.megatron import check_layout, local_rules
from rlcli.models.rules import Rule, join
from rlcli.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch


def load_hf(model: torch.nn.Module, spec: ModelSpec, layout: Layout) -> None:
    """Copy the weights of `spec.folder` into `model`, the GPTModel (or a wrapper of it) of `layout`'s rank, in the model's own dtype.

    Raises RunError where the model's parameters and the weight table differ in name or shape: nothing is left as initialised.
    """
    import torch

    check_layout(spec, layout)
    read = Reader(spec.tensors)
    try:
        with torch.no_grad():
            for rule, target in pair(model, spec, layout):
                parts, rank = layout.split(rule.expert is not None)
                target.copy_(join(rule, parts, rank, read))
    finally:
        read.close()


def pair(model: torch.nn.Module, spec: ModelSpec, layout: Layout) -> list[tuple[Rule, torch.Tensor]]:
    """Each rule of this rank with the live tensor that it describes; RunError where one side has no partner or another shape."""
    live: dict[str, torch.Tensor] = {bare(n): p for n, p in model.named_parameters()}
    rules = local_rules(spec, layout)
    buffers = {bare(n): b for n, b in model.named_buffers()}
    live |= {n: buffers[n] for n, rule in rules.items() if rule.buffer and n in buffers}
    if live.keys() != rules.keys():
        lone = sorted(live.keys() ^ rules.keys())
        raise RunError(f"the {spec.family.name} weight table and the Megatron model disagree about {', '.join(lone[:3])} ({len(lone)} in all)")
    for name, rule in rules.items():
        shape = rule.shape(layout.split(rule.expert is not None)[0])
        if tuple(live[name].shape) != shape:
            raise RunError(f"{name} is {list(live[name].shape)} in the Megatron model, but its HF tensors make it {list(shape)}")
    return [(rule, live[name]) for name, rule in rules.items()]


def bare(name: str) -> str:
    """A parameter's name without the "module." that each wrapper puts before it."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name
