"""`msrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rlcli.commands.budget import MaxTime, with_budget


def resume(
    ckpt: Annotated[Path, typer.Option("--ckpt", help="A run's folder, its checkpoints folder, or one checkpoint.")],
    overrides: Annotated[Optional[list[str]], typer.Argument(help="Settings that may change: train.steps=2000, parallel.*, optim.*, run.*, ...")] = None,
    allow_data_change: Annotated[bool, typer.Option("--allow-data-change", help="Go on with other training data, from its beginning.")] = False,
    max_time: MaxTime = None,
) -> None:
    """Go on with a run from its newest good checkpoint; nothing else is needed.

    Example: msrl resume --ckpt runs/demo-20260101-120000 train.steps=200
    """
    from rlcli.trainers.resume import resume as go_on

    go_on(ckpt, with_budget(overrides, max_time), allow_data_change)
