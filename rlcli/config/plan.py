"""What a run will do, in figures, before it does anything: the arithmetic of a step, the layout of the devices, the memory of each.

`msrl train ... --dry-run` prints it. Only arithmetic: no torch, no device is touched, and every figure says how it comes about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcli.config import memory
from rlcli.config.architecture import Architecture
from rlcli.config.check import check, data_parallel, devices_needed, longest_tokens, mini_batch, require, rollout_devices, updates_a_step
from rlcli.config.memory import Item, count, size, total
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.config.steps import pair_steps, trained_pairs

if TYPE_CHECKING:
    from rich.console import RenderableType

# Of a device's memory, what a run may plan with: the rest goes to the driver, fragments and communication.
DEVICE_SHARE = 0.9

__all__ = ["Counts", "Plan", "check", "plan", "require"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What is known of the surroundings; None where it is not.

    rows: prompts (or pairs) of the training data. devices: devices there are. memory: bytes of one device; on a CPU, of the machine.
    platform: the one that will be used.
    """

    rows: int | None = None
    devices: int | None = None
    memory: int | None = None
    platform: str = "auto"


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of the plan: what it is, its value, and how it comes about or what it means."""

    name: str
    value: str
    how: str = ""


@dataclass
class Section:
    """A titled block of lines; the last line of a memory section is its sum."""

    title: str
    lines: list[Line] = field(default_factory=list)
    summed: bool = False


@dataclass
class Plan:
    """The figures of a run, and what looks unintended though it works."""

    sections: list[Section]
    warnings: list[str]

    def render(self) -> RenderableType:
        """The plan for a terminal."""
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [_table(section) for section in self.sections]
        parts += [Text.assemble(("note  ", "yellow"), warning) for warning in self.warnings]
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: section -> name -> (value, how)."""
        return {section.title: {line.name: (line.value, line.how) for line in section.lines} for section in self.sections}


def plan(config: DapoRecipe | DpoRecipe, model: Architecture | None, counts: Counts | None = None) -> Plan:
    """The plan of a configuration that `check` finds nothing wrong with. Without the model's sizes it says nothing of memory."""
    counts = counts or Counts()
    sections = [_dapo_step(config, counts) if isinstance(config, DapoRecipe) else _dpo_step(config, counts), _layout(config, model, counts)]
    if model is not None:
        sections += _memory(config, model, counts)
    return Plan(sections, warnings(config, counts))


def _dapo_step(config: DapoRecipe, counts: Counts) -> Section:
    train, rollout = config.train, config.rollout
    batch, mini, samples, updates = train.batch_prompts, mini_batch(config), rollout.samples_per_prompt, updates_a_step(config)
    lines = [
        Line("trained on", f"{batch:,} prompts", f"x {samples} samples = {batch * samples:,} samples of at most {rollout.max_response_tokens:,} tokens"),
        _sampled(config),
        Line("updates", f"{updates:,}", _updates_how(config, batch, mini, samples)),
        Line("tokens an update", f"at most {memory.update_tokens(config):,}", f"{mini:,} groups of full length, prompts {_sharing(train.prefix_sharing, samples)}"),
        Line("whole run", f"{train.steps:,} steps", f"{train.steps * batch:,} prompts trained on, {train.steps * updates:,} updates"),
    ]
    if counts.rows is not None:
        lines.append(_epochs(counts.rows, batch, train.steps * batch, "prompts"))
    return Section("One step", lines)


def _sampled(config: DapoRecipe) -> Line:
    batch, sampling = config.train.batch_prompts, config.sampling
    if not sampling.enabled:
        return Line("sampled", f"{batch:,} prompts", "every group is trained on (sampling.enabled=false)")
    how = f"as many as fill the batch with mixed groups: about {2 * batch:,} where half are mixed; at most {sampling.max_batches} waves"
    return Line("sampled", f"{batch:,} prompts or more", how)


def _updates_how(config: DapoRecipe, batch: int, mini: int, samples: int) -> str:
    epochs = f"{config.dapo.epochs} epochs x " if config.dapo.epochs > 1 else ""
    return f"{epochs}{batch:,} / {mini:,} prompts, each on {mini * samples:,} samples"


def _sharing(setting: str, samples: int) -> str:
    return f"computed {samples} times each" if setting == "off" else "computed once for their samples"


def _epochs(rows: int, batch: int, used: int, what: str) -> Line:
    return Line("training data", f"{rows:,} {what}", f"{rows / batch:,.1f} steps an epoch, so {used / rows:,.2f} epochs if each is used once")


def _dpo_step(config: DpoRecipe, counts: Counts) -> Section:
    train, batch = config.train, config.train.batch_pairs
    lines = [
        Line("trained on", f"{batch:,} pairs", f"{2 * batch:,} answers, at most {config.data.max_tokens:,} tokens each with their prompt"),
        Line("updates", "1", "one optimizer update a step"),
        Line("tokens an update", f"at most {memory.update_tokens(config):,}", "every pair of full length, no prompt shared"),
    ]
    if train.steps or counts.rows is not None:
        rows = counts.rows or 0
        pairs = f"{trained_pairs(config, rows):,} pairs" + ("" if train.steps else f" ({train.epochs:g} epochs)")
        lines.append(Line("whole run", f"{pair_steps(config, rows):,} steps", pairs))
    else:
        lines.append(Line("whole run", f"{train.epochs:g} epochs", "as many steps as the pairs make"))
    if counts.rows is not None:
        lines.append(_epochs(counts.rows, batch, trained_pairs(config, counts.rows), "pairs"))
    return Section("One step", lines)


def _layout(config: DapoRecipe | DpoRecipe, model: Architecture | None, counts: Counts) -> Section:
    layout, ranks = config.parallel, data_parallel(config)
    lines = []
    if model is not None:
        active = f"; {count(model.active_parameters)} work on each token" if model.experts else ""
        shape = f"{model.layers} layers, width {model.hidden:,}, {model.heads} heads ({model.kv_heads} key-value), vocabulary {model.vocab:,}"
        lines.append(Line("model", f"{count(model.parameters())} parameters", shape + active))
        lines.append(Line("longest sequence", f"{longest_tokens(config):,} tokens", f"of the model's {model.positions:,} positions"))
    parts = f"{ranks} data x {layout.tensor} tensor x {layout.pipeline} pipeline parallel"
    lines.append(Line("training", f"{layout.devices} {_plural('process', layout.devices)}", parts))
    if isinstance(config, DapoRecipe):
        lines.append(Line("per device", f"{mini_batch(config) / ranks:g} prompts an update", "on each data parallel rank"))
        engines = config.rollout.engines
        lines.append(Line("rollout", f"{engines} {_plural('engine', engines)}", f"x {config.rollout.tensor_parallel} tensor parallel, in turn with training"))
    if counts.platform != "cpu":
        there = "" if counts.devices is None else f"{counts.devices} there"
        lines.append(Line("devices", f"{devices_needed(config)}", there))
    return Section("Layout", lines)


def _memory(config: DapoRecipe | DpoRecipe, model: Architecture, counts: Counts) -> list[Section]:
    training = memory.training(config, model)
    sections = [_sum("Memory of a training device, at its peak", training)]
    every = [(training, config.parallel.devices)]
    if isinstance(config, DapoRecipe):
        rollout = memory.rollout(config, model, _cache_room(config, model, counts))
        sections.append(_sum("Memory of a rollout device", rollout))
        every.append((rollout, rollout_devices(config)))
    if counts.platform == "cpu":
        sections.append(_machine(every, model, config, counts))
    elif counts.memory is not None:
        peak = max(total(items) for items, _ in every)
        sections[-1].lines.append(Line("device", size(counts.memory), "enough" if peak <= counts.memory * DEVICE_SHARE else "not enough"))
    return sections


def _cache_room(config: DapoRecipe, model: Architecture, counts: Counts) -> int | None:
    """Bytes that the key-value cache of a rollout device may take; None where the device's memory is not known."""
    if counts.memory is None:
        return None
    if counts.platform == "cpu":
        return int(counts.memory * memory.CACHE_SHARE / rollout_devices(config))
    others = sum(item.bytes for item in memory.rollout(config, model, 0) if item.name != "key-value cache")
    return int(counts.memory * DEVICE_SHARE) - others


# What programs take on a CPU before any model is in them (libraries, interpreters, Ray), measured on a run of the demo.
TRAIN_PROGRAM, ENGINE_PROGRAM, VERIFIER_PROGRAM, DRIVER_PROGRAM = (int(share * 2**30) for share in (0.4, 1.15, 0.15, 0.85))


def _machine(every: list[tuple[list[Item], int]], model: Architecture, config: Any, counts: Counts) -> Section:
    """All processes of one CPU machine: on it training and rollout stand side by side in memory."""
    devices = config.parallel.devices
    items = [
        Item("all training and rollout", sum(total(items) * number for items, number in every), "nothing is put aside while the other works"),
        Item("training programs", devices * TRAIN_PROGRAM, f"{devices} x {size(TRAIN_PROGRAM)}: torch, Megatron-core"),
        Item("driver and Ray", DRIVER_PROGRAM, ""),
    ]
    if isinstance(config, DapoRecipe):
        engines, verifiers = config.rollout.engines, config.reward.workers
        items += [
            Item("rollout programs", engines * ENGINE_PROGRAM, f"{engines} x {size(ENGINE_PROGRAM)}: vLLM and the process that serves it"),
            Item("verifiers", verifiers * VERIFIER_PROGRAM, f"{verifiers} x {size(VERIFIER_PROGRAM)}"),
            Item("weight hand-over", model.parameters() * memory.BYTES[config.train.dtype], "one copy in shared memory (/dev/shm)"),
        ]
    section = _sum("Memory of this machine", items)
    if counts.memory is not None:
        section.lines.append(Line("machine", size(counts.memory), "enough" if total(items) <= counts.memory * DEVICE_SHARE else "not enough"))
    return section


def _sum(title: str, items: list[Item]) -> Section:
    lines = [Line(item.name, size(item.bytes), item.how) for item in items]
    return Section(title, [*lines, Line("together", size(total(items)))], summed=True)


def warnings(config: DapoRecipe | DpoRecipe, counts: Counts) -> list[str]:
    """What works but is seldom meant, one line each."""
    found = []
    ranks = data_parallel(config)
    batch = config.train.batch_pairs if isinstance(config, DpoRecipe) else mini_batch(config)
    what = "train.batch_pairs" if isinstance(config, DpoRecipe) else "prompts an update"
    if batch < ranks:
        found.append(f"{what} = {batch} is less than {ranks} data parallel ranks: some ranks may have nothing to do")
    elif batch % ranks:
        found.append(f"{what} = {batch} does not divide over {ranks} data parallel ranks: some wait for others")
    if config.eval.every and config.data.eval is None:
        found.append(f"eval.every={config.eval.every} has nothing to evaluate on: data.eval is not set")
    if isinstance(config, DapoRecipe):
        found += _dapo_warnings(config)
    if counts.rows is not None:
        taken = min(batch, trained_pairs(config, counts.rows)) if isinstance(config, DpoRecipe) else batch
        if counts.rows < taken:
            found.append(f"the data has {counts.rows} rows, fewer than one update takes ({taken}): rows repeat within it")
    return found


def _dapo_warnings(config: DapoRecipe) -> list[str]:
    found = []
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        found.append("rollout.top_p and rollout.top_k cut the sampled distribution, the trainer's is whole: importance ratios are then biased")
    if config.optim.warmup_steps >= config.train.steps:
        found.append(f"optim.warmup_steps={config.optim.warmup_steps} outlasts train.steps={config.train.steps}: the full learning rate is never reached")
    if not config.sampling.enabled:
        found.append("sampling.enabled=false: groups that are all right or all wrong are trained on and teach nothing")
    if config.dapo.mask_truncated and config.reward.overlong_buffer_tokens:
        found.append("dapo.mask_truncated leaves out the very samples that reward.overlong_buffer_tokens punishes most")
    if rollout_devices(config) < config.parallel.devices and config.cluster.platform != "cpu":
        found.append(f"rollout uses {rollout_devices(config)} of {config.parallel.devices} devices: the others idle while it samples")
    return found


def _plural(word: str, number: int) -> str:
    return word if number == 1 else word + ("es" if word.endswith("s") else "s")


def _table(section: Section) -> RenderableType:
    from rich.table import Table

    table = Table(title=section.title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True, min_width=16)
    table.add_column(justify="right", no_wrap=True, min_width=17)
    table.add_column(style="dim", ratio=1)
    for line in section.lines:
        table.add_row(line.name, line.value, line.how, style="bold" if section.summed and line.name == "together" else "")
    table.add_row("", "", "")
    return table
