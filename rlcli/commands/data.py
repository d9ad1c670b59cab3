"""`msrl data`: prep, show, check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from rlcli.errors import RunError, UserError

if TYPE_CHECKING:
    from rlcli.data.settings import PrepareSettings
    from rlcli.data.store import PairSet, PromptSet

Folder = Annotated[Path, typer.Argument(help="A folder made by `msrl data prep`.")]


def prep(
    texts: Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Any setting, or with --map more columns by meaning.")] = None,
    dataset: Annotated[Optional[str], typer.Option("--dataset", "-d", help="A data recipe: math_17k, gsm8k, orca_rlhf, generic, or FILE.yaml.")] = None,
    input: Annotated[Optional[list[str]], typer.Option("--input", "-i", help="File, folder or glob of rows; may be given again.")] = None,
    out: Annotated[Optional[str], typer.Option("--out", "-o", help="Folder of the data set.")] = None,
    tokenizer: Annotated[Optional[str], typer.Option("--tokenizer", "-t", help="Folder of the model or its tokenizer.")] = None,
    kind: Annotated[Optional[str], typer.Option("--kind", help="prompts, pairs, or auto.")] = None,
    shape: Annotated[Optional[str], typer.Option("--shape", help="Form of the rows by name; auto: found and shown. See --shapes.")] = None,
    map: Annotated[Optional[list[str]], typer.Option("--map", metavar="MEANING=COLUMN", help="prompt=problem response=answer ...; meanings: prompt, query, response, system, history, chosen, rejected, messages, tools.")] = None,
    keep: Annotated[Optional[list[str]], typer.Option("--keep", help="Column carried along for the rewards; may be given again. None: all that are not used otherwise.")] = None,
    template: Annotated[Optional[str], typer.Option("--template", help="Chat template: built-in name (empty, alpaca, qwen, qwen3, llama3, ...) or a jinja file.")] = None,
    thinking: Annotated[Optional[bool], typer.Option("--thinking/--no-thinking", help="For chat templates that know it.")] = None,
    max_prompt: Annotated[Optional[int], typer.Option("--max-prompt-length", help="Longest prompt in tokens, inclusive; 0: no limit.")] = None,
    max_length: Annotated[Optional[int], typer.Option("--max-length", help="Longest prompt and answer together (pairs), inclusive; 0: no limit.")] = None,
    answer_after: Annotated[Optional[str], typer.Option("--answer-after", help='Keep of answers what follows this text, such as "####".')] = None,
    dedup: Annotated[Optional[bool], typer.Option("--dedup/--no-dedup", help="Drop rows that repeat an earlier one.")] = None,
    conflicts: Annotated[Optional[str], typer.Option("--conflicts", help="One prompt with different answers: keep or drop.")] = None,
    exclude: Annotated[Optional[list[str]], typer.Option("--exclude", "-x", help="Held-out file: rows that equal or nearly equal one of its are dropped.")] = None,
    validation: Annotated[Optional[float], typer.Option("--validation", help="Share set apart in OUT/validation.")] = None,
    on_bad_row: Annotated[Optional[str], typer.Option("--on-bad-row", help="stop, or skip and list in skipped.jsonl.")] = None,
    limit: Annotated[Optional[int], typer.Option("--limit", help="Read only the first so many rows.")] = None,
    workers: Annotated[Optional[int], typer.Option("--workers", "-w", help="Processes; the result is the same for every number.")] = None,
    log_interval: Annotated[Optional[int], typer.Option("--log-interval", help="Without a terminal, print progress every so many rows.")] = None,
    overwrite: Annotated[Optional[bool], typer.Option("--overwrite", help="Prepare anew where OUT holds a data set made otherwise.")] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="List the known shapes of rows and leave.")] = False,
) -> None:
    """Rows to a checked, deduplicated, tokenised data set.

    msrl data prep --dataset math_17k --input rows.parquet --tokenizer MODEL --out data/math

    msrl data prep --input rows.jsonl --map prompt=problem response=answer --tokenizer MODEL --out data/mine
    """
    if shapes:
        _list_shapes()
        return
    from rlcli.data.prepare import prepare
    from rlcli.data.recipe import load_settings
    from rlcli.data.summary import summary

    given: dict[str, Any] = {
        "input": input, "out": out, "tokenizer": tokenizer, "kind": kind, "shape": shape, "keep": keep, "template": template,
        "enable_thinking": thinking, "max_prompt_tokens": max_prompt, "max_tokens": max_length, "answer_after": answer_after,
        "deduplicate": dedup, "conflicts": conflicts, "exclude": exclude, "validation": validation, "on_bad_row": on_bad_row,
        "limit": limit, "workers": workers, "log_interval": log_interval, "overwrite": overwrite,
    }
    settings = load_settings(dataset, given, texts or [], map or [])
    try:
        with _progress(settings) as told:
            report = prepare(settings, told)
    except KeyboardInterrupt:
        raise RunError(f"Stopped: {settings.out} is as it was before.") from None
    _print(summary(report))


def show(
    folder: Folder,
    rows: Annotated[int, typer.Option("--rows", "-n", help="How many rows.")] = 3,
    first: Annotated[int, typer.Option("--first", "-f", help="Number of the first row shown, from 0.")] = 0,
    tokenizer: Annotated[Optional[str], typer.Option("--tokenizer", "-t", help="Folder of the tokenizer, where it has moved.")] = None,
    train_on: Annotated[str, typer.Option("--train-on", help="Pairs: mark last_answer or all_answers.")] = "last_answer",
) -> None:
    """Rows as the model sees them, with what is trained on marked; lengths; how the set was made."""
    from rlcli.data.show import length_bars, show_pair, show_prompt
    from rlcli.data.summary import manifest_lines
    from rlcli.data.tokens import load_tokenizer

    if train_on not in ("last_answer", "all_answers"):
        raise UserError(f"--train-on {train_on}: must be last_answer or all_answers")
    data = _open(folder)
    from rlcli.data.store import PromptSet

    loaded = load_tokenizer(tokenizer or data.manifest.tokenizer["folder"])
    for i in range(first, min(first + rows, len(data))):
        _print([*(show_prompt(data, i, loaded) if isinstance(data, PromptSet) else show_pair(data, i, loaded, train_on)), ""])
    _print([*length_bars(data), "", *manifest_lines(data.manifest)])


def check(
    folder: Folder,
    tokenizer: Annotated[Optional[str], typer.Option("--tokenizer", "-t", help="Also check that the set fits this model.")] = None,
) -> None:
    """Verify a prepared data set: hashes, counts, ids; and whether it fits a model."""
    from rlcli.data import check as checks

    done, faults = checks.check(folder, tokenizer)
    if faults:
        more = f"\n... and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise UserError("\n".join(faults[:20]) + more + "\nPrepare the data anew.")
    _print([f"[green]ok[/green]  {item}" for item in done])


def _open(folder: Path) -> PromptSet | PairSet:
    from rlcli.data.manifest import read_manifest
    from rlcli.data.store import PairSet, PromptSet

    return (PromptSet if read_manifest(folder).kind == "prompts" else PairSet).open(folder)


def _list_shapes() -> None:
    from rich.markup import escape

    from rlcli.data.convert import SHAPES

    width = max(len(shape.name) for shape in SHAPES)
    _print([f"[cyan]{shape.name:<{width}}[/cyan]  {shape.kind:<7}  {escape(shape.help)}" for shape in SHAPES])


def _print(lines: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)


@contextmanager
def _progress(settings: PrepareSettings) -> Iterator[Callable[[int, int, int], None]]:
    """A bar with rate and time left on a terminal; lines every `log_interval` rows elsewhere."""
    import sys
    import time

    begin = time.monotonic()
    if not sys.stderr.isatty():
        said = 0

        def log(rows: int, done: int, total: int) -> None:
            nonlocal said
            if settings.log_interval and rows - said >= settings.log_interval:
                said, passed = rows, time.monotonic() - begin
                left = passed * (total - done) / done if done else 0.0
                print(f"{rows:,} rows read, {100 * done / max(total, 1):.0f} %, {rows / passed:,.0f} rows/s, {left:.0f} s left", file=sys.stderr, flush=True)

        yield log
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.fields[rows]:,} rows"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]:,.0f} rows/s"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, rows=0, rate=0.0)
        yield lambda rows, done, total: bar.update(task, completed=done, total=total, rows=rows, rate=rows / max(time.monotonic() - begin, 1e-9))
