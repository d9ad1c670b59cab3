"""The names and shapes that classic Megatron folders use for the same weights, by writer, and msrl's own ("canonical") ones.

Megatron-core with Transformer Engine folds a norm into the linear layer after it. MindSpeed keeps all experts of a rank in two matrices of
transposed weights (grouped matrix products), and joins MLA's two down projections. Every such form is a range of bytes of the canonical one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlcli.checkpoint.regions import SIZES, Region
from rlcli.errors import UserError
from rlcli.models.spec import ModelSpec

_LAYER = re.compile(r"^(decoder\.layers\.\d+\.)(.+)$")
_GROUPED = re.compile(r"^mlp\.experts\.(weight1|weight2)$")
_NUMBERED = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_SAME = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "self_attention.linear_qb.weight": "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kvb.weight": "self_attention.linear_kv_up_proj.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}


def canonical(state: Mapping[str, Any], spec: ModelSpec, expert_parts: int, where: str) -> dict[str, Region]:
    """Each weight of one rank's state dict by its canonical local name; entries without a tensor (extra states) are left out.

    `expert_parts`: ranks that one expert is split over, which grouped experts do not show in their shape.
    """
    found: dict[str, Region] = {}
    for name, region in state.items():
        if not isinstance(region, Region):
            continue
        while name.startswith("module."):
            name = name[len("module.") :]
        layer = _LAYER.match(name)
        forms = _in_layer(layer.group(2), region, spec, expert_parts, where) if layer else {name: region}
        prefix = layer.group(1) if layer else ""
        for key, part in forms.items():
            if prefix + key in found:
                raise UserError(f"{where}: holds {prefix + key} twice")
            found[prefix + key] = part
    return found


def _in_layer(name: str, region: Region, spec: ModelSpec, expert_parts: int, where: str) -> dict[str, Region]:
    mla = bool(spec.transformer.get("multi_latent_attention"))
    if mla and name == "self_attention.linear_qkv.weight":
        return _split_down(region, spec, where)
    if mla and name == "self_attention.k_layernorm.weight":
        return {"self_attention.kv_layernorm.weight": region}
    grouped, numbered = _GROUPED.match(name), _NUMBERED.match(name)
    if grouped:
        return _split_grouped(grouped.group(1), region, spec, expert_parts, where)
    if numbered:
        return {f"mlp.experts.local_experts.{numbered.group(2)}.{numbered.group(1)}.weight": region}
    return {_SAME.get(name, name): region}


def _split_down(region: Region, spec: ModelSpec, where: str) -> dict[str, Region]:
    """MindSpeed's joint down projection: rows of the query's, or of the whole query projection, then those of key and value's."""
    rows_kv = spec.transformer["kv_lora_rank"] + spec.transformer["qk_pos_emb_head_dim"]
    rows_q, width = region.shape[0] - rows_kv, region.shape[1] * SIZES[region.dtype]
    if rows_q < 1 or region.transposed:
        raise UserError(f"{where}: self_attention.linear_qkv.weight {list(region.meant)} is no joint MLA projection of this model")
    query = "linear_q_down_proj" if spec.transformer.get("q_lora_rank") else "linear_q_proj"
    return {
        f"self_attention.{query}.weight": replace(region, shape=(rows_q, region.shape[1])),
        "self_attention.linear_kv_down_proj.weight": replace(region, shape=(rows_kv, region.shape[1]), start=region.start + rows_q * width),
    }


def _split_grouped(kind: str, region: Region, spec: ModelSpec, expert_parts: int, where: str) -> dict[str, Region]:
    """Grouped experts: memory of weight1 is [experts, hidden, gate|up] and of weight2 [experts, ffn, hidden], each expert transposed."""
    hidden, total = spec.hidden, region.shape[0] * region.shape[1]
    share, rest = divmod(spec.expert_ffn * (2 if kind == "weight1" else 1), expert_parts)  # one expert's part of the ffn
    if rest or total % (hidden * share) or region.transposed:
        raise UserError(f"{where}: mlp.experts.{kind} {list(region.meant)} does not hold whole experts of this model")
    shape = (hidden, share) if kind == "weight1" else (share, hidden)
    name, size = ("linear_fc1" if kind == "weight1" else "linear_fc2"), hidden * share * SIZES[region.dtype]
    return {
        f"mlp.experts.local_experts.{e}.{name}.weight": Region(region.file, region.dtype, shape, region.start + e * size, transposed=True)
        for e in range(total // (hidden * share))
    }


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor of a state dict to be: shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


def mindspeed(state: Mapping[str, Raw], spec: ModelSpec) -> dict[str, Raw]:
    """MindSpeed's names for canonical ones: experts grouped into two matrices, MLA's down projections joined (both must be whole)."""
    grouped: dict[str, Raw] = {}
    out: dict[str, Raw] = {}
    for name, raw in state.items():
        prefix, expert, rest = name.partition("mlp.experts.local_experts.")
        if expert:
            kind = "weight1" if "linear_fc1" in rest else "weight2"
            key = f"{prefix}mlp.experts.{kind}"
            ffn = raw.shape[0] if kind == "weight1" else raw.shape[1]
            before = grouped.get(key, Raw((spec.hidden, 0) if kind == "weight1" else (0, spec.hidden), raw.dtype)).shape
            grouped[key] = Raw((spec.hidden, before[1] + ffn) if kind == "weight1" else (before[0] + ffn, spec.hidden), raw.dtype)
            out[key] = grouped[key]
        elif spec.transformer.get("multi_latent_attention") and re.search(r"linear_(q_down|q|kv_down)_proj\.weight$", name):
            key = re.sub(r"linear_\w+_proj\.weight$", "linear_qkv.weight", name)
            rows = out[key].shape[0] if key in out else 0
            out[key] = Raw((rows + raw.shape[0], raw.shape[1]), raw.dtype)
        else:
            out[name] = raw
    return out
