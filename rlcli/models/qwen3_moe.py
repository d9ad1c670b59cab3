"""Qwen3-MoE: softmax router over experts, each a gated MLP of its own; some layers may be dense."""

from __future__ import annotations

from typing import Any

from rlcli.errors import UserError
from rlcli.models.config import integer
from rlcli.models.decoder import attention, ends, norms, swiglu
from rlcli.models.qwen3 import read_fields
from rlcli.models.rules import Rule, Source
from rlcli.models.spec import Family, ModelSpec


def _read(config: dict[str, Any], where: str) -> dict[str, Any]:
    fields = read_fields(config, where)
    experts = integer(config, "num_experts", where, None) or integer(config, "num_local_experts", where)
    chosen = integer(config, "num_experts_per_tok", where)
    if chosen > experts:
        raise UserError(f"{where}: num_experts_per_tok={chosen} is more than num_experts={experts}")
    step, dense = integer(config, "decoder_sparse_step", where, 1), set(config.get("mlp_only_layers") or [])
    moe = frozenset(i for i in range(fields["layers"]) if (i + 1) % step == 0 and i not in dense)
    # Megatron's softmax over the chosen logits alone equals softmax over all, then renormalised; without renormalising it comes before
    fields["transformer"] = {
        "num_moe_experts": experts, "moe_router_topk": chosen, "moe_ffn_hidden_size": integer(config, "moe_intermediate_size", where),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False), "moe_layer_freq": [int(i in moe) for i in range(fields["layers"])],
    }
    return {**fields, "experts": experts, "expert_ffn": config["moe_intermediate_size"], "moe_layers": moe}


def _table(spec: ModelSpec) -> list[Rule]:
    first, last = ends(spec)
    layers: list[Rule] = []
    for layer in range(spec.layers):
        layers += norms(spec, layer) + attention(spec, layer)
        layers += experts(spec, layer) if layer in spec.moe_layers else swiglu(spec, layer, "mlp", "mlp", spec.ffn)
    return first + layers + last


def experts(spec: ModelSpec, layer: int) -> list[Rule]:
    """The router, on every rank whole, and the experts."""
    router = Source(f"model.layers.{layer}.mlp.gate.weight", (spec.experts, spec.hidden))
    rules = [Rule(f"decoder.layers.{layer}.mlp.router.weight", (router,), None, layer)]
    for e in range(spec.experts):
        rules += swiglu(spec, layer, f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}", spec.expert_ffn, expert=e)
    return rules


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read, _table)
