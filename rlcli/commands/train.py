"""`msrl train dapo` and `msrl train dpo`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from rlcli.commands.budget import MaxTime, with_budget

Recipe = Annotated[Optional[str], typer.Option("--recipe", "-r", help="A recipe's name (see `msrl recipes list`) or a YAML file.")]
Overrides = Annotated[Optional[list[str]], typer.Argument(help="Settings as key=value, after any recipe: train.steps=100 optim.lr=1e-6")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan (arithmetic, layout, memory) and stop.")]


def dapo(overrides: Overrides = None, recipe: Recipe = None, dry_run: DryRun = False, max_time: MaxTime = None) -> None:
    """Train with DAPO: sample answers, judge them, update on the informative groups.

    Example: msrl train dapo --recipe demo train.steps=20 optim.lr=1e-5
    """
    from rlcli.config.load import load

    loaded = load("dapo", recipe, with_budget(overrides, max_time))  # what is wrong with it is told before the rest is imported
    from rlcli.trainers.launch import train_dapo

    train_dapo(loaded, dry_run=dry_run)


def dpo(overrides: Overrides = None, recipe: Recipe = None, dry_run: DryRun = False, max_time: MaxTime = None) -> None:
    """Train with DPO on preference pairs; the reference's log-probs are computed once and cached.

    Example: msrl train dpo --recipe demo_dpo dpo.beta=0.2
    """
    from rlcli.config.load import load

    loaded = load("dpo", recipe, with_budget(overrides, max_time))
    from rlcli.trainers.launch_dpo import train_dpo

    train_dpo(loaded, dry_run=dry_run)
