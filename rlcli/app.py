"""The root of `msrl`: finds the command a user named, loads it alone, and turns its errors into one line and an exit code.

To add a command: write `rlcli/commands/NAME.py` with a function that takes typed parameters (typer.Argument, typer.Option),
and add one line to COMMANDS below. Its one-line help and panel stand in the table, so that `msrl --help` imports no command;
the function's docstring is its own `--help`. A line whose module does not exist yet registers nothing.

A command module may import typer, rich and rlcli.errors at its top. Everything heavier (torch, ray, vllm, transformers, pyarrow)
is imported inside its functions. Wrong input raises UserError (exit code 2), a fault at run time RunError (1), a run that can be
resumed StoppedEarly (3); any other exit code is given by `raise typer.Exit(code)`. Commands catch KeyboardInterrupt themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlcli.errors import MsrlError, StoppedEarly

TRAIN, PREPARE, LOOK, MACHINE = "Train", "Prepare", "Look at results", "Machines"


@dataclass(frozen=True, slots=True)
class Entry:
    """One command: the words that call it, where its function is ("module:function" in rlcli.commands), one line of help, its panel."""

    words: str
    target: str
    help: str
    panel: str

    @property
    def module(self) -> str:
        return f"rlcli.commands.{self.target.partition(':')[0]}"

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> Any:
        """Import the command's module and make the command."""
        function = getattr(importlib.import_module(self.module), self.target.partition(":")[2])
        single = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=_HELP_OPTIONS)
        single.command(name=self.words.split()[-1])(function)
        return typer.main.get_command(single)


COMMANDS = [
    Entry("train dapo", "train:dapo", "Train with DAPO: sample, judge, update.", TRAIN),
    Entry("train dpo", "train:dpo", "Train with DPO on pairs of answers.", TRAIN),
    Entry("resume", "resume:resume", "Go on with a run from its checkpoint.", TRAIN),
    Entry("eval", "eval:evaluate", "Measure a model's accuracy on held-out prompts.", TRAIN),
    Entry("recipes list", "recipes:list_recipes", "The recipes there are, and what each is for.", PREPARE),
    Entry("recipes show", "recipes:show", "Every setting of a recipe: value, default, meaning, source.", PREPARE),
    Entry("recipes copy", "recipes:copy", "Copy a recipe to a file of your own.", PREPARE),
    Entry("recipes import", "recipes:import_recipe", "Turn a MindSpeed-RL YAML into a recipe.", PREPARE),
    Entry("data prep", "data:prep", "Rows to a checked, deduplicated, tokenised data set.", PREPARE),
    Entry("data show", "data:show", "Show prepared rows as the model sees them.", PREPARE),
    Entry("data check", "data:check", "Check rows or a prepared data set.", PREPARE),
    Entry("ckpt convert", "ckpt:convert", "Convert a model between HF and Megatron layouts.", PREPARE),
    Entry("ckpt inspect", "ckpt:inspect", "What a checkpoint holds.", PREPARE),
    Entry("ckpt verify", "ckpt:verify", "Check a checkpoint's files against its manifest.", PREPARE),
    Entry("reward list", "reward:list_verifiers", "The verifiers there are, their scores and options.", PREPARE),
    Entry("reward check", "reward:check", "Try verifiers on an answer or a file of them.", PREPARE),
    Entry("report", "report:report", "A run's report as one HTML page.", LOOK),
    Entry("samples", "samples:samples", "Read what the model wrote during a run.", LOOK),
    Entry("doctor", "doctor:doctor", "Check this machine and its packages.", MACHINE),
    Entry("cluster up", "cluster:up", "Start this machine's part of a cluster.", MACHINE),
    Entry("cluster down", "cluster:down", "Stop this machine's part of the cluster.", MACHINE),
    Entry("cluster status", "cluster:status", "The cluster's machines, devices and health.", MACHINE),
]

GROUP_HELP = {
    "train": "Train a model with DAPO or DPO.",
    "recipes": "List, show, copy and import recipes.",
    "data": "Prepare and check data sets.",
    "ckpt": "Convert, inspect and verify checkpoints.",
    "reward": "Try out verifiers.",
    "cluster": "Start, stop and look at a cluster.",
}

_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class CommandGroup(TyperGroup):
    """A group whose commands stand in COMMANDS: listed from the table, imported only when called."""

    def _entries(self, ctx: Any) -> Iterator[tuple[str, Entry]]:
        """(next word, entry) of each registered command below this group."""
        prefix = "" if ctx.parent is None else f"{self.name} "
        for entry in COMMANDS:
            if entry.words.startswith(prefix) and entry.exists:
                yield entry.words[len(prefix) :].split()[0], entry

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys(word for word, _ in self._entries(ctx)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command's name and help without its code; `resolve_command` brings that."""
        for word, entry in self._entries(ctx):
            if word == cmd_name:
                if entry.words.split()[-1] == word:
                    return TyperCommand(name=word, help=entry.help, rich_help_panel=entry.panel)
                return CommandGroup(
                    name=word, help=GROUP_HELP[word], rich_help_panel=entry.panel, no_args_is_help=True, context_settings=_HELP_OPTIONS
                )
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        for word, entry in self._entries(ctx):
            if word == name and entry.words.split()[-1] == word:
                return name, entry.load(), rest
        return name, command, rest


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"msrl {version('msrl')}")
        except PackageNotFoundError:
            typer.echo("msrl (from a checkout)")
        raise typer.Exit


def _root(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks. Works anywhere on the line."),
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version and leave."),
) -> None:
    """Post-train language models with DAPO and DPO, from a laptop to a cluster.

    Start with [bold]msrl doctor[/bold], then [bold]msrl recipes list[/bold].
    """


def application() -> typer.Typer:
    """The root, to be run by `main` or by a test's runner."""
    root = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="rich", no_args_is_help=True, context_settings=_HELP_OPTIONS)
    root.callback()(_root)
    return root


def main(argv: Sequence[str] | None = None) -> None:
    """Run `msrl` and leave with its exit code: 0 done, 1 failed at run time, 2 wrong input, 3 stopped early and resumable."""
    args, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        typer.main.get_command(application())(args=args, prog_name="msrl")
    except MsrlError as error:
        if debug:
            raise
        _complain(error)
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            raise
        _complain(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'} (run again with --debug to see where)")
        sys.exit(1)


def _take_debug(args: list[str]) -> tuple[list[str], bool]:
    """Arguments without --debug, and whether it was there (or MSRL_DEBUG=1)."""
    end = args.index("--") if "--" in args else len(args)
    kept = [arg for arg in args[:end] if arg != "--debug"] + args[end:]
    return kept, len(kept) < len(args) or os.environ.get("MSRL_DEBUG") == "1"


def _complain(error: object) -> None:
    """Each line of an error on stderr, marked."""
    mark = "stopped:" if isinstance(error, StoppedEarly) else "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        mark = f"\033[1;{33 if mark == 'stopped:' else 31}m{mark}\033[0m"
    for line in str(error).splitlines() or [type(error).__name__]:
        print(mark, line, file=sys.stderr)


if __name__ == "__main__":
    main()
