"""DeepSeek-V2 and V3: multi-head latent attention (MLA), dense first layers, routed and shared experts. For conversion only.

V3's multi-token prediction layers stand in HF folders after the last layer; they are no part of the model that is sampled from, and are left out.
"""

from __future__ import annotations

from typing import Any

from rlcli.errors import UserError
from rlcli.models.config import integer, number, refuse, refuse_common
from rlcli.models.decoder import ends, norms, swiglu
from rlcli.models.qwen3_moe import experts
from rlcli.models.rules import Rule, Source
from rlcli.models.spec import Family, ModelSpec


def _read(config: dict[str, Any], where: str) -> dict[str, Any]:
    refuse_common(config, where)
    refuse(config, where, attention_bias=(False,), moe_layer_freq=(1,))
    layers, heads = integer(config, "num_hidden_layers", where), integer(config, "num_attention_heads", where)
    nope, rope = integer(config, "qk_nope_head_dim", where), integer(config, "qk_rope_head_dim", where)
    count = integer(config, "n_routed_experts", where)
    first = config.get("first_k_dense_replace") or 0
    if not isinstance(first, int) or first > layers:
        raise UserError(f"{where}: first_k_dense_replace={first!r} is no number of layers up to {layers}")
    moe = frozenset(range(first, layers))
    fields = {
        "layers": layers, "hidden": integer(config, "hidden_size", where), "heads": heads, "kv_heads": heads, "head_dim": nope + rope,
        "ffn": integer(config, "intermediate_size", where), "vocab": integer(config, "vocab_size", where),
        "tied": bool(config.get("tie_word_embeddings", False)), "eps": number(config, "rms_norm_eps", where, 1e-6),
        "max_positions": integer(config, "max_position_embeddings", where, 2048), "qk_norm": True,
        "experts": count, "expert_ffn": integer(config, "moe_intermediate_size", where), "moe_layers": moe,
    }
    mla = {
        "multi_latent_attention": True, "q_lora_rank": integer(config, "q_lora_rank", where, None) if config.get("q_lora_rank") else None,
        "kv_lora_rank": integer(config, "kv_lora_rank", where), "qk_head_dim": nope, "qk_pos_emb_head_dim": rope,
        "v_head_dim": integer(config, "v_head_dim", where), **_rope(config, where),
    }
    fields["transformer"] = {**mla, **_router(config, where, moe, layers)}
    return fields


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """MLATransformerConfig's rope, plain or yarn."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    theta = number({"rope_theta": parameters.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta", where, 10000.0)
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": theta}
    if kind != "yarn":
        raise UserError(f"{where}: rope scaling {kind!r} is not supported (only default and yarn)")
    return {
        "rope_type": "yarn", "rotary_base": theta, "rotary_scaling_factor": number(parameters, "factor", where, 1.0),
        "original_max_position_embeddings": integer(parameters, "original_max_position_embeddings", where, 4096),
        "beta_fast": number(parameters, "beta_fast", where, 32), "beta_slow": number(parameters, "beta_slow", where, 1),
        "mscale": number(parameters, "mscale", where, 1.0), "mscale_all_dim": number(parameters, "mscale_all_dim", where, 0.0),
    }


def _router(config: dict[str, Any], where: str, moe: frozenset[int], layers: int) -> dict[str, Any]:
    """TransformerConfig's arguments for experts: softmax without renormalising in V2, sigmoid with a correcting bias in V3."""
    v3 = _has_bias(config)
    if v3:  # what transformers takes where config.json is silent
        config = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, **config}
    groups = {"moe_router_num_groups": config["n_group"], "moe_router_group_topk": config["topk_group"]} if config.get("n_group") else {}
    return {
        "num_moe_experts": config["n_routed_experts"], "moe_router_topk": integer(config, "num_experts_per_tok", where),
        "moe_ffn_hidden_size": config["moe_intermediate_size"], "moe_layer_freq": [int(i in moe) for i in range(layers)],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0) or None,
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor", where, 1.0),
        "moe_router_score_function": "sigmoid" if v3 else "softmax", "moe_router_enable_expert_bias": v3, "moe_router_pre_softmax": not v3,
        **(groups if config.get("topk_method") != "greedy" else {}),
    }


def _has_bias(config: dict[str, Any]) -> bool:
    return "DeepseekV3ForCausalLM" in (config.get("architectures") or [])


def _attention(spec: ModelSpec, layer: int) -> list[Rule]:
    """MLA: queries and key-values through low ranks, each with a norm of its own."""
    mine, theirs, t = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn.", spec.transformer
    query, kv = spec.heads * spec.head_dim, spec.heads * (t["qk_head_dim"] + t["v_head_dim"])

    def rule(name: str, hf: str, shape: tuple[int, ...], axis: int | None = 0) -> Rule:
        return Rule(f"{mine}{name}.weight", (Source(f"{theirs}{hf}.weight", shape),), axis, layer)

    rules = [rule("linear_proj", "o_proj", (spec.hidden, spec.heads * t["v_head_dim"]), 1)]
    if t["q_lora_rank"]:
        rules += [
            rule("linear_q_down_proj", "q_a_proj", (t["q_lora_rank"], spec.hidden)),
            rule("q_layernorm", "q_a_layernorm", (t["q_lora_rank"],), None),
            rule("linear_q_up_proj", "q_b_proj", (query, t["q_lora_rank"])),
        ]
    else:
        rules.append(rule("linear_q_proj", "q_proj", (query, spec.hidden)))
    return [
        *rules,
        rule("linear_kv_down_proj", "kv_a_proj_with_mqa", (t["kv_lora_rank"] + t["qk_pos_emb_head_dim"], spec.hidden)),
        rule("kv_layernorm", "kv_a_layernorm", (t["kv_lora_rank"],), None),
        rule("linear_kv_up_proj", "kv_b_proj", (kv, t["kv_lora_rank"])),
    ]


def _mlp(spec: ModelSpec, layer: int) -> list[Rule]:
    if layer not in spec.moe_layers:
        return swiglu(spec, layer, "mlp", "mlp", spec.ffn)
    rules, shared = experts(spec, layer), spec.transformer["moe_shared_expert_intermediate_size"]
    if spec.transformer["moe_router_enable_expert_bias"]:
        bias = Source(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (spec.experts,))
        rules.insert(1, Rule(f"decoder.layers.{layer}.mlp.router.expert_bias", (bias,), None, layer, buffer=True))
    return rules + (swiglu(spec, layer, "mlp.shared_experts", "mlp.shared_experts", shared) if shared else [])


def _table(spec: ModelSpec) -> list[Rule]:
    first, last = ends(spec)
    return first + [rule for i in range(spec.layers) for rule in (*norms(spec, i), *_attention(spec, i), *_mlp(spec, i))] + last


FAMILY = Family(
    "deepseek", ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), _read, _table,
    ignored=("model.layers.{layers}.*", "*.rotary_emb.inv_freq"), trains=False,
)
