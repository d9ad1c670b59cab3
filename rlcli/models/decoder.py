"""The weight table that Llama and its kin share; a family adds or replaces what differs."""

from __future__ import annotations

from rlcli.models.rules import FIRST, LAST, Rule, Source
from rlcli.models.spec import ModelSpec


def ends(spec: ModelSpec) -> tuple[list[Rule], list[Rule]]:
    """(first, last): embedding; final norm and head. A tied head is a copy of the embedding, present where PP parts the two."""
    shape = (spec.vocab, spec.hidden)
    embedding = Source("model.embed_tokens.weight", shape)
    head = embedding if spec.tied else Source("lm_head.weight", shape)
    return (
        [Rule("embedding.word_embeddings.weight", (embedding,), 0, FIRST, "padded")],
        [
            Rule("decoder.final_layernorm.weight", (Source("model.norm.weight", (spec.hidden,)),), None, LAST),
            Rule("output_layer.weight", (head,), 0, LAST, "padded", copy=spec.tied),
        ],
    )


def attention(spec: ModelSpec, layer: int) -> list[Rule]:
    """Grouped-query attention: QKV interleaved a KV group, biases and q/k norms where the family has them."""
    mine, theirs = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    d, rows = spec.head_dim, (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim)
    unit = (spec.heads // spec.kv_heads * d, d, d)

    def qkv(kind: str, *rest: int) -> Rule:
        sources = tuple(Source(f"{theirs}{x}_proj.{kind}", (n, *rest)) for x, n in zip("qkv", rows, strict=True))
        return Rule(f"{mine}linear_qkv.{kind}", sources, 0, layer, "groups", unit)

    rules = [Rule(f"{mine}linear_proj.weight", (Source(f"{theirs}o_proj.weight", (spec.hidden, rows[0])),), 1, layer), qkv("weight", spec.hidden)]
    if spec.qkv_bias:
        rules.append(qkv("bias"))
    if spec.qk_norm:
        rules += [Rule(f"{mine}{x}_layernorm.weight", (Source(f"{theirs}{x}_norm.weight", (d,)),), None, layer) for x in "qk"]
    return rules


def norms(spec: ModelSpec, layer: int) -> list[Rule]:
    """The two norms of a layer."""
    pairs = (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm"))
    return [
        Rule(f"decoder.layers.{layer}.{mine}.weight", (Source(f"model.layers.{layer}.{theirs}.weight", (spec.hidden,)),), None, layer)
        for mine, theirs in pairs
    ]


def swiglu(spec: ModelSpec, layer: int, mine: str, theirs: str, ffn: int, expert: int | None = None) -> list[Rule]:
    """A gated MLP below prefix `mine` in Megatron and `theirs` in HF; gate and up are one matrix, each half sharded on its own."""
    mine, theirs = f"decoder.layers.{layer}.{mine}.", f"model.layers.{layer}.{theirs}."
    halves = tuple(Source(f"{theirs}{x}_proj.weight", (ffn, spec.hidden)) for x in ("gate", "up"))
    down = Source(f"{theirs}down_proj.weight", (spec.hidden, ffn))
    return [
        Rule(f"{mine}linear_fc1.weight", halves, 0, layer, "each", expert=expert),
        Rule(f"{mine}linear_fc2.weight", (down,), 1, layer, expert=expert),
    ]


def dense_table(spec: ModelSpec) -> list[Rule]:
    """Llama, Qwen2, Qwen3 and Mistral."""
    first, last = ends(spec)
    layers = [
        rule
        for layer in range(spec.layers)
        for rule in (*norms(spec, layer), *attention(spec, layer), *swiglu(spec, layer, "mlp", "mlp", spec.ffn))
    ]
    return first + layers + last
