"""The sizes of a model that plans are made of, from what its config.json says. `rlcli.models` reads it, and judges whether it is supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcli.errors import UserError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder. `ffn` is a dense layer's, `expert_ffn` one expert's; `moe_layers` of the `layers` have `experts` instead of one MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    attention_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    moe_layers: int = 0

    def attention_parameters(self, tensor: int = 1) -> int:
        """Parameters of one layer's attention on one of `tensor` devices; key and value heads fewer than devices are held more than once."""
        queries = self.heads // tensor * self.head_dim
        keys = max(self.kv_heads // tensor, 1) * self.head_dim
        bias = queries + 2 * keys if self.attention_bias else 0
        norms = 2 * self.head_dim if self.qk_norm else 0
        return self.hidden * (2 * queries + 2 * keys) + bias + norms

    def mlp_parameters(self, tensor: int = 1) -> tuple[int, int]:
        """(dense, mixture): parameters of one layer's MLP on one of `tensor` devices; the router is held whole."""
        mixture = self.hidden * self.experts + 3 * self.hidden * self.expert_ffn * self.experts // tensor
        return 3 * self.hidden * self.ffn // tensor, mixture

    def parameters(self, tensor: int = 1, pipeline: int = 1) -> int:
        """Parameters on the fullest of tensor x pipeline devices; with both 1, of the whole model (a tied head counted once)."""
        dense, mixture = self.mlp_parameters(tensor)
        layers = self.layers // pipeline
        moe = min(self.moe_layers, layers)
        body = layers * (self.attention_parameters(tensor) + 2 * self.hidden) + (layers - moe) * dense + moe * mixture
        table = -(-self.vocab // tensor) * self.hidden
        ends = table + self.hidden  # of one stage: the embedding, or the head and the last norm
        if pipeline == 1 and not self.tied:
            ends += table
        return body + ends

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it is not sent to."""
        idle = self.moe_layers * 3 * self.hidden * self.expert_ffn * (self.experts - self.experts_per_token)
        return self.parameters() - idle


def from_config(config: dict[str, Any], where: str) -> Architecture:
    """The sizes in the content of a config.json; `where` it lies is for messages. Raises UserError where a size is missing."""

    def size(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
            raise UserError(f"{where}: {names[0]} is {'missing' if value is None else repr(value)}; a positive whole number is needed")
        return value

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    kind = str(config.get("model_type", ""))
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    sparse = [n for n in range(layers) if (n + 1) % size("decoder_sparse_step", default=1) == 0]
    dense = set(config.get("mlp_only_layers") or []) | set(range(size("first_k_dense_replace", default=0)))
    expert_ffn = size("moe_intermediate_size", "intermediate_size") if experts else 0
    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        ffn=size("intermediate_size", default=expert_ffn or None),
        vocab=size("vocab_size"),
        positions=size("max_position_embeddings", default=2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=kind.startswith("qwen3"),
        experts=experts,
        experts_per_token=size("num_experts_per_tok", default=1) if experts else 0,
        expert_ffn=expert_ffn,
        moe_layers=len([n for n in sparse if n not in dense]) if experts else 0,
    )
