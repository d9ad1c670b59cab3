"""The weight tables alone: shards made of HF tensors and laid back, at any layout, without processes."""

from pathlib import Path

import pytest
import torch

from rlcli.errors import UserError
from rlcli.models.layout import Layout, ranks
from rlcli.models.megatron import check_layout, local_rules, padded_vocab
from rlcli.models.registry import read_config
from rlcli.models.rules import Rule, Segment, Source, join, lay

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
    "vocab_size": 37, "max_position_embeddings": 64, "tie_word_embeddings": True,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 2}


def model(name: str, **changes):
    return read_config({**CONFIG, "architectures": [name], **changes}, Path("m"))


def hf_weights(spec) -> dict[str, torch.Tensor]:
    shapes = {s.name: s.shape for rule in spec.rules for s in rule.sources}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def reader(weights):
    return lambda name, axis, start, stop: weights[name] if axis is None else weights[name].narrow(axis, start, stop - start)


def test_qkv_is_interleaved_a_group():
    """2 groups of 2 heads of 1 row: q0 q1 k0 v0 | q2 q3 k1 v1, by hand."""
    rule = Rule("qkv", (Source("q", (4, 1)), Source("k", (2, 1)), Source("v", (2, 1))), 0, 0, "groups", (2, 1, 1))
    weights = {"q": torch.tensor([[0.0], [1], [2], [3]]), "k": torch.tensor([[10.0], [11]]), "v": torch.tensor([[20.0], [21]])}
    assert join(rule, 1, 0, reader(weights)).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert join(rule, 2, 1, reader(weights)).flatten().tolist() == [2, 3, 11, 21]
    assert join(rule, 4, 1, reader(weights)).flatten().tolist() == [10, 20]  # more ranks than groups: Megatron cuts the rows evenly


def test_gate_and_up_are_split_each_on_its_own():
    rule = Rule("fc1", (Source("gate", (4, 1)), Source("up", (4, 1))), 0, 0, "each")
    weights = {"gate": torch.tensor([[0.0], [1], [2], [3]]), "up": torch.tensor([[10.0], [11], [12], [13]])}
    assert join(rule, 1, 0, reader(weights)).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert join(rule, 2, 1, reader(weights)).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros_and_padding_is_dropped():
    rule = Rule("embedding", (Source("e", (3, 1)),), 0, "first", "padded")
    weights = {"e": torch.tensor([[1.0], [2], [3]])}
    assert rule.segments(2, 1) == [Segment(0, 2, 3), Segment(-1, 0, 1)]
    shards = [join(rule, 2, r, reader(weights)) for r in (0, 1)]
    assert shards[1].flatten().tolist() == [3, 0]
    assert torch.equal(lay(rule, shards)[0], weights["e"])
    assert join(rule, 5, 4, reader(weights)).flatten().tolist() == [0]  # a shard of padding alone


@pytest.mark.parametrize("layout", [
    Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(tensor=2, pipeline=2), Layout(tensor=4, pipeline=4), Layout(tensor=8),
    Layout(pipeline=2, virtual=2), Layout(pipeline=2, stages=(1, 3)),
], ids=lambda x: f"tp{x.tensor}pp{x.pipeline}vpp{x.virtual}{x.stages}")
@pytest.mark.parametrize(("name", "changes"), [
    ("LlamaForCausalLM", {}), ("Qwen2ForCausalLM", {"tie_word_embeddings": False}), ("Qwen3ForCausalLM", {}), ("MistralForCausalLM", {}),
    ("Qwen3MoeForCausalLM", MOE),
])
def test_round_trip_without_processes(name, changes, layout):
    """HF -> shards of every rank -> HF: each tensor comes back once, bit for bit, and each rank's parts are equal in size."""
    spec = model(name, **changes)
    check_layout(spec, layout)
    weights, shards, rules = hf_weights(spec), {}, {}
    for at in ranks(layout):
        for rule in local_rules(spec, at).values():
            parts, rank = at.split(rule.expert is not None)
            shard = join(rule, parts, rank, reader(weights))
            assert tuple(shard.shape) == rule.shape(parts)
            shards.setdefault(rule.name, {})[rank] = shard
            rules[rule.name] = rule
    back: dict[str, torch.Tensor] = {}
    for parameter, by_rank in shards.items():
        if not rules[parameter].copy:
            parts = [by_rank[r] for r in sorted(by_rank)] if rules[parameter].axis is not None else [by_rank[0]]
            tensors = dict(zip((s.name for s in rules[parameter].sources), lay(rules[parameter], parts), strict=True))
            assert not tensors.keys() & back.keys()
            back |= tensors
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[n], weights[n]) for n in weights)


def test_experts_are_dealt_over_expert_ranks():
    spec = model("Qwen3MoeForCausalLM", **MOE)
    held = [sorted(r.expert for r in local_rules(spec, at).values() if r.expert is not None and r.place == 1) for at in ranks(Layout(expert=2))]
    assert held == [[0, 0, 1, 1], [2, 2, 3, 3]]
    names = [n for n in local_rules(spec, Layout(expert=2, expert_rank=1)) if "layers.1.mlp.experts" in n and "fc2" in n]
    assert names == [f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc2.weight" for e in (0, 1)]
    assert not any("experts" in n for n in local_rules(spec, Layout()) if "layers.0." in n)  # decoder_sparse_step=2: layer 0 is dense


def test_tied_head_is_a_copy_on_the_last_stage_alone():
    spec = model("LlamaForCausalLM")
    assert "output_layer.weight" not in local_rules(spec, Layout())
    last = local_rules(spec, Layout(pipeline=2, pipeline_rank=1))["output_layer.weight"]
    assert last.copy
    assert last.sources[0].name == "model.embed_tokens.weight"


def test_padded_vocabulary():
    assert [padded_vocab(model("LlamaForCausalLM"), tp) for tp in (1, 2, 4)] == [37, 38, 40]


@pytest.mark.parametrize(("layout", "words"), [
    (Layout(tensor=3), "8 attention heads do not divide over tensor=3"),
    (Layout(pipeline=3), "4 layers do not divide over pipeline=3"),
    (Layout(pipeline=2, stages=(3, 2)), "as 3,2"),
    (Layout(expert=2), "has no experts"),
])
def test_layouts_that_cannot_be(layout, words):
    with pytest.raises(UserError, match=words):
        check_layout(model("LlamaForCausalLM"), layout)


def test_ffn_that_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"gate_proj.weight \[25, 16\].*tensor=2"):
        check_layout(model("LlamaForCausalLM", intermediate_size=25), Layout(tensor=2))


def test_what_a_silent_deepseek_v3_config_means(tmp_path):
    """The router's scale and groups as transformers' own configuration has them when the file does not say."""
    import transformers

    silent = {key: value for key, value in transformers.DeepseekV3Config().to_dict().items() if key not in ("n_group", "topk_group", "routed_scaling_factor")}
    spec = read_config({**silent, "architectures": ["DeepseekV3ForCausalLM"]}, tmp_path)
    meant = transformers.DeepseekV3Config()
    assert spec.transformer["moe_router_topk_scaling_factor"] == meant.routed_scaling_factor == 2.5
    assert spec.transformer["moe_router_num_groups"] == meant.n_group
    assert spec.transformer["moe_router_group_topk"] == meant.topk_group
