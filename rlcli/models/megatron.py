"""Arguments for Megatron-core: TransformerConfig's, GPTModel's and the layer spec's. Megatron itself is imported by the engine alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.errors import UserError
from rlcli.models.layout import Layout
from rlcli.models.rules import FIRST, LAST, Rule, padded
from rlcli.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """UserError, naming what does not divide, where the model cannot be laid out so."""
    layout.layers(spec.layers)
    if spec.heads % layout.tensor:
        raise UserError(f"{spec.folder}: {spec.heads} attention heads do not divide over tensor={layout.tensor}; choose a divisor")
    if spec.experts:
        layout.experts(spec.experts)
    elif layout.expert > 1:
        raise UserError(f"{spec.folder}: {spec.family.name} has no experts; expert={layout.expert} must be 1")
    for rule in spec.rules:
        parts = layout.split(rule.expert is not None)[0]
        if not rule.divides(parts):
            sizes = " and ".join(f"{s.name} {list(s.shape)}" for s in rule.sources)
            raise UserError(f"{spec.folder}: {sizes} cannot be split over {'expert ' if rule.expert is not None else ''}tensor={parts}")


def padded_vocab(spec: ModelSpec, tensor: int) -> int:
    """Rows of Megatron's embedding: the vocabulary rounded up to a multiple of the tensor parallel size.

    Rows from `spec.vocab` on are zeros; their logits must be left out of every softmax.
    """
    return padded(spec.vocab, tensor)


def transformer_config(spec: ModelSpec, tensor: int, pipeline: int, dtype: torch.dtype, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig (or MLATransformerConfig where "multi_latent_attention" is true) for `spec`."""
    import torch
    import torch.nn.functional as F

    arguments: dict[str, Any] = {
        "num_layers": spec.layers, "hidden_size": spec.hidden, "num_attention_heads": spec.heads, "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim, "ffn_hidden_size": spec.ffn, "normalization": "RMSNorm", "layernorm_epsilon": spec.eps,
        "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "add_qkv_bias": spec.qkv_bias, "qk_layernorm": spec.qk_norm,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16,
        # kernels of Transformer Engine and apex that need not be there; their plain forms are the same mathematics
        "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "apply_rope_fusion": False, "attention_softmax_in_fp32": False,
    }
    if spec.experts:
        arguments |= {
            "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": False, "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0, "expert_tensor_parallel_size": tensor,
        }
    return arguments | spec.transformer | overrides


def gpt_arguments(spec: ModelSpec, tensor: int) -> dict[str, Any]:
    """Keyword arguments of GPTModel besides config, layer spec and pipeline stage."""
    return {
        "vocab_size": padded_vocab(spec, tensor), "max_sequence_length": spec.max_positions, "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": spec.tied, "parallel_output": True,
    } | spec.gpt


def local_rules(spec: ModelSpec, layout: Layout) -> dict[str, Rule]:
    """The rules of what `layout`'s rank holds, by the parameter's local name in its GPTModel (layers and experts counted from 0)."""
    layers = layout.layers(spec.layers)
    experts = layout.experts(spec.experts) if spec.experts else range(0)
    rules = [r for layer in layers for e in (None, *experts) for r in spec.placed.get((layer, e), [])]
    if layout.is_first:
        rules = spec.placed[FIRST, None] + rules
    if layout.is_last:  # where one chunk holds both ends, a tied head is the embedding itself
        rules += [r for r in spec.placed[LAST, None] if not (r.copy and layout.is_first)]
    return {local_name(rule, layers, experts): rule for rule in rules}


def local_name(rule: Rule, layers: range, experts: range) -> str:
    """A rule's parameter name with its layer and expert counted within the rank."""
    name = rule.name
    if isinstance(rule.place, int):
        name = name.replace(f"layers.{rule.place}.", f"layers.{rule.place - layers.start}.", 1)
    if rule.expert is not None:
        name = name.replace(f"local_experts.{rule.expert}.", f"local_experts.{rule.expert - experts.start}.", 1)
    return name


