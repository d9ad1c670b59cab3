"""Reading of HF config.json, shared by the families: required keys by type, and refusals by name of what would change the mathematics."""

from __future__ import annotations

from typing import Any

from rlcli.errors import UserError

_MISSING = object()


def integer(config: dict[str, Any], key: str, where: str, default: Any = _MISSING) -> int:
    """A positive whole number of config.json."""
    value = config.get(key)
    if value is None and default is not _MISSING:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: {key} is {'missing' if key not in config else repr(value)}; a positive whole number is needed")
    return value


def number(config: dict[str, Any], key: str, where: str, default: float) -> float:
    """A number of config.json."""
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r}; a number is needed")
    return float(value)


def refuse(config: dict[str, Any], where: str, **allowed: tuple[Any, ...]) -> None:
    """UserError where a key is present with a value other than those allowed (absent and null always are)."""
    for key, values in allowed.items():
        value = config.get(key)
        if value is not None and value not in values:
            raise UserError(f"{where}: {key}={value!r} is not supported (only {' or '.join(map(repr, values)) if values else 'without it'})")


def refuse_common(config: dict[str, Any], where: str) -> None:
    """What no family supports: quantised weights, other activations, scaled logits, layers without full attention."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown") if isinstance(config["quantization_config"], dict) else "unknown"
        raise UserError(f"{where}: quantised weights ({method}) cannot be trained; take the unquantised model")
    refuse(config, where, hidden_act=("silu",), pretraining_tp=(1,), mlp_bias=(False,), attention_dropout=(0, 0.0), residual_dropout=(0, 0.0),
           embedding_multiplier=(1, 1.0), logits_scaling=(1, 1.0), final_logit_softcapping=(), attn_logit_softcapping=(), is_encoder_decoder=(False,))
    others = sorted({t for t in config.get("layer_types") or [] if t != "full_attention"})
    if others:
        raise UserError(f"{where}: layers of type {', '.join(others)} are not supported (only full_attention)")


def rope(config: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(rope, gpt): the rope parameters in one spelling, and GPTModel's arguments for them.

    Older folders have rope_theta and rope_scaling, those of transformers 5 rope_parameters. Megatron fixes llama3's
    low_freq_factor=1, high_freq_factor=4 and original_max_position_embeddings=8192: other values are refused.
    """
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    if any(isinstance(v, dict) for v in parameters.values()):
        raise UserError(f"{where}: rope_parameters a layer type are not supported")
    theta = number({"rope_theta": parameters.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta", where, 10000.0)
    refuse({"partial_rotary_factor": parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))}, where, partial_rotary_factor=(1, 1.0))
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    gpt: dict[str, Any] = {"rotary_base": theta}
    if kind == "llama3":
        refuse(parameters, where, low_freq_factor=(1,), high_freq_factor=(4,), original_max_position_embeddings=(8192,))
        gpt.update(rope_scaling=True, rope_scaling_factor=number(parameters, "factor", where, 8.0))
    elif kind == "linear":
        gpt.update(seq_len_interpolation_factor=number(parameters, "factor", where, 1.0))
    elif kind != "default":
        raise UserError(f"{where}: rope scaling {kind!r} is not supported (only default, linear and llama3)")
    return parameters, gpt


def dense_fields(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of ModelSpec that every decoder of the Llama kind has."""
    refuse_common(config, where)
    hidden, heads = integer(config, "hidden_size", where), integer(config, "num_attention_heads", where)
    kv_heads = integer(config, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    return {
        "layers": integer(config, "num_hidden_layers", where), "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "head_dim": integer(config, "head_dim", where, hidden // heads), "ffn": integer(config, "intermediate_size", where),
        "vocab": integer(config, "vocab_size", where), "tied": bool(config.get("tie_word_embeddings", False)),
        "eps": number(config, "rms_norm_eps", where, 1e-6), "max_positions": integer(config, "max_position_embeddings", where, 2048),
        "gpt": rope(config, where)[1],
    }
