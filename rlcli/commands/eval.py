"""`msrl eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def evaluate(
    overrides: Annotated[Optional[list[str]], typer.Argument(help="Settings as key=value: model=DIR data.eval=FILE eval.samples_per_prompt=8")] = None,
    recipe: Annotated[Optional[str], typer.Option("--recipe", "-r", help="A recipe's name or a YAML file, for everything not given.")] = None,
    run: Annotated[Optional[Path], typer.Option("--run", help="Measure a run's final model with the run's own settings.")] = None,
    out: Annotated[Optional[Path], typer.Option("--out", help="Write every sample with its verdict here, as jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model on held-out prompts: avg@k, pass@k, maj@k, lengths, share truncated.

    Example: msrl eval --recipe demo model=runs/my-run/final eval.samples_per_prompt=8
    """
    from rlcli.trainers.evaluation_run import measure

    measure(overrides or [], recipe, run, out, as_json)
