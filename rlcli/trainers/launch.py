"""From a checked configuration to a finished run: what `msrl train dapo` does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rlcli.checkpoint.find import Checkpoint
from rlcli.config.architecture import Architecture, from_config
from rlcli.config.load import Loaded
from rlcli.config.plan import Counts, plan, require
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.data.manifest import is_prepared
from rlcli.data.prepare import open_or_prepare
from rlcli.data.sources import find_sources
from rlcli.data.store import PromptSet
from rlcli.data.tokens import load_tokenizer
from rlcli.errors import UserError
from rlcli.models.registry import read_model
from rlcli.models.spec import ModelSpec
from rlcli.platforms import allocator
from rlcli.platforms.base import pick
from rlcli.rewards.verifiers import check_names
from rlcli.runs.environment import describe
from rlcli.runs.folder import RunFolder
from rlcli.trainers.stopping import Stopper, saying_what_is_left

CACHE = "data-cache"  # below run.dir: rows that were prepared on the way
PATHS = ("model", "data.train", "data.eval", "data.template", "dpo.reference_model", "run.dir")
Recipe = TypeVar("Recipe", DapoRecipe, DpoRecipe)


def anchored(config: Recipe) -> Recipe:
    """The configuration with its paths made absolute, so that a run can be resumed from any folder."""
    out = replace(config)
    for key in PATHS:
        section, _, name = key.rpartition(".")
        holder = getattr(out, section, None) if section else out
        value = getattr(holder, name, None)
        if value and not (name == "template" and not Path(value).is_file()):
            path = str(Path(value).expanduser().absolute())
            if section:
                setattr(out, section, replace(getattr(out, section), **{name: path}))
            else:
                setattr(out, name, path)
    return out


def precheck(config: DapoRecipe | DpoRecipe) -> None:
    """Raise UserError for a run's name, trackers or allocator that cannot be, before anything is prepared or started."""
    RunFolder.check(config)
    allocator.find(config.cluster.preload_allocator)


def environment_of(config: DapoRecipe | DpoRecipe, spec: ModelSpec, **extra: object) -> dict[str, object]:
    """What the run's folder records of a start."""
    return describe(model=str(spec.folder), allocator=allocator.find(config.cluster.preload_allocator).note, **extra)


@contextmanager
def new_run(loaded: Loaded, config: DapoRecipe | DpoRecipe, spec: ModelSpec) -> Iterator[RunFolder]:
    """A new run's folder. Where the user's input turns out wrong before the first step, nothing of it is left."""
    run = RunFolder.create(config, loaded.kind, loaded.recipe_name, environment_of(config, spec, recipe=loaded.recipe_name))
    try:
        with run:
            yield run
    except UserError:
        if not (run.path / "metrics.jsonl").exists() and not any(run.checkpoints.glob("step-*")):
            shutil.rmtree(run.path, ignore_errors=True)
        raise


@contextmanager
def attended(config: DapoRecipe | DpoRecipe, run: RunFolder) -> Iterator[Stopper]:
    """Around all that may fail or be stopped: the first lines of the run before it, and after a failure what there is to go on from."""
    run.console.info(f"run folder {run.path}")
    run.console.info(f"allocator of the workers: {allocator.find(config.cluster.preload_allocator).note}")
    with saying_what_is_left(run), Stopper(config.run.max_minutes) as stopper:
        yield stopper


def open_prompts(config: DapoRecipe, source: str) -> PromptSet:
    """The prompts that `data.train` or `data.eval` names, prepared on the way where they are plain rows."""
    opened = open_or_prepare(
        source,
        "prompts",
        config.model,
        config.data.max_prompt_tokens,
        config.data.template,
        config.data.enable_thinking,
        Path(config.run.dir) / CACHE,
    )
    assert isinstance(opened, PromptSet)
    return opened


def open_both(config: DapoRecipe) -> tuple[PromptSet, PromptSet | None]:
    """The prompts to train on, and those held out."""
    return open_prompts(config, config.data.train), open_prompts(config, config.data.eval) if config.data.eval else None


def decoder(folder: str) -> Callable[[Sequence[int]], str]:
    """Token ids to text as verifiers and readers see it: without special tokens."""
    tokenizer = load_tokenizer(folder)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return decode


def check_dapo(config: DapoRecipe) -> ModelSpec:
    """Everything that can be found wrong before anything starts: the model's folder, the arithmetic, the devices."""
    spec = read_model(config.model)
    platform = pick(config.cluster.platform)
    check_names(config.reward.verifiers, config.reward.weights, config.reward.options)
    for source in filter(None, (config.data.train, config.data.eval)):
        if not is_prepared(Path(source)):
            find_sources([source])  # both are there, before either is prepared
    require(config, sizes(spec), platform.name, None if platform.name == "cpu" else platform.device_count())
    return spec


def sizes(spec: ModelSpec) -> Architecture:
    """What plans are made of."""
    return from_config(spec.config, f"{spec.folder}/config.json")


def show_plan(config: DapoRecipe | DpoRecipe, spec: ModelSpec, rows: int) -> None:
    from rich.console import Console

    platform = pick(config.cluster.platform)
    counts = Counts(rows=rows, devices=platform.device_count(), memory=platform.memory().total, platform=platform.name)
    Console().print(plan(config, sizes(spec), counts).render())


def train_dapo(loaded: Loaded, dry_run: bool = False) -> Path | None:
    """Run a recipe to its end; returns the run's folder, or None after a dry run."""
    config = anchored(loaded.dapo)
    spec = check_dapo(config)
    precheck(config)
    train, held_out = open_both(config)
    if dry_run:
        show_plan(config, spec, len(train))
        return None
    with new_run(loaded, config, spec) as run:
        run_dapo(config, spec, run, train, held_out)
    return run.path


def tell_data(run: RunFolder, train: PromptSet, held_out: PromptSet | None) -> None:
    for name, prompts in (("training", train), ("held-out", held_out)):
        if prompts is not None:
            left = f"; {prompts.left_out} over data.max_prompt_tokens were left out" if prompts.left_out else ""
            run.console.info(f"{len(prompts)} {name} prompts{left}")


def run_dapo(
    config: DapoRecipe, spec: ModelSpec, run: RunFolder, train: PromptSet, held_out: PromptSet | None, checkpoint: Checkpoint | None = None
) -> None:
    """Start all parts, train from the beginning or from a checkpoint, export the model."""
    # Torch and Ray come in here, so that a mistake in the settings is told at once.
    from rlcli.trainers.dapo import DapoTrainer
    from rlcli.trainers.parts import dapo_parts

    run.decode = decode = decoder(config.model)
    prompts = [held_out.prompt(number) for number in range(len(held_out))] if held_out is not None else []
    with attended(config, run) as stopper:
        tell_data(run, train, held_out)
        with dapo_parts(config, spec, run, train, prompts, decode, stopper) as parts:
            DapoTrainer(config, parts).complete(checkpoint)
