"""`msrl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    out: Annotated[Optional[Path], typer.Option("--out", "-o", help="The file to write; by default report.html in the run's folder.")] = None,
) -> None:
    """Write a run's report: one HTML page with curves, settings and samples, also while the run goes on.

    Example: msrl report runs/demo-20260101-120000
    """
    from rlcli.runs.report import write_report

    typer.echo(write_report(run, out))
