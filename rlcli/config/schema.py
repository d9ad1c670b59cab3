"""Every setting of msrl: its name, type, default, range and meaning. Defaults stand here and nowhere else.

A recipe is a YAML file that states only what differs. Names say what a number counts: prompts, samples or tokens.
"""

# ruff: noqa: RUF009  (`setting` makes a field with its own default factory)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its meaning and its allowed range: `least` and `most` inclusive, `above` exclusive."""
    metadata = {"help": help, "least": least, "above": above, "most": most, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataConfig:
    train: str = setting(MISSING, "training rows: a folder made by `msrl data prep`, or a parquet or jsonl file, which is prepared on the way")
    eval: Optional[str] = setting(None, "held-out rows for evaluation, in the same forms; none: no evaluation")
    max_prompt_tokens: int = setting(1024, "longest prompt in tokens, inclusive; longer ones are counted and left out", least=1)
    shuffle: bool = setting(True, "shuffle the prompts anew in every epoch, from `train.seed`")
    template: Optional[str] = setting(None, "chat template: a file or a built-in name; none: the tokenizer's own")
    enable_thinking: Optional[bool] = setting(None, "passed to chat templates that know it; none: the template's own default")


@dataclass
class RolloutConfig:
    samples_per_prompt: int = setting(8, "samples a prompt (G), the size of a group", least=1)
    max_response_tokens: int = setting(1024, "longest response in tokens; longer ones are cut and marked as truncated", least=1)
    temperature: float = setting(1.0, "sampling temperature; the trainer's log-probs use the same", above=0.0)
    top_p: float = setting(1.0, "nucleus sampling during training; below 1 the sampled distribution is not the trained one", above=0.0, most=1.0)
    top_k: int = setting(-1, "keep only the k likeliest tokens; -1: all", least=-1)
    engines: int = setting(1, "rollout engines (vLLM instances), each with its own copy of the weights", least=1)
    tensor_parallel: int = setting(1, "devices that one rollout engine is split over", least=1)
    dtype: str = setting("auto", "arithmetic of the rollout engine; auto: that of `train.dtype`", choices=("auto", "bfloat16", "float16", "float32"))
    max_running_samples: int = setting(128, "samples that one engine decodes at once", least=1)
    kv_cache_gib: float = setting(0.0, "key-value cache of one engine in GiB; 0: enough for `max_running_samples` full-length samples, within what is free", least=0.0)
    stop: list[str] = setting([], "strings that end a response, besides the model's own end tokens")
    probe_prompts: int = setting(2, "sequences whose log-probs both engines are asked for after every weight sync; 0: no probe", least=0)
    probe_tolerance: float = setting(0.0, "largest mean |difference| of log-probs that the probe accepts, in nats; 0: 0.02 in float32, 0.25 otherwise", least=0.0)


@dataclass
class RewardConfig:
    verifiers: list[str] = setting(["dapo"], "verifiers by name, or package.module:function; their scores are summed with `weights`")
    weights: list[float] = setting([1.0], "weight of each verifier's score")
    options: list[str] = setting([], "options of the verifiers as NAME.OPTION=VALUE, for instance [length.most=2000]; `msrl reward list` shows them")
    workers: int = setting(2, "verifier processes", least=1)
    timeout_s: float = setting(5.0, "seconds that one verdict may take before its process is killed", above=0.0)
    memory_mib: int = setting(2048, "memory that answers may take in one verifier process, in MiB, beyond what it has once started", least=128)
    overlong_buffer_tokens: int = setting(0, "soft penalty over the last so many tokens before `max_response_tokens` (DAPO Eq. 13); 0: none", least=0)
    overlong_penalty: float = setting(1.0, "factor of the overlong penalty, which runs from 0 to -1", least=0.0)


@dataclass
class SamplingConfig:
    """Dynamic sampling (DAPO section 3.2): prompts are sampled until enough groups are informative."""

    enabled: bool = setting(True, "drop groups whose samples are all right or all wrong, and sample on until the batch is full")
    max_batches: int = setting(10, "waves of prompts in one step before `on_exhausted` decides", least=1)
    on_exhausted: str = setting("train_partial", "after `max_batches`: train on what was kept, or stop with a checkpoint", choices=("train_partial", "stop"))
    max_age: int = setting(1, "surplus groups may wait for so many later steps; older ones are dropped and counted; 0: surplus is dropped", least=0)
    oversample: float = setting(1.0, "factor on the size of each wave above what the measured acceptance asks for", least=1.0, most=10.0)


@dataclass
class DapoConfig:
    clip_low: float = setting(0.2, "lower clip of the importance ratio (epsilon low)", above=0.0, most=1.0)
    clip_high: float = setting(0.28, "upper clip of the importance ratio (epsilon high, Clip-Higher)", above=0.0)
    dual_clip: float = setting(0.0, "ceiling c of the loss for negative advantages (dual clip); 0: off", least=0.0)
    aggregate: str = setting("token_mean", "token_mean: over all tokens of the mini-batch (DAPO Eq. 8); prompt_mean: token mean a group, then mean; seq_mean: token mean a sample, then mean; seq_sum: sum over tokens divided by samples and `rollout.max_response_tokens` (Dr.GRPO)", choices=("token_mean", "prompt_mean", "seq_mean", "seq_sum"))
    advantage: str = setting("group_norm", "group_norm: (reward - mean) / std of the group; group_mean: no division (Dr.GRPO); rloo: leave-one-out mean", choices=("group_norm", "group_mean", "rloo"))
    std_floor: float = setting(1e-6, "least standard deviation that advantages are divided by", above=0.0)
    entropy_coef: float = setting(0.0, "weight of an entropy bonus")
    old_logprobs: str = setting("auto", "the denominator of the ratio. auto: the current log-probs where a step makes a single update (they are equal), else recomputed by the trainer at the step's start; recompute: always recomputed; rollout: the engine's own", choices=("auto", "recompute", "rollout"))
    correction: str = setting("token_clip", "importance correction between rollout engine and trainer, token by token: none, token_clip (truncated at `correction_max`) or token_mask (tokens beyond it, or below its inverse, are left out)", choices=("none", "token_clip", "token_mask"))
    correction_max: float = setting(2.0, "bound of the importance correction", above=1.0)
    mask_truncated: bool = setting(False, "leave truncated samples out of the loss (overlong filtering)")
    epochs: int = setting(1, "passes over each step's groups", least=1)


@dataclass
class OptimConfig:
    lr: float = setting(1e-6, "peak learning rate", least=0.0)
    min_lr: float = setting(0.0, "learning rate at the end of a cosine schedule", least=0.0)
    schedule: str = setting("constant", "constant, or cosine down to `min_lr`, after the warm-up", choices=("constant", "cosine"))
    warmup_steps: int = setting(0, "steps of linear warm-up", least=0)
    weight_decay: float = setting(0.1, "decoupled weight decay of matrices; norms and biases have none", least=0.0)
    beta1: float = setting(0.9, "Adam beta 1", least=0.0, most=0.99999)
    beta2: float = setting(0.999, "Adam beta 2", least=0.0, most=0.99999)
    eps: float = setting(1e-8, "Adam epsilon", above=0.0)
    clip_grad: float = setting(1.0, "largest norm of the whole gradient; 0: no clipping", least=0.0)


@dataclass
class ParallelConfig:
    devices: int = setting(1, "training processes; data parallel = devices / (tensor x pipeline)", least=1)
    tensor: int = setting(1, "tensor parallel size (TP)", least=1)
    pipeline: int = setting(1, "pipeline parallel size (PP)", least=1)


@dataclass
class TrainConfig:
    steps: int = setting(100, "steps of the run: rollout and updates (DAPO), or one mini-batch of pairs (DPO)", least=1)
    batch_prompts: int = setting(32, "prompts (groups) trained on in one step", least=1)
    mini_batch_prompts: int = setting(0, "prompts an optimizer update; must divide `batch_prompts`; 0: all of them, one update a step", least=0)
    micro_batch_tokens: int = setting(8192, "most tokens in one forward pass of a device; a hard bound", least=1)
    dtype: str = setting("bfloat16", "arithmetic of training; bfloat16 keeps float32 master weights", choices=("bfloat16", "float32"))
    prefix_sharing: str = setting("auto", "compute a prompt once for all its samples: auto (where it saves tokens), on, off", choices=("auto", "on", "off"))
    head_chunk_tokens: int = setting(1024, "response tokens whose logits stand in memory at once", least=1)
    recompute: bool = setting(False, "recompute each layer's activations in the backward pass, to save memory")
    seed: int = setting(1, "seed of shuffling, sampling and initialisation", least=0)
    deterministic: bool = setting(False, "bit-equal metrics and weights for the same seed, data, layout and machine")
    on_nonfinite: str = setting("skip", "a loss or gradient that is not finite: skip the update, or stop; counted and saved either way", choices=("skip", "stop"))
    max_nonfinite: int = setting(5, "updates in a row that may be skipped before the run stops", least=1)


@dataclass
class EvalConfig:
    every: int = setting(0, "evaluate every so many steps; 0: only before and after", least=0)
    before: bool = setting(True, "evaluate before the first step")
    after: bool = setting(True, "evaluate after the last step")
    samples_per_prompt: int = setting(4, "samples a prompt; gives avg@k, pass@k and maj@k", least=1)
    max_prompts: int = setting(0, "use only the first so many held-out prompts; 0: all", least=0)
    temperature: float = setting(1.0, "sampling temperature; 0: greedy", least=0.0)
    top_p: float = setting(1.0, "nucleus sampling", above=0.0, most=1.0)


@dataclass
class CheckpointConfig:
    every: int = setting(0, "save every so many steps; 0: only at the end, or when stopped", least=0)
    keep_last: int = setting(2, "newest checkpoints kept", least=1)
    keep_every: int = setting(0, "also keep those of every so many steps for good; 0: none", least=0)
    keep_best: Optional[str] = setting(None, "also keep the best by this metric, for instance eval/accuracy; -NAME: the smallest")
    asynchronous: bool = setting(True, "write while training goes on")
    save_optimizer: bool = setting(True, "save what resuming needs; without it only the weights")


@dataclass
class RunConfig:
    dir: str = setting("runs", "folder in which the run's folder is made")
    name: Optional[str] = setting(None, "name of the run's folder; none: recipe and time")
    trackers: list[str] = setting([], "also send metrics to: tensorboard, wandb, swanlab, trackio")
    project: str = setting("msrl", "project name given to trackers")
    save_samples: int = setting(8, "samples a step written to samples/; -1: all", least=-1)
    max_minutes: float = setting(0.0, "time budget: save, stop and exit with 3 when it is used up; 0: none", least=0.0)


@dataclass
class ClusterConfig:
    platform: str = setting("auto", "kind of device; auto: what the machine has", choices=("auto", "cpu"))
    start_timeout_s: float = setting(600.0, "seconds in which all workers must be up", above=0.0)
    step_timeout_s: float = setting(3600.0, "seconds that one stage of a step (rollout wave, update, sync, save) may take before it is given up", above=0.0)
    heartbeat_s: float = setting(30.0, "seconds without a sign of life after which a worker counts as hanging", above=0.0)
    threads: int = setting(0, "CPU threads for the workers of this machine; 0: all cores", least=0)
    preload_allocator: str = setting("auto", "tcmalloc or jemalloc for the workers: auto finds one and tries it first; off; or a library's path")


@dataclass
class DpoLossConfig:
    losses: list[str] = setting(["sigmoid"], "loss functions by name, summed with `weights`")
    weights: list[float] = setting([1.0], "weight of each loss function")
    beta: float = setting(0.1, "strength of the reference (inverse temperature of the implicit reward)", above=0.0)
    label_smoothing: float = setting(0.0, "share of preferences taken to be wrong (cDPO, robust DPO, EXO)", least=0.0, most=0.5)
    sft_coef: float = setting(0.0, "weight of a term for the chosen answer's negative log-likelihood a token (pref_ftx, RPO)", least=0.0)
    margin: float = setting(0.0, "target reward margin between chosen and rejected (SimPO gamma, or added inside the sigmoid)", least=0.0)
    length_normalise: Optional[bool] = setting(None, "use log-probs a token instead of sums; none: what the loss's paper does (ipo, simpo, orpo: a token)")
    ld_alpha: float = setting(1.0, "weight of log-probs beyond the shorter answer's length (LD-DPO); 1: off", least=0.0, most=1.0)
    divergence: str = setting("reverse_kl", "f-divergence that holds the policy to the reference", choices=("reverse_kl", "js", "alpha", "forward_kl"))
    alpha: float = setting(0.5, "alpha of the alpha divergence", above=0.0, most=1.0)
    reference: str = setting("cache", "reference log-probs: computed once and cached beside the data, or live from a second copy of the weights", choices=("cache", "live"))
    reference_model: Optional[str] = setting(None, "HF folder of the reference; none: the model as it is before training")


@dataclass
class PairsConfig:
    train: str = setting(MISSING, "training pairs: a folder made by `msrl data prep --kind pairs`, or a parquet, jsonl or json file")
    eval: Optional[str] = setting(None, "held-out pairs for evaluation")
    max_tokens: int = setting(1024, "longest prompt and answer together, in tokens", least=2)
    max_prompt_tokens: int = setting(512, "longest prompt in tokens", least=1)
    truncation: str = setting("keep_prompt_end", "pairs that are too long: drop them, keep the prompt's end, or keep the answer's start", choices=("drop", "keep_prompt_end", "keep_answer_start"))
    train_on: str = setting("last_answer", "what a conversation's loss covers: its last answer, or every answer after the prompt that chosen and rejected share", choices=("last_answer", "all_answers"))
    shuffle: bool = setting(True, "shuffle the pairs anew in every epoch, from `train.seed`")
    template: Optional[str] = setting(None, "chat template: a file or a built-in name; none: the tokenizer's own")


@dataclass
class PairTrainConfig:
    steps: int = setting(0, "optimizer updates; 0: as many as `epochs` make", least=0)
    epochs: float = setting(1.0, "passes over the pairs", above=0.0)
    batch_pairs: int = setting(32, "pairs an optimizer update, over all devices", least=1)
    micro_batch_tokens: int = setting(8192, "most tokens in one forward pass of a device; a hard bound", least=1)
    dtype: str = setting("bfloat16", "arithmetic of training; bfloat16 keeps float32 master weights", choices=("bfloat16", "float32"))
    prefix_sharing: str = setting("auto", "compute a pair's prompt once for both answers: auto, on, off", choices=("auto", "on", "off"))
    head_chunk_tokens: int = setting(1024, "answer tokens whose logits stand in memory at once", least=1)
    recompute: bool = setting(False, "recompute each layer's activations in the backward pass, to save memory")
    seed: int = setting(1, "seed of shuffling and initialisation", least=0)
    deterministic: bool = setting(False, "bit-equal metrics and weights for the same seed, data, layout and machine")
    on_nonfinite: str = setting("skip", "a loss or gradient that is not finite: skip the update, or stop", choices=("skip", "stop"))
    max_nonfinite: int = setting(5, "updates in a row that may be skipped before the run stops", least=1)


@dataclass
class PairEvalConfig:
    every: int = setting(0, "evaluate every so many steps; 0: only before and after", least=0)
    before: bool = setting(True, "evaluate before the first step")
    after: bool = setting(True, "evaluate after the last step")
    max_pairs: int = setting(0, "use only the first so many held-out pairs; 0: all", least=0)


@dataclass
class DapoRecipe:
    """`msrl train dapo`."""

    model: str = setting(MISSING, "HF folder of the model to train")
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    dapo: DapoConfig = field(default_factory=DapoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class DpoRecipe:
    """`msrl train dpo`."""

    model: str = setting(MISSING, "HF folder of the model to train")
    data: PairsConfig = field(default_factory=PairsConfig)
    dpo: DpoLossConfig = field(default_factory=DpoLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: PairTrainConfig = field(default_factory=PairTrainConfig)
    eval: PairEvalConfig = field(default_factory=PairEvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
