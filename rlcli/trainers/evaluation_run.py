"""`msrl eval`: a rollout engine and verifiers alone, over held-out prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from rlcli.cluster.launch import LocalCluster
from rlcli.config.load import from_dict, load
from rlcli.config.plan import require
from rlcli.config.schema import DapoRecipe
from rlcli.engines.rollout_pool import RolloutPool
from rlcli.engines.rollout_setup import rollout_setup
from rlcli.engines.weights import SharedMemoryTransport
from rlcli.errors import UserError
from rlcli.models.registry import read_model
from rlcli.models.spec import ModelSpec
from rlcli.rewards.pool import RewardPool
from rlcli.runs.folder import read_state
from rlcli.runs.jsonl import Appender
from rlcli.runs.samples import rows
from rlcli.trainers.evaluate import evaluate
from rlcli.trainers.launch import decoder, open_prompts, sizes
from rlcli.trainers.parts import EVAL_SEED_OFFSET, Machine, launch_rollout
from rlcli.trainers.rollouts import Judge


def settings(overrides: list[str], recipe: str | None, run: Path | None) -> DapoRecipe:
    """The recipe with its overrides, or a run's own settings with its final model."""
    if run is None:
        config = load("dapo", recipe, ["data.train=unused", *overrides] if recipe is None else overrides).dapo
    else:
        if recipe is not None:
            raise UserError("--run and --recipe: give one of them")
        config = from_dict("dapo", saved_settings(run), [f"model={run / 'final'}", *overrides]).dapo
    if not config.data.eval:
        raise UserError("data.eval is not given: name the held-out rows, data.eval=FILE")
    return config


def saved_settings(run: Path) -> dict[str, object]:
    """The resolved configuration of a DAPO run's folder."""
    if read_state(run)["kind"] != "dapo":
        raise UserError(f"{run}: was trained on pairs; name prompts to measure it on: msrl eval model={run / 'final'} data.eval=FILE")
    return dict(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))


def measure(overrides: list[str], recipe: str | None, run: Path | None, out: Path | None, as_json: bool) -> dict[str, float]:
    """Evaluate and print; returns the measures."""
    from rich.console import Console

    config = settings(overrides, recipe, run)
    spec = read_model(config.model)
    require(config, sizes(spec))
    prompts = open_prompts(config, str(config.data.eval))
    seed = config.train.seed + EVAL_SEED_OFFSET
    with judge_alone(config, spec) as judge:
        held_out = [prompts.prompt(number) for number in range(len(prompts))]
        measured, groups = evaluate(judge, held_out, config.eval, config.rollout, seed if config.train.deterministic else None)
        if out is not None:
            keeper = Appender(out)
            keeper.extend(rows(0, groups, -1, judge.decode))
            keeper.close()
    if as_json:
        print(json.dumps(measured))
    else:
        Console().print(table(config, measured))
    return measured


@contextmanager
def judge_alone(config: DapoRecipe, spec: ModelSpec) -> Iterator[Judge]:
    """One or more rollout engines and the verifiers, without a trainer."""
    machine = Machine.of(config.cluster)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="msrl-eval-")))
        rewards = stack.enter_context(RewardPool(config.reward))
        cluster = stack.enter_context(LocalCluster(len(machine.cores), config.cluster.heartbeat_s))
        transport = SharedMemoryTransport.create()
        stack.callback(transport.close)
        cluster.own_folder(transport.folder)
        setup = rollout_setup(spec, config.rollout, config.data.max_prompt_tokens, config.train.dtype, config.train.seed, machine.platform)
        rollout: RolloutPool = launch_rollout(config, cluster, machine, setup, transport, logs)
        rollout.ready(config.cluster.start_timeout_s)
        rollout.what = "evaluation"
        yield Judge(rollout, rewards, decoder(config.model))


def table(config: DapoRecipe, measured: dict[str, float]) -> object:
    """The measures as a small table."""
    from rich.table import Table

    grid = Table(title=f"{config.model} on {config.data.eval}", title_justify="left", box=None, show_header=False)
    for name, value in measured.items():
        whole = name in ("prompts", "samples")
        shown = f"{value:.0f}" if whole else f"{value:.1f}" if name.endswith("tokens") else f"{value:.3f}"
        grid.add_row(name, shown)
    return grid
