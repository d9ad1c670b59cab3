"""`msrl samples`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rlcli.errors import UserError


def samples(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    step: Annotated[Optional[int], typer.Option("--step", help="Only this step's; by default the newest of all.")] = None,
    right: Annotated[bool, typer.Option("--right", help="Only right ones.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong ones.")] = False,
    held_out: Annotated[bool, typer.Option("--eval", help="Those of the evaluations instead of the training.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 5,
    raw: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Read what the model wrote during a run.

    Example: msrl samples runs/demo --step 10 --wrong
    """
    from rlcli.runs.reading import find_samples, show

    if right and wrong:
        raise UserError("--right and --wrong exclude each other: give one of them, or neither for both")
    correct = True if right else False if wrong else None
    found = find_samples(run, "eval" if held_out else "train", step, correct, limit)
    typer.echo("\n\n".join(show(row, raw) for row in found) if not raw else "\n".join(show(row, raw) for row in found))
