"""`msrl ckpt`: convert, inspect, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from rlcli.errors import RunError, UserError

Model = Annotated[Optional[Path], typer.Option("--model", help="HF folder with config.json and tokenizer, where a Megatron folder has none beside it.")]
Extend = Annotated[Optional[bool], typer.Option("--moe-tp-extend-ep/--no-moe-tp-extend-ep", help="Classic folders: whole experts dealt over EP and TP. Read from the files where they tell.")]


def convert(
    load: Annotated[Path, typer.Option("--load", help="Folder to read.")],
    save: Annotated[Path, typer.Option("--save", help="Folder to write; must not exist.")],
    to: Annotated[str, typer.Option("--to", help="hf, mcore (msrl's own), torch_dist, or classic (Megatron folders of MindSpeed-RL).")],
    source: Annotated[Optional[str], typer.Option("--from", help="hf, mcore (any Megatron format), torch_dist, classic or run; found where not given.")] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallel size.", min=1)] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline parallel size.", min=1)] = 1,
    ep: Annotated[int, typer.Option("--ep", help="Expert parallel size.", min=1)] = 1,
    etp: Annotated[int, typer.Option("--etp", help="Expert tensor parallel size; 0: as --tp.", min=0)] = 0,
    vpp: Annotated[int, typer.Option("--vpp", help="Model chunks a pipeline rank.", min=1)] = 1,
    pp_layout: Annotated[Optional[str], typer.Option("--pp-layout", help="Layers of each pipeline chunk in model order, as 7,8,8,5.")] = None,
    extend: Extend = None,
    names: Annotated[str, typer.Option("--names", help="Weights in classic folders as mindspeed or as megatron names them.")] = "mindspeed",
    dtype: Annotated[str, typer.Option("--dtype", help="keep, float32, bfloat16 or float16.")] = "keep",
    model: Model = None,
    verify: Annotated[str, typer.Option("--verify", help="bits: every tensor compared. logits: and logits of both on a few tokens.")] = "bits",
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare.")] = False,
    threads: Annotated[int, typer.Option("--threads", help="Tensors read and written at once.", min=1)] = 4,
) -> None:
    """Convert a model between HF and Megatron layouts, any to any.

    msrl ckpt convert --load Qwen2.5-32B --to classic --tp 8 --pp 2 --save mcore/

    msrl ckpt convert --from mcore --load mcore/ --to hf --save back/
    """
    _one_of("--verify", verify, ("bits", "logits"))
    _one_of("--names", names, ("mindspeed", "megatron"))
    _one_of("--dtype", dtype, ("keep", "float32", "bfloat16", "float16"))
    from rlcli.checkpoint.convert import Conversion
    from rlcli.checkpoint.convert import convert as run
    from rlcli.models.layout import Layout

    layout = Layout(tensor=tp, pipeline=pp, expert=ep, expert_tensor=etp or tp, virtual=vpp, stages=_stages(pp_layout))
    job = Conversion(load, save, to, source, layout, extend, names, dtype, model, not no_verify, threads)
    with _progress() as told:
        done = run(job, told)
    rate = done.bytes / max(done.seconds, 1e-9) / 1e9
    typer.echo(f"{done.source} -> {done.target}: {done.tensors} parameters, {done.bytes / 2**30:.2f} GiB in {done.seconds:.1f} s ({rate:.2f} GB/s)")
    for line in done.left_out:
        typer.echo(f"left out: {line}")
    typer.echo("not verified" if no_verify else f"verified: {done.verified} parameters equal bit for bit in {done.verify_seconds:.1f} s")
    if verify == "logits" and not no_verify:
        _logits(load, save, model, extend)


def _logits(load: Path, save: Path, model: Path | None, extend: bool | None) -> None:
    from rlcli.checkpoint.logits import compare

    difference, spread = compare(load, save, model, extend)
    typer.echo(f"logits: largest difference {difference:.2e} at a spread of {spread:.2f}")
    if not difference < 1e-3 * max(spread, 1.0):
        raise RunError(f"{save}: logits differ from those of {load} by {difference:.2e}; do not use it")


def inspect(
    folder: Annotated[Path, typer.Argument(help="HF folder, Megatron folder, run, or checkpoint of a run.")], model: Model = None, extend: Extend = None
) -> None:
    """What a checkpoint holds: format, layout, step, parameters, dtype, checksums."""
    from rlcli.checkpoint.inspect import inspect as run

    for key, value in run(folder, model, extend):
        typer.echo(f"{key:<12}{value}")


def verify(
    folder: Annotated[Path, typer.Argument(help="HF folder, Megatron folder, run, or checkpoint of a run.")], model: Model = None, extend: Extend = None
) -> None:
    """Read all of a checkpoint: every weight there, in shape, finite, repeated ones equal, checksums right."""
    from rlcli.checkpoint.inspect import verify_folder

    with _progress() as told:
        lines = verify_folder(folder, model, extend, told)
    for line in lines:
        typer.echo(line)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value}: must be {' or '.join(allowed)}")


def _stages(text: str | None) -> tuple[int, ...]:
    """Layers of each chunk from "7,8,8,5"."""
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--pp-layout {text}: must be numbers of layers, as 7,8,8,5") from None


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
