"""`msrl doctor`: is this machine ready, and what to do if not."""

from __future__ import annotations

from typing import Annotated, Any

import typer

MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}


def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also load torch, Megatron-core, Ray and vLLM, each in a process of its own.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    platform: Annotated[str, typer.Option("--platform", help="Kind of device; auto: what the machine has.")] = "auto",
) -> None:
    """Check packages and machine; exit code 1 if something is bad."""
    from rlcli.platforms.checkup import BAD, examine

    findings = examine(platform, deep)
    if as_json:
        _print_json(findings)
    else:
        _print(findings)
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(1)


def _print_json(findings: list[Any]) -> None:
    import dataclasses
    import json

    typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))


def _print(findings: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = None
    for finding in findings:
        if finding.group != group:
            group = finding.group
            table.add_row("", Text(group, style="bold"), "")
        mark, style = MARKS[finding.state]
        text = Text(finding.text)
        if finding.advice:
            text.append(f"  -> {finding.advice}", style=style)
        table.add_row(Text(mark, style=style), finding.name, text)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in MARKS}
    verdict = "Ready." if not counts["bad"] and not counts["warn"] else "Ready, with remarks." if not counts["bad"] else "Not ready."
    console.print(f"\n[bold]{verdict}[/bold] [dim]{counts['ok']} ok, {counts['warn']} to look at, {counts['bad']} bad[/dim]")
