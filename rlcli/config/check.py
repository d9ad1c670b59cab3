"""Arithmetic that cannot work, found before anything starts: no torch, no device, only the configuration and the model's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcli.config.architecture import Architecture
from rlcli.config.schema import DapoRecipe, DpoRecipe
from rlcli.errors import UserError

# Head sizes of vLLM's attention on CPUs, in its own words: 32 is the smallest.
CPU_HEAD_DIM = 32


def check(config: DapoRecipe | DpoRecipe, model: Architecture | None = None, platform: str = "auto", devices: int | None = None) -> list[str]:
    """What cannot work, one line each; empty when all is well.

    model: the model's sizes, where its folder is there. platform: the one that will be used. devices: how many of them there are.
    """
    faults = [*_layout(config), *_optimizer(config)]
    faults += _dapo(config) if isinstance(config, DapoRecipe) else _dpo(config)
    if model is not None:
        faults += _training_model(config, model)
        if isinstance(config, DapoRecipe):
            faults += _rollout_model(config, model, platform)
    if devices is not None and platform != "cpu" and not faults:
        faults += _devices(config, devices)
    return faults


def require(config: DapoRecipe | DpoRecipe, model: Architecture | None = None, platform: str = "auto", devices: int | None = None) -> None:
    """Raise one UserError for all that `check` finds."""
    faults = check(config, model, platform, devices)
    if faults:
        raise UserError("\n".join(faults))


def data_parallel(config: Any) -> int:
    """Data parallel ranks: copies of the model that share out each mini-batch."""
    return config.parallel.devices // (config.parallel.tensor * config.parallel.pipeline)


def updates_a_step(config: DapoRecipe) -> int:
    """Optimizer updates of one step."""
    return config.dapo.epochs * (config.train.batch_prompts // mini_batch(config))


def mini_batch(config: DapoRecipe) -> int:
    """Prompts of one optimizer update."""
    return config.train.mini_batch_prompts or config.train.batch_prompts


def rollout_devices(config: DapoRecipe) -> int:
    """Devices that the rollout engines stand on."""
    return config.rollout.engines * config.rollout.tensor_parallel


def devices_needed(config: DapoRecipe | DpoRecipe) -> int:
    """Devices of the whole run; rollout engines take turns with training on the same ones."""
    return config.parallel.devices if isinstance(config, DpoRecipe) else max(config.parallel.devices, rollout_devices(config))


def _layout(config: Any) -> Iterator[str]:
    layout = config.parallel
    model = layout.tensor * layout.pipeline
    if layout.devices % model:
        yield (
            f"parallel.devices={layout.devices} is not a multiple of parallel.tensor x parallel.pipeline = {layout.tensor} x {layout.pipeline} = "
            f"{model}: take {max(layout.devices // model, 1) * model} devices"
        )


def _optimizer(config: Any) -> Iterator[str]:
    if config.optim.schedule == "cosine" and config.optim.min_lr > config.optim.lr:
        yield f"optim.min_lr={config.optim.min_lr:g} is above optim.lr={config.optim.lr:g}: a cosine schedule goes down"


def _dapo(config: DapoRecipe) -> Iterator[str]:
    train, rollout, reward = config.train, config.rollout, config.reward
    mini = mini_batch(config)
    if train.batch_prompts % mini:
        yield f"train.batch_prompts={train.batch_prompts} is not a multiple of train.mini_batch_prompts={mini}: one must divide the other"
    if reward.overlong_buffer_tokens >= rollout.max_response_tokens:
        yield (
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} must be less than rollout.max_response_tokens="
            f"{rollout.max_response_tokens}: it is the last part of a response"
        )
    if len(reward.verifiers) != len(reward.weights):
        yield f"reward.verifiers has {len(reward.verifiers)} names and reward.weights {len(reward.weights)} numbers: give one weight for each verifier"
    if not reward.verifiers:
        yield "reward.verifiers is empty: without a verifier there is no reward to learn from"
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if train.micro_batch_tokens < longest:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens} cannot hold the longest sample: data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}; raise it to at least {longest}"
        )
    if rollout.samples_per_prompt == 1:
        yield "rollout.samples_per_prompt=1: advantages compare the samples of a group, so with one they are all 0; take 2 or more"
    if config.checkpoint.keep_best and config.checkpoint.keep_best.lstrip("-").startswith("eval/") and config.data.eval is None:
        yield f"checkpoint.keep_best={config.checkpoint.keep_best} needs an evaluation: give data.eval"


def _dpo(config: DpoRecipe) -> Iterator[str]:
    data, train, loss = config.data, config.train, config.dpo
    if len(loss.losses) != len(loss.weights):
        yield f"dpo.losses has {len(loss.losses)} names and dpo.weights {len(loss.weights)} numbers: give one weight for each loss"
    if not loss.losses:
        yield "dpo.losses is empty: there is nothing to train by"
    if data.max_prompt_tokens >= data.max_tokens:
        yield f"data.max_prompt_tokens={data.max_prompt_tokens} leaves no token for an answer in data.max_tokens={data.max_tokens}: lower it, or raise data.max_tokens"
    if train.micro_batch_tokens < 2 * data.max_tokens:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens} cannot hold the longest pair, which is never parted: "
            f"2 x data.max_tokens = {2 * data.max_tokens}; raise it to at least that"
        )
    if config.checkpoint.keep_best and config.checkpoint.keep_best.lstrip("-").startswith("eval/") and data.eval is None:
        yield f"checkpoint.keep_best={config.checkpoint.keep_best} needs an evaluation: give data.eval"


def longest_tokens(config: DapoRecipe | DpoRecipe) -> int:
    """Tokens of the longest sequence that the model sees."""
    return config.data.max_tokens if isinstance(config, DpoRecipe) else config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _training_model(config: Any, model: Architecture) -> Iterator[str]:
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    longest = longest_tokens(config)
    if longest > model.positions:
        what = "data.max_tokens" if isinstance(config, DpoRecipe) else "data.max_prompt_tokens + rollout.max_response_tokens"
        yield f"{what} = {longest} is longer than the model's {model.positions} positions (max_position_embeddings)"
    yield from _tensor("parallel.tensor", tensor, model)
    if model.layers % pipeline:
        yield f"parallel.pipeline={pipeline} does not divide the model's {model.layers} layers{_sizes(model.layers)}"


def _rollout_model(config: DapoRecipe, model: Architecture, platform: str) -> Iterator[str]:
    yield from _tensor("rollout.tensor_parallel", config.rollout.tensor_parallel, model)
    if platform == "cpu" and model.head_dim < CPU_HEAD_DIM:
        yield f"the model's attention heads have {model.head_dim} dimensions: vLLM's attention on a CPU needs {CPU_HEAD_DIM} or more"


def _tensor(key: str, size: int, model: Architecture) -> Iterator[str]:
    if model.heads % size:
        yield f"{key}={size} does not divide the model's {model.heads} attention heads{_sizes(model.heads)}"
    elif model.kv_heads % size and size % model.kv_heads:
        yield f"{key}={size} neither divides the model's {model.kv_heads} key-value heads nor is a multiple of them"
    ffn = model.expert_ffn if model.moe_layers == model.layers else model.ffn
    if ffn % size and model.heads % size == 0:
        yield f"{key}={size} does not divide the width {ffn} of the model's MLP"


def _sizes(total: int) -> str:
    return f": take one of {', '.join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)}"


def _devices(config: DapoRecipe | DpoRecipe, devices: int) -> Iterator[str]:
    needed = devices_needed(config)
    if needed > devices:
        detail = f"parallel.devices={config.parallel.devices}"
        if isinstance(config, DapoRecipe):
            detail += f", in turn with rollout.engines x rollout.tensor_parallel = {config.rollout.engines} x {config.rollout.tensor_parallel}"
        yield f"the run needs {needed} devices ({detail}), but there {'is' if devices == 1 else 'are'} {devices}"
