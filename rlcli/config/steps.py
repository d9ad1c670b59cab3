"""How many updates a run of preference pairs takes, for the trainer and for the plan of it."""

from __future__ import annotations

from rlcli.config.schema import DpoRecipe


def trained_pairs(config: DpoRecipe, rows: int) -> int:
    """Pairs that a run of DPO on `rows` pairs trains on, repetitions counted: those of `train.steps`, or of `train.epochs`."""
    if config.train.steps:
        return config.train.steps * config.train.batch_pairs
    return max(1, round(rows * config.train.epochs))


def pair_steps(config: DpoRecipe, rows: int) -> int:
    """Updates of a run of DPO on `rows` pairs; measured in epochs, its last one may be smaller than the others."""
    return -(-trained_pairs(config, rows) // config.train.batch_pairs)
