"""From a checked configuration to a finished run: what `msrl train dapo` does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlcli.checkpoint.find import Checkpoint
from rlcli.config.architecture import read_architecture
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
from rlcli.trainers.saving import export_final
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


@contextmanager
def new_run(config: Any, kind: str, recipe: str | None, environment: dict[str, object]) -> Iterator[RunFolder]:
    """A new run's folder. Where the user's input turns out wrong before the first step, nothing of it is left."""
    run = RunFolder.create(config, kind, recipe, environment)
    try:
        with run:
            yield run
    except UserError:
        if not (run.path / "metrics.jsonl").exists() and not any(run.checkpoints.glob("step-*")):
            shutil.rmtree(run.path, ignore_errors=True)
        raise


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
    require(config, read_architecture(config.model), platform.name, None if platform.name == "cpu" else platform.device_count())
    return spec


def show_plan(loaded: Loaded, rows: int | None) -> None:
    from rich.console import Console

    config = loaded.config
    platform = pick(config.cluster.platform)
    counts = Counts(rows=rows, devices=platform.device_count(), memory=platform.memory().total, platform=platform.name)
    Console().print(plan(config, read_architecture(config.model), counts).render())


def train_dapo(loaded: Loaded, dry_run: bool = False) -> Path | None:
    """Run a recipe to its end; returns the run's folder, or None after a dry run."""
    config = anchored(loaded.dapo)
    spec = check_dapo(config)
    precheck(config)
    train = open_prompts(config, config.data.train)
    held_out = open_prompts(config, config.data.eval) if config.data.eval else None
    if dry_run:
        show_plan(loaded, len(train))
        return None
    environment = describe(model=str(spec.folder), recipe=loaded.recipe_name)
    with new_run(config, "dapo", loaded.recipe_name, environment) as run:
        tell_data(run, train, held_out)
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
    run.console.info(f"run folder {run.path}")
    prompts = [held_out.prompt(number) for number in range(len(held_out))] if held_out is not None else []
    with saying_what_is_left(run), Stopper(config.run.max_minutes) as stopper, dapo_parts(config, spec, run, train, prompts, decode, stopper) as parts:
        trainer = DapoTrainer(config, parts)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        trainer.train()
        export_final(parts.trainer, run.final)
        run.console.info(f"the trained model is in {run.final}")
