"""`msrl ckpt`: convert, inspect, verify."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from rlcli.errors import UserError

if TYPE_CHECKING:
    from rlcli.checkpoint.convert import Converted

WHAT, LAYOUT, CLASSIC, CHECKS = "What", "Layout of what is written", "Classic folders", "More"
Model = Annotated[
    Optional[Path],
    typer.Option("--model", metavar="DIR", help="HF folder with config.json and tokenizer, where a Megatron folder has none beside it.", rich_help_panel=CHECKS),
]
Extend = Annotated[
    Optional[bool],
    typer.Option(
        "--moe-tp-extend-ep/--no-moe-tp-extend-ep", help="Whole experts dealt over EP and TP. Read from the files where they tell.", rich_help_panel=CLASSIC
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="HF folder, Megatron folder, run, or checkpoint of a run.")]


def _size(option: str, text: str, least: int = 1) -> Any:
    """A parallel size on the command line."""
    return typer.Option(option, metavar="N", help=text, min=least, rich_help_panel=LAYOUT)


def convert(
    load: Annotated[Path, typer.Option("--load", metavar="DIR", help="Folder to read.", rich_help_panel=WHAT)],
    save: Annotated[Path, typer.Option("--save", metavar="DIR", help="Folder to write; new or empty.", rich_help_panel=WHAT)],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="hf, mcore (msrl's own), torch_dist, or classic (as MindSpeed-RL).", rich_help_panel=WHAT)
    ],
    source: Annotated[
        Optional[str],
        typer.Option("--from", metavar="FORMAT", help="hf, mcore (any Megatron format), torch_dist, classic, run; found if not given.", rich_help_panel=WHAT),
    ] = None,
    tp: Annotated[int, _size("--tp", "Tensor parallel size.")] = 1,
    pp: Annotated[int, _size("--pp", "Pipeline parallel size.")] = 1,
    ep: Annotated[int, _size("--ep", "Expert parallel size.")] = 1,
    etp: Annotated[int, _size("--etp", "Expert tensor parallel size; 0: as --tp.", 0)] = 0,
    vpp: Annotated[int, _size("--vpp", "Model chunks of a pipeline rank.")] = 1,
    pp_layout: Annotated[
        Optional[str], typer.Option("--pp-layout", metavar="N,N..", help="Layers of each pipeline chunk in model order, as 7,8,8,5.", rich_help_panel=LAYOUT)
    ] = None,
    extend: Extend = None,
    names: Annotated[
        str, typer.Option("--names", metavar="WHOSE", help="Weights named as by mindspeed or by megatron.", rich_help_panel=CLASSIC)
    ] = "mindspeed",
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="keep, float32, bfloat16 or float16.", rich_help_panel=CHECKS)] = "keep",
    model: Model = None,
    verify: Annotated[
        str,
        typer.Option("--verify", metavar="HOW", help="bits: compare every tensor. logits: logits on a few tokens too.", rich_help_panel=CHECKS),
    ] = "bits",
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare.", rich_help_panel=CHECKS)] = False,
    threads: Annotated[int, typer.Option("--threads", metavar="N", help="Tensors in hand at once; 0: as many as cores, at most 4.", min=0, rich_help_panel=CHECKS)] = 0,
) -> None:
    """Convert a model between HF and Megatron layouts, any to any.

    msrl ckpt convert --load Qwen2.5-32B --to classic --tp 8 --pp 2 --save mcore/

    msrl ckpt convert --from mcore --load mcore/ --to hf --save back/

    msrl ckpt convert --load runs/RUN/checkpoints/step-00000100 --to hf --save out/
    """
    _one_of("--verify", verify, ("bits", "logits"))
    _one_of("--names", names, ("mindspeed", "megatron"))
    _one_of("--dtype", dtype, ("keep", "float32", "bfloat16", "float16"))
    from rlcli.checkpoint.convert import Conversion, threads_by_default
    from rlcli.checkpoint.convert import convert as run
    from rlcli.models.layout import Layout

    layout = Layout(tensor=tp, pipeline=pp, expert=ep, expert_tensor=etp or tp, virtual=vpp, stages=_stages(pp_layout))
    job = Conversion(load, save, to, source, layout, extend, names, dtype, model, not no_verify, verify == "logits" and not no_verify, threads or threads_by_default())
    with _stoppable(save), _progress() as told:
        done = run(job, told)
    if to in ("hf", "torch_dist") and layout != Layout():
        typer.echo(f"note: {to} folders hold whole tensors and serve any layout" + ("; --tp pads the vocabulary" if to == "torch_dist" else ""))
    if to != "classic" and done.source != "classic" and (extend is not None or names != "mindspeed"):
        typer.echo("note: --names and --moe-tp-extend-ep are for classic folders; not used here")
    _tell(done, verified=not no_verify)
    typer.echo(f"written: {save}")


@contextmanager
def _stoppable(save: Path) -> Iterator[None]:
    """SIGTERM and SIGHUP clean up as Ctrl-C does, and say so; what comes while that is done changes nothing. Ignored signals stay ignored."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        for known in before:
            signal.signal(known, signal.SIG_IGN)
        heard.append(number)
        raise KeyboardInterrupt

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in wanted if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    try:
        for known in before:
            signal.signal(known, hear)
        yield
    except KeyboardInterrupt:
        number = signal.Signals(heard[0] if heard else signal.SIGINT)
        typer.echo(f"stopped: {number.name}; nothing unfinished is left at {save}", err=True)
        raise typer.Exit(128 + number) from None
    finally:
        for known, handler in before.items() if not heard else ():  # else the process ends, and nothing should change how
            signal.signal(known, handler)


def _tell(done: Converted, verified: bool) -> None:
    """Print what a conversion did."""
    from rlcli.checkpoint.sums import size_text

    rate = done.bytes / max(done.seconds, 1e-9)
    typer.echo(f"{done.source} -> {done.target}: {done.tensors} parameters, {size_text(done.bytes)} in {done.seconds:.1f} s ({size_text(int(rate))}/s)")
    for line in done.damaged:
        typer.echo(f"note: {line}", err=True)
    for line in done.left_out:
        typer.echo(f"left out: {line}")
    typer.echo(f"verified: {done.verified} parameters equal bit for bit, in {done.verify_seconds:.1f} s" if verified else "not verified")
    if done.logits:
        typer.echo(f"logits: largest difference {done.logits[0]:.2e} at a spread of {done.logits[1]:.2f}")


def inspect(folder: Folder, model: Model = None, extend: Extend = None) -> None:
    """What a checkpoint holds: format, layout, step, parameters, dtype, checksums."""
    from rlcli.checkpoint.inspect import inspect as run

    for key, value in run(folder, model, extend):
        typer.echo(f"{key:<12}{value}")


def verify(folder: Folder, model: Model = None, extend: Extend = None) -> None:
    """Read all of a checkpoint: every weight there, in shape, finite, repeated ones equal, checksums right."""
    from rlcli.checkpoint.inspect import verify_folder

    with _progress() as told:
        lines = verify_folder(folder, model, extend, told)
    for line in lines:
        typer.echo(line)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value}: must be one of {', '.join(allowed)}")


def _stages(text: str | None) -> tuple[int, ...]:
    """Layers of each chunk from "7,8,8,5"."""
    if not text:
        return ()
    try:
        stages = tuple(int(part) for part in text.split(","))
    except ValueError:
        stages = (-1,)
    if min(stages) < 0:
        raise UserError(f"--pp-layout {text}: must be numbers of layers, as 7,8,8,5")
    return stages


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True) as bar:
        tasks: dict[str, object] = {}

        def told(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield told
