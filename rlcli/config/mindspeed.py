"""From a MindSpeed-RL YAML to a recipe: every setting of the file is either carried over, with what was done, or listed with why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlcli.config.settings import table
from rlcli.errors import UserError

TRAINING, RL, GENERATE = "megatron_training", "rl_config", "generate_config"
MEASURING = ("profiler_config", "msprobe_config")
ABSENT = object()

VERIFIERS = {
    "acc_for_dapo": ("dapo", ""),
    "acc": ("acc", ""),
    "math_17k_acc": ("math_17k_acc", ""),
    "acc_for_ppo": ("acc_for_ppo", ""),
    "base_acc": ("base_acc", ""),
    "math_verify_reward": ("math_verify_reward", ""),
    "strict_format": ("strict_format", ""),
    "format": ("format", ""),
    "step": ("step", ""),
    "retool_reward": ("retool_reward", ""),
}


@dataclass
class Translation:
    """A recipe's settings by dotted key, the old key that each came from, remarks on them, and what was left out with why."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # why -> keys


class _Reader:
    """The old file, by section; remembers which of its settings were looked at."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        self.sections = data
        self.out = Translation(kind)
        self.used: set[tuple[str, str]] = set()
        self.known = table(kind)

    def get(self, section: str, name: str, default: Any = None) -> Any:
        """A setting's value; it counts as carried over."""
        values = self.sections.get(section, {})
        if name in values:
            self.used.add((section, name))
        value = values.get(name, default)
        return default if value is None else value

    def has(self, section: str, name: str) -> bool:
        return self.sections.get(section, {}).get(name) is not None

    def put(self, key: str, value: Any, origin: str) -> None:
        """Carry a value over, unless it is the default already."""
        self.out.origin[key] = origin
        if value != self.known[key].default:
            self.out.settings[key] = value

    def move(self, section: str, name: str, key: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        if key in self.known and self.has(section, name):
            self.put(key, change(self.get(section, name)), f"{section}.{name}")

    def leave(self, section: str, name: str, why: str) -> None:
        self.used.add((section, name))
        self.out.left_out.setdefault(why, []).append(f"{section}.{name}")

    def remark(self, text: str) -> None:
        self.out.remarks.append(text)


def translate(data: Any) -> Translation:
    """The recipe that a MindSpeed-RL configuration means. Raises UserError where it is none, or trains by an algorithm that msrl has not."""
    if not isinstance(data, dict) or not any(isinstance(data.get(name), dict) for name in (TRAINING, RL)):
        raise UserError(f"This is no MindSpeed-RL configuration: it has neither {TRAINING} nor {RL}")
    sections = _sections(data)
    stage = str(sections[TRAINING].get("stage", "ray_dapo" if sections[RL] else "dpo"))
    kinds = {"ray_dapo": "dapo", "ray_grpo": "dapo", "dpo": "dpo"}
    if stage not in kinds:
        raise UserError(f"stage: {stage} has no counterpart: msrl trains with DAPO and DPO")
    reader = _Reader(sections, kinds[stage])
    reader.get(TRAINING, "stage")
    _training(reader)
    if kinds[stage] == "dapo":
        _dapo(reader, stage)
    else:
        _dpo(reader)
    _trackers(reader)
    _rest(reader)
    return reader.out


def _sections(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections with underscores in their keys; `actor_config` merged over `megatron_training`, sections named otherwise kept."""
    clean = {
        str(name).replace("-", "_"): {str(key).replace("-", "_"): value for key, value in section.items()}
        if isinstance(section, dict)
        else {"": section}
        for name, section in data.items()
    }
    training = {**clean.pop(TRAINING, {}), **clean.pop("actor_config", {})}
    return {TRAINING: training, RL: {}, GENERATE: {}, **clean}


def _training(r: _Reader) -> None:
    """What DAPO and DPO have in common."""
    moves = {
        "tokenizer_name_or_path": "model",
        "train_iters": "train.steps",
        "seed": "train.seed",
        "npu_deterministic": "train.deterministic",
        "lr": "optim.lr",
        "min_lr": "optim.min_lr",
        "weight_decay": "optim.weight_decay",
        "clip_grad": "optim.clip_grad",
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "expert_model_parallel_size": "parallel.expert",
        "context_parallel_size": "parallel.context",
        "save_interval": "checkpoint.every",
    }
    for old, new in moves.items():
        r.move(TRAINING, old, new, float if new.startswith("optim.") else lambda value: value)
    if "model" in r.out.settings:
        r.remark("the folder in Hugging Face format gives tokenizer, shape and weights: nothing is to be converted")
    r.move(TRAINING, "no_save_optim", "checkpoint.save_optimizer", lambda value: not value)
    r.move(TRAINING, "no_shuffle", "data.shuffle", lambda value: not value)
    r.move(TRAINING, "bf16", "train.dtype", lambda value: "bfloat16" if value else "float32")
    r.move(TRAINING, "recompute_granularity", "train.recompute", lambda value: value == "full")
    _schedule(r)
    for size in ("expert_model_parallel_size", "context_parallel_size"):
        if r.sections[TRAINING].get(size) == 1:
            r.get(TRAINING, size)


def _schedule(r: _Reader) -> None:
    style = r.get(TRAINING, "lr_decay_style", "linear" if r.has(TRAINING, "lr") else "constant")
    if style in ("constant", "cosine"):
        r.put("optim.schedule", style, f"{TRAINING}.lr_decay_style")
    else:
        r.put("optim.schedule", "cosine", f"{TRAINING}.lr_decay_style")
        r.remark(f"optim.schedule: cosine stands in for lr_decay_style {style}, which msrl has not")
    fraction = float(r.get(TRAINING, "lr_warmup_fraction", 0.0))
    if fraction:
        steps = round(fraction * int(r.sections[TRAINING].get("train_iters") or 0))
        r.put("optim.warmup_steps", steps, f"{TRAINING}.lr_warmup_fraction")


def _dapo(r: _Reader, stage: str) -> None:
    _batches(r)
    _rollout(r)
    _loss(r, stage)
    _rewards(r)
    _filtering(r, stage)
    _micro_batch(r, r.out.settings.get("data.max_prompt_tokens", 1024) + r.out.settings.get("rollout.max_response_tokens", 1024))


def _batches(r: _Reader) -> None:
    r.move(RL, "max_prompt_length", "data.max_prompt_tokens")
    r.move(RL, "n_samples_per_prompt", "rollout.samples_per_prompt")
    r.move(RL, "epochs", "dapo.epochs")
    wave = r.get(TRAINING, "global_batch_size", 0)
    filtered = r.get(RL, "filter_groups_enable", False)
    batch = r.get(RL, "filter_groups_train_batch_size", 0) if filtered else wave
    if batch:
        r.put("train.batch_prompts", batch, f"{RL}.filter_groups_train_batch_size" if filtered else f"{TRAINING}.global_batch_size")
    if filtered and wave and wave != batch:
        r.remark(f"global_batch_size {wave} was the size of a wave of prompts; msrl sizes each wave by the measured share of mixed groups")
    mini = r.get(RL, "mini_batch_size", 0)
    if mini and mini != batch:
        r.put("train.mini_batch_prompts", mini, f"{RL}.mini_batch_size")
    devices = (r.get(RL, "actor_resource", {}) or {}).get("num_npus")
    if devices:
        r.put("parallel.devices", devices, f"{RL}.actor_resource.num_npus")


def _rollout(r: _Reader) -> None:
    r.move(GENERATE, "infer_tensor_parallel_size", "rollout.tensor_parallel")
    r.move(GENERATE, "max_num_seqs", "rollout.max_running_samples")
    sampling = dict(r.get(GENERATE, "sampling_config", {}))
    for old, new in {"max_tokens": "max_response_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}.items():
        if sampling.get(old) is not None:
            kind = r.known[f"rollout.{new}"].type
            r.put(f"rollout.{new}", kind(sampling[old]), f"{GENERATE}.sampling_config.{old}")
    if sampling.get("min_p"):
        r.out.left_out.setdefault("the trainer's distribution is whole: cut ones are not offered", []).append(f"{GENERATE}.sampling_config.min_p")
    dtype = r.get(GENERATE, "dtype", "bfloat16")
    if dtype != r.out.settings.get("train.dtype", "bfloat16"):
        r.put("rollout.dtype", dtype, f"{GENERATE}.dtype")
    devices, tensor = r.out.settings.get("parallel.devices", 1), r.out.settings.get("rollout.tensor_parallel", 1)
    if devices % tensor == 0 and devices // tensor > 1:
        r.put("rollout.engines", devices // tensor, "num_npus / infer_tensor_parallel_size")


def _loss(r: _Reader, stage: str) -> None:
    both = float(r.get(RL, "clip_ratio", 0.2))
    low, high = both, both
    if r.get(RL, "clip_higher_enable", False):
        low, high = float(r.get(RL, "clip_ratio_low", 0.1)), float(r.get(RL, "clip_ratio_high", 0.1))
    r.put("dapo.clip_low", low, f"{RL}.clip_ratio_low")
    r.put("dapo.clip_high", high, f"{RL}.clip_ratio_high")
    r.move(RL, "entropy_coeff", "dapo.entropy_coef", float)
    if r.get(RL, "adv_estimator", "group_norm") != "group_norm":
        raise UserError(f"{RL}.adv_estimator: {r.get(RL, 'adv_estimator')} needs a critic, which msrl has not; only group_norm has a counterpart")
    whole = r.get(RL, "token_level_loss", stage == "ray_dapo")
    r.put("dapo.aggregate", "token_mean" if whole else "seq_mean", f"{RL}.token_level_loss")
    if whole:
        r.remark("dapo.aggregate: token_mean is over all tokens of the mini-batch; MindSpeed-RL's was over each micro-batch, so gradients differ")
    if stage == "ray_grpo":
        r.remark("GRPO's KL term (kl_penalty, init_kl_coef) is not part of DAPO and is left out")


def _rewards(r: _Reader) -> None:
    names = r.get(RL, "verifier_function", ["base_acc"])
    weights = [float(weight) for weight in r.get(RL, "verifier_weight", [1.0] * len(names))]
    kept = [(VERIFIERS[name], name, weight) for name, weight in zip(names, weights, strict=False) if name in VERIFIERS]
    for name in names:
        if name not in VERIFIERS:
            r.out.left_out.setdefault("no verifier of this meaning; write one as package.module:function", []).append(f"{RL}.verifier_function: {name}")
    if kept:
        r.put("reward.verifiers", [new for (new, _), _, _ in kept], f"{RL}.verifier_function")
        r.put("reward.weights", [weight for _, _, weight in kept], f"{RL}.verifier_weight")
    for (new, note), name, _ in kept:
        if note:
            r.remark(f"reward.verifiers: {new} stands in for {name}, {note}")
    for name in ("overlong_buffer", "overlong_buffer_penalty_factor", "rollout_max_tokens"):
        r.get(RL, name)
    if r.get(RL, "overlong_buffer_enable", False):
        r.put("reward.overlong_buffer_tokens", r.get(RL, "overlong_buffer", 0), f"{RL}.overlong_buffer")
        r.put("reward.overlong_penalty", float(r.get(RL, "overlong_buffer_penalty_factor", 1.0)), f"{RL}.overlong_buffer_penalty_factor")


def _filtering(r: _Reader, stage: str) -> None:
    r.put("sampling.enabled", bool(r.get(RL, "filter_groups_enable", False)), f"{RL}.filter_groups_enable")
    r.get(RL, "filter_groups_train_batch_size")
    metric = r.get(RL, "filter_groups_metric", None)
    if metric is not None:
        r.remark("groups are always filtered by whether answers are right (filter_groups_metric is not needed)")
    waves = r.get(RL, "filter_groups_max_batches", 0)
    if waves > 0:
        r.put("sampling.max_batches", waves, f"{RL}.filter_groups_max_batches")
    elif r.out.settings.get("sampling.enabled", True):
        r.remark("sampling.max_batches: there is no 'unlimited'; after the default number of waves the step trains on what was kept")


def _dpo(r: _Reader) -> None:
    r.move(TRAINING, "global_batch_size", "train.batch_pairs")
    r.move(TRAINING, "seq_length", "data.max_tokens")
    if r.out.settings.get("data.max_tokens", 1024) <= 512:
        r.put("data.max_prompt_tokens", r.out.settings["data.max_tokens"] // 2, "half of seq_length")
    r.move(TRAINING, "dpo_loss_type", "dpo.losses", lambda value: [value])
    layout = {name: r.out.settings.get(f"parallel.{name}", 1) for name in ("tensor", "pipeline")}
    r.put("parallel.devices", layout["tensor"] * layout["pipeline"], "tensor x pipeline")
    r.remark("parallel.devices: torchrun decided on the number of devices; set it to a multiple of tensor x pipeline")
    if r.has(TRAINING, "ref_model"):
        r.leave(TRAINING, "ref_model", "the reference is the model as it is before training; for another give dpo.reference_model=HF_FOLDER")
    _micro_batch(r, 2 * r.out.settings.get("data.max_tokens", 1024))


def _micro_batch(r: _Reader, longest: int) -> None:
    """Micro-batches are bounded in tokens: the old bound where there was one, and at least what the longest row needs."""
    bound = r.get(RL, "update_max_packing_token_size", 0) if r.get(RL, "use_dynamic_bsz", False) else 0
    tokens = max(bound or r.known["train.micro_batch_tokens"].default, longest)
    r.put("train.micro_batch_tokens", tokens, f"{RL}.update_max_packing_token_size")
    for section, name in ((TRAINING, "micro_batch_size"), (RL, "update_max_packing_token_size")):
        if r.has(section, name) and (section, name) not in r.used:
            r.leave(section, name, "micro-batches are bounded in tokens (train.micro_batch_tokens), not in rows")


def _trackers(r: _Reader) -> None:
    trackers = [name for name in ("tensorboard", "wandb", "swanlab") if r.get(RL, f"use_{name}", False)]
    r.put("run.trackers", trackers, f"{RL}.use_*")
    for name in ("wandb", "swanlab"):
        for old, new in ((f"{name}_project", "run.project"), (f"{name}_exp_name", "run.name")):
            if r.get(RL, old, "") and name in trackers:
                r.put(new, r.get(RL, old), f"{RL}.{old}")


# Why groups of old settings have no counterpart: the first pattern that matches a setting's name gives the reason.
REASONS = (
    (r"multi_turn|tool_|max_tool|max_parallel_calls|max_total_response", "!rollouts with tools are not supported"),
    (r"is_multimodal|vit_|_vit|image|limit_mm|mm_model", "!only language models are trained"),
    (r"lora_", "!all weights are trained, no adapters"),
    (r"partial_rollout|require_max_age", "!samples are always finished within their step"),
    (r"expert_model_parallel|context_parallel|cp_send|ring_attention|moe_tp_extend|expert_parallel|layers_per_virtual|num_layer_list|noop_layers", "!this way of splitting the model is not offered"),
    (r"kl_|init_kl|use_kl|^beta$", "DAPO has no KL term; DPO's beta is dpo.beta"),
    (r"critic|cliprange_value|gamma|^lam$|advantage_whiten|share_backbone|reference_resource|reward_resource|integrated_mode|ref_", "there is no critic, reward model or reference in memory"),
    (r"^num_layers$|hidden_size|ffn|num_attention|kv_channels|group_query|num_query|untie|multi_latent|head_dim|lora_rank|qk_layernorm|rope|freq_factor|position_emb|^beta_|rotary|mscale|moe_|experts|first_k|norm|swiglu|qkv_bias|bias_linear|attention_bias|vocab|dropout|init_method|spec$|mcore|seq_aux|^model$|^defaults$|attention_mask_type", "read from the model's config.json"),
    (r"fus(ed|ion)|flash|shape_order|sequence_parallel|overlap|distributed_optimizer|ddp_|accumulate_allreduce|check_for_nan|coc|swap_|reuse_fp32|recompute_|grouped_gemm|transformer_impl|ai_framework|distributed_backend|initial_loss_scale|tp_pp_dp|kv_cache|do_sample|optimizer|algorithm|use_remove_padding|no_pad|variable_seq|reset_|pad_to|padding_side|high_availability", "chosen by the program: how it computes, not what"),
    (r"dispatch_size|micro_batch|packing|dynamic_|dp_batch_balance|guarantee_order|blocking|async_engine|zmq|transfer_queue|data_strategy|num_cpus|integrated_worker|local_task|rule_reward|shuffle_mini|tp_split|num_samples_per_step", "work is shared out by the program"),
    (r"offload|gpu_memory|enforce_eager|graph|scheduler|max_model_len|num_batched|prefix_caching|infer_|eplb|expert_map|data_parallel|tokenizer_name", "the rollout engine is set up by the program (rollout.*)"),
    (r"data_path|split|dataloader|prompt_type|dataset|instruction|pairwise|num_workers|seq_length|tokenizer|additional_keys|streaming", "data is prepared anew from your rows: data.train=FILE, or `msrl data prep`"),
    (r"load|^save$|finetune|no_save_rng|no_load|pretrained|shared_storage|refer_model", "checkpoints and `msrl resume` need no such settings"),
    (r"log_|eval_|skip_train|wandb|swanlab|tensorboard", "metrics go to the run folder; eval.every and data.eval evaluate"),
    (r"verifier_", "was never read by MindSpeed-RL; see reward.workers and reward.timeout_s"),
    (r"runtime_env|hccl|trust_remote", "the platform sets its environment; code from model folders is not run"),
)


def _rest(r: _Reader) -> None:
    """Everything not looked at so far, with a reason."""
    for section, values in r.sections.items():
        for name, value in values.items():
            if (section, name) in r.used:
                continue
            key = f"{section}.{name}" if name else section
            if section in MEASURING:
                why = "profiling and dumping tools are not part of msrl"
            elif section not in (TRAINING, RL, GENERATE, "model", "defaults"):
                why = "MindSpeed-RL has no such section for DAPO or DPO"
            else:
                why = _why(name or section, value)
            r.out.left_out.setdefault(why, []).append(key)


def _why(name: str, value: Any) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, name):
            idle = value in (None, False, 0, 1, "", [], {}) or (isinstance(value, int) and value <= 1)
            if reason.startswith("!"):
                return "switched off, as in msrl" if idle else reason[1:]
            return reason
    return "no counterpart"


def recipe_text(out: Translation, source: str) -> str:
    """The recipe as YAML, with the remarks as comments."""
    import yaml

    tree: dict[str, Any] = {}
    order = list(table(out.kind))
    for key in sorted(out.settings, key=order.index):
        *parts, leaf = key.split(".")
        place = tree
        for part in parts:
            place = place.setdefault(part, {})
        place[leaf] = out.settings[key]
    lines = [f"# From MindSpeed-RL's {source}: {'preferences (DPO)' if out.kind == 'dpo' else 'DAPO'}", *(f"# {text}" for text in out.remarks), ""]
    for name, value in tree.items():
        block = yaml.dump({name: value}, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=140)
        lines += [block]
    return "\n".join(lines)


def _dumper() -> Any:
    """Sections as blocks, lists on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True))
    return Dumper
