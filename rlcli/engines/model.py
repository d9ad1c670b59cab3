"""Megatron's GPTModel over packed micro-batches: its layers and parallel linears, with attention, norm and MLP arithmetic of our own.

Import this only where the platform has prepared the process for Megatron (`Platform.before_megatron`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from rlcli.engines.attention import Plan, attend, plan
from rlcli.engines.linear import ColumnLinear, RowLinear
from rlcli.engines.ops import RMSNorm, Rotate, SwiGLU
from rlcli.engines.packed import Packed
from rlcli.models.layout import Layout
from rlcli.models.megatron import check_layout, gpt_arguments, transformer_config
from rlcli.models.spec import ModelSpec

Tensor = torch.Tensor


def build_model(spec: ModelSpec, layout: Layout, dtype: torch.dtype, recompute: bool, deterministic: bool) -> PackedGPT:
    """The GPTModel of this rank's pipeline stage and tensor slice, its weights not yet set.

    Gradients are sums: `calculate_per_token_loss` keeps Megatron from averaging over micro-batches and data parallel ranks.
    Raises UserError where the model cannot be laid out so.
    """
    check_layout(spec, layout)
    options: dict[str, Any] = {"calculate_per_token_loss": True, "variable_seq_lengths": True}
    # Weights come from the HF folder. Initialising must still run, on nothing: it marks which parameters are split over tensor ranks.
    options |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), keep)
    options["moe_token_dispatcher_type"] = "alltoall"  # the default is refused with variable lengths, even without experts
    if layout.pipeline > 1:
        options["deallocate_pipeline_outputs"] = True
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if deterministic:
        options["deterministic_mode"] = True
    config = TransformerConfig(**transformer_config(spec, layout.tensor, layout.pipeline, dtype, **options))
    model = PackedGPT(
        config,
        block_spec(config),
        pre_process=layout.is_first,
        post_process=layout.is_last,
        **gpt_arguments(spec, layout.tensor),
    )
    return model.to(dtype)


def keep(weight: Tensor) -> Tensor:
    return weight


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's plain layers of this stage with packed attention, our norm and our backward pass of linears in place of its own."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        layer.module = PackedLayer
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention
        attention.module = PackedAttention
        attention.submodules.core_attention = ModuleSpec(module=CoreAttention)
        attention.submodules.linear_qkv, attention.submodules.linear_proj = ColumnLinear, RowLinear
        if parts.mlp.module is MLP:
            parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = ColumnLinear, RowLinear
        if config.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


class PackedGPT(GPTModel):
    """A stage of the model over one micro-batch: hidden states [T, 1, H], after the final norm on the last stage."""

    def forward(self, packed: Packed) -> Tensor:
        how = self.plan(packed)
        hidden = self.embedding(input_ids=packed.ids_T[None], position_ids=packed.positions_T[None]) if self.pre_process else None
        return self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=how)

    def plan(self, packed: Packed) -> Plan:
        """What the attention of every layer needs of this micro-batch; rotary angles are those of the explicit positions."""
        positions_T = packed.positions_T.float()
        if self.rotary_pos_emb.seq_len_interpolation_factor is not None:
            positions_T = positions_T / self.rotary_pos_emb.seq_len_interpolation_factor
        angles_TD = torch.outer(positions_T, self.rotary_pos_emb.inv_freq)[:, None, None]
        dtype = self.config.params_dtype
        groups = max(1, self.config.num_query_groups // self.config.tensor_model_parallel_size)
        ratio = self.config.num_attention_heads // self.config.tensor_model_parallel_size // groups
        return plan(packed.segments, angles_TD.cos().to(dtype), angles_TD.sin().to(dtype), ratio, dtype)

    @property
    def head_weight(self) -> Tensor:
        """The head's rows of this tensor rank, [V, H]; the embedding itself where the two are tied."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight


class PackedLayer(TransformerLayer):
    """A pre-norm layer: x + attention(norm x), then x + MLP(norm x)."""

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Plan, **kwargs: Any) -> tuple[Tensor, None]:
        attended, _ = self.self_attention(self.input_layernorm(hidden_states), packed_seq_params)
        hidden_states = hidden_states + attended
        return hidden_states + self.feed_forward(self.pre_mlp_layernorm(hidden_states)), None

    def feed_forward(self, x: Tensor) -> Tensor:
        """The gated MLP, or whatever else the family has in its place (experts)."""
        if type(self.mlp) is not MLP:
            return self.mlp(x)[0]
        gate_up, _ = self.mlp.linear_fc1(x)
        return self.mlp.linear_fc2(SwiGLU.apply(gate_up))[0]


class PackedAttention(SelfAttention):
    """Megatron's query, key and value projections around packed attention with explicit positions."""

    def forward(self, hidden_states: Tensor, how: Plan, **unused: Any) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.project(hidden_states, how)
        context = self.core_attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), how)
        return self.linear_proj(context[:, None])

    def project(self, hidden_states: Tensor, how: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [T, K, R, D] and key [T, K, D], and value [T, K, D], of this rank."""
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        ratio = self.num_attention_heads_per_partition // groups
        if self.q_layernorm is None and self.config.num_query_groups >= self.world_size:
            mixed = self.linear_qkv(hidden_states)[0].view(-1, groups, ratio + 2, size)
            turning, value = mixed.split((ratio + 1, 1), dim=2)
            query, key = Rotate.apply(turning, how.cos_T, how.sin_T).split((ratio, 1), dim=2)
            return query, key[:, :, 0], value[:, :, 0]
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query = query.reshape(len(query), groups, -1, size)
        return Rotate.apply(query, how.cos_T, how.sin_T), Rotate.apply(key[:, 0], how.cos_T[:, 0], how.sin_T[:, 0]), value[:, 0]


class CoreAttention(MegatronModule):
    """The attention proper, which has no weights."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else float(config.kv_channels) ** -0.5

    def forward(self, q_KTRD: Tensor, k_KTD: Tensor, v_KTD: Tensor, how: Plan) -> Tensor:
        return attend(q_KTRD, k_KTD, v_KTD, how, self.scale)


def current_layout() -> Layout:
    """Where this rank stands in Megatron's process groups."""
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )
