"""What a run says: one aligned line a step. On a terminal a progress bar runs below the lines; anywhere else there are plain lines alone."""

from __future__ import annotations

import logging
import math
import os
import select
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

Metrics = Mapping[str, float]

HEADER_EVERY = 25  # lines between two headers


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, its width, and how its text comes from a step's metrics ("" where there is nothing to say)."""

    head: str
    width: int
    text: Callable[[Metrics], str]


def number(name: str, digits: int) -> Callable[[Metrics], str]:
    return lambda metrics: f"{metrics[name]:.{digits}f}" if name in metrics else ""


def percent(name: str) -> Callable[[Metrics], str]:
    return lambda metrics: f"{metrics[name]:.1%}" if name in metrics else ""


def brief(value: float) -> str:
    """A rate in at most five characters: 873, 1.2k, 45k."""
    if not math.isfinite(value):
        return str(value)
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 10_000 else f"{value / 1000:.0f}k"


def _kept(metrics: Metrics) -> str:
    """Groups trained on, and groups dropped for any reason."""
    dropped = sum(value for name, value in metrics.items() if name.startswith("sampling/dropped_"))
    return f"{metrics['sampling/trained']:.0f}/{dropped:.0f}" if "sampling/trained" in metrics else ""


def _clips(metrics: Metrics) -> str:
    """Tokens whose ratio was clipped below and above, in percent."""
    if "update/clip_low" not in metrics:
        return ""
    return f"{100 * metrics['update/clip_low']:.1f}/{100 * metrics['update/clip_high']:.1f}"


def _rate(name: str) -> Callable[[Metrics], str]:
    return lambda metrics: brief(metrics[name]) if name in metrics else ""


DAPO_COLUMNS = (
    Column("reward", 7, number("sampled/reward", 3)),
    Column("right", 6, percent("sampled/accuracy")),
    Column("kept/drop", 9, _kept),
    Column("length", 7, number("sampled/response_tokens", 1)),
    Column("entropy", 7, number("update/entropy", 3)),
    Column("clip %", 9, _clips),
    Column("gap", 6, number("update/gap", 3)),
    Column("|grad|", 7, number("update/grad_norm", 3)),
    Column("tok/s", 6, _rate("rate/trained_tokens_per_s")),
    Column("s", 6, number("seconds/step", 1)),
)
DPO_COLUMNS = (
    Column("loss", 7, number("update/loss", 4)),
    Column("right", 6, percent("update/accuracy")),
    Column("margin", 8, number("update/margin", 4)),
    Column("chosen", 8, number("update/reward_chosen", 4)),
    Column("rejected", 8, number("update/reward_rejected", 4)),
    Column("KL", 7, number("update/kl", 4)),
    Column("|grad|", 7, number("update/grad_norm", 3)),
    Column("pairs/s", 7, number("rate/pairs_per_s", 2)),
    Column("tok/s", 6, _rate("rate/update_tokens_per_s")),
    Column("s", 6, number("seconds/step", 1)),
)
COLUMNS = {"dapo": DAPO_COLUMNS, "dpo": DPO_COLUMNS}
EVAL_PARTS = (
    ("accuracy", "{:.1%} right"),
    ("pass@", "{:.1%} {}"),
    ("maj@", "{:.1%} {}"),
    ("margin", "margin {:.4f}"),
    ("loss", "loss {:.4f}"),
    ("response_tokens", "{:.1f} tokens"),
    ("truncated", "{:.1%} cut"),
)


class Console:
    """Prints to `out` (stdout) and, line by line, to the log."""

    def __init__(self, kind: str, total: int = 0, out: TextIO | None = None, log: logging.Logger | None = None) -> None:
        """kind: dapo or dpo. total: steps of the run, 0 while unknown."""
        self.columns = COLUMNS[kind]
        self.total = total
        self.out = out or sys.stdout
        self.log = log
        self.lines = 0
        self.progress = _bar(self.out) if self.out.isatty() else None
        self._task: Any = None

    def step(self, step: int, metrics: Metrics) -> None:
        """The line of one finished step, below a header now and then."""
        if self.lines % HEADER_EVERY == 0:
            self._print("dim", self._line("step", [column.head for column in self.columns]))
        self.lines += 1
        self._print("", self._line(f"{step}/{self.total}" if self.total else str(step), [column.text(metrics) for column in self.columns]))
        self._advance(step)

    def evaluation(self, step: int, measured: Metrics, when: str) -> None:
        """One line with the main measures of an evaluation."""
        parts = [
            form.format(value, name)
            for wanted, form in EVAL_PARTS
            for name, value in measured.items()
            if (name.startswith(wanted) if wanted.endswith("@") else name == wanted) and name != "pass@1"
        ]
        self._print("bold", f"evaluation {when}: {', '.join(parts)}")
        self._advance(step)

    def info(self, text: str) -> None:
        self._print("", text)

    def warn(self, text: str) -> None:
        """A line that stands out; the run goes on."""
        self._print("yellow", f"warning: {text}", logging.WARNING)

    def doing(self, text: str) -> None:
        """What the run does at the moment; shown beside the bar, so on a terminal alone."""
        if self.progress is not None:
            self._advance(None)
            self.progress.update(self._task, what=text)

    def close(self) -> None:
        """Take the bar away."""
        if self.progress is not None and self._task is not None:
            self.progress.stop()
            self._task = None

    def _line(self, first: str, texts: list[str]) -> str:
        cells = [f"{text:>{column.width}}" for text, column in zip(texts, self.columns, strict=True)]
        width = max(9, 2 * len(str(self.total)) + 1)
        return f"{first:>{width}}  " + "  ".join(cells)

    def _print(self, style: str, text: str, level: int = logging.INFO) -> None:
        if self.log is not None:
            self.log.log(level, text)
        try:
            if self.progress is None:
                print(text, file=self.out, flush=True)
            else:
                self.progress.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            leave_screen()  # the log has it

    def _advance(self, step: int | None) -> None:
        if self.progress is None:
            return
        if self._task is None:
            self.progress.start()
            self._task = self.progress.add_task("", total=self.total or None, what="")
        if step is not None:
            self.progress.update(self._task, completed=step, what="")


def leave_screen() -> None:
    """Where the terminal is gone, or who read a pipe, let what is printed go nowhere: each line would fail, and no run should end by that."""
    asking = select.poll()
    for handle in (1, 2):
        asking.register(handle, select.POLLOUT)
    gone = [handle for handle, events in asking.poll(0) if events & (select.POLLERR | select.POLLHUP)]
    for handle in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)


def _bar(out: TextIO) -> Any:
    """A progress bar that vanishes when it is stopped."""
    from rich import progress
    from rich.console import Console as Terminal

    return progress.Progress(
        progress.BarColumn(bar_width=30),
        progress.MofNCompleteColumn(),
        progress.TextColumn("steps"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[what]}"),
        console=Terminal(file=out),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
