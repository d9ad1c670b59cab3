"""Arithmetic of plans, checked against figures worked out by hand."""

import pytest
from rich.console import Console

from rlcli.config import architecture, memory
from rlcli.config.check import check, devices_needed, require
from rlcli.config.load import load
from rlcli.config.plan import Counts, plan
from rlcli.config.steps import pair_steps, trained_pairs
from rlcli.errors import UserError

# hidden 64, 4 heads of 32 (2 key-value), 2 layers, MLP of 128, vocabulary 256.
#   attention 64*(2*128 + 2*64) = 24,576; MLP 3*64*128 = 24,576; norms 2*64 = 128: 49,280 a layer
#   two layers 98,560 + last norm 64 + embedding 256*64 = 16,384: 115,008 with a tied head, 131,392 without
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def tiny(**changes):
    return architecture.from_config({**TINY, **changes}, "config.json")


def dapo(*overrides: str):
    given = ["model=/m", "data.train=x", "data.max_prompt_tokens=32", "rollout.max_response_tokens=16"]
    return load("dapo", None, [*given, *overrides]).config


def dpo(*overrides: str):
    return load("dpo", None, ["model=/m", "data.train=x", *overrides]).config


def test_parameters_by_hand():
    assert tiny().parameters() == 115_008
    assert tiny(tie_word_embeddings=False).parameters() == 131_392
    # over two devices: attention 64*(2*64 + 2*32) = 12,288, MLP 12,288, norms 128; half of the embedding
    assert tiny().parameters(tensor=2) == 2 * (12_288 + 12_288 + 128) + 64 + 8_192
    # one layer and one end a stage
    assert tiny().parameters(pipeline=2) == 49_280 + 16_384 + 64
    # biases of query, key, value: 128 + 2*64; norms of query and key: 2*32
    assert tiny(model_type="qwen2").parameters() == 115_008 + 2 * 256
    assert tiny(model_type="qwen3").parameters() == 115_008 + 2 * 64
    # 4 key-value devices for 2 heads: each head is held twice
    assert tiny().attention_parameters(tensor=4) == 64 * (2 * 32 + 2 * 32)


def test_parameters_of_a_mixture_by_hand():
    model = tiny(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0])
    layer = 24_576 + 128 + 64  # attention, norms, query and key norms
    expert = 3 * 64 * 32
    assert model.moe_layers == 1
    assert model.parameters() == 2 * layer + 24_576 + (64 * 4 + 4 * expert) + 64 + 16_384
    assert model.parameters() - model.active_parameters == 2 * expert


def test_published_sizes():
    qwen = {"model_type": "qwen2", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 64,
            "intermediate_size": 27648, "vocab_size": 152064}  # fmt: skip
    assert architecture.from_config(qwen, "").parameters() == 32_763_876_352  # Qwen2.5-32B: 32.8 B
    moe = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48,
           "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}  # fmt: skip
    assert architecture.from_config(moe, "").parameters() == 30_532_122_624  # Qwen3-30B-A3B: 30.5 B


def test_sizes_agree_with_the_weight_tables_of_the_models(tmp_path):
    """The same parameters counted tensor by tensor by `rlcli.models`, for every family and layout."""
    from rlcli.models.layout import Layout, ranks
    from rlcli.models.megatron import local_rules
    from rlcli.models.registry import read_config

    families = [
        ("LlamaForCausalLM", {"model_type": "llama"}),
        ("Qwen2ForCausalLM", {"model_type": "qwen2", "tie_word_embeddings": False}),
        ("Qwen3ForCausalLM", {"model_type": "qwen3"}),
        ("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    ]
    for name, changes in families:
        config = {**TINY, "hidden_act": "silu", "rms_norm_eps": 1e-6, "architectures": [name], **changes}
        spec, sizes = read_config(config, tmp_path), architecture.from_config(config, "")
        for tensor, pipeline in [(1, 1), (2, 1), (1, 2), (2, 2)]:
            layout = Layout(tensor=tensor, pipeline=pipeline, expert_tensor=tensor)
            held = []
            for rank in ranks(layout):
                shapes = [rule.shape(rank.split(rule.expert is not None)[0]) for rule in local_rules(spec, rank).values()]
                held.append(sum(_product(shape) for shape in shapes))
            assert max(held) == sizes.parameters(tensor, pipeline), (name, tensor, pipeline)


def _product(shape):
    number = 1
    for size in shape:
        number *= size
    return number


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.batch_prompts=10", "train.mini_batch_prompts=4"], "train.batch_prompts=10 is not a multiple of train.mini_batch_prompts=4"),
        (["train.mini_batch_prompts=64"], "train.batch_prompts=32 is not a multiple of train.mini_batch_prompts=64"),
        (["parallel.devices=6", "parallel.tensor=2", "parallel.pipeline=2"], "2 x 2 = 4: take 4 devices"),
        (["parallel.tensor=2"], "parallel.devices=1 is not a multiple of parallel.tensor x parallel.pipeline = 2 x 1 = 2: take 2 devices"),
        (["reward.overlong_buffer_tokens=16"], "reward.overlong_buffer_tokens=16 must be less than rollout.max_response_tokens=16"),
        (["reward.weights=[1,2]"], "reward.verifiers has 1 names and reward.weights 2 numbers"),
        (["reward.weights=[]", "reward.verifiers=[]"], "reward.verifiers is empty"),
        (["train.micro_batch_tokens=47"], "raise it to at least 48"),
        (["rollout.samples_per_prompt=1"], "with one they are all 0"),
        (["optim.schedule=cosine", "optim.min_lr=1"], "optim.min_lr=1 is above optim.lr=1e-06"),
        (["checkpoint.keep_best=eval/accuracy"], "needs an evaluation: give data.eval"),
    ],
)
def test_dapo_arithmetic_that_cannot_work(overrides, part):
    faults = check(dapo(*overrides))
    assert len(faults) == 1
    assert part in faults[0]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["dpo.losses=[sigmoid,hinge]"], "dpo.losses has 2 names and dpo.weights 1 numbers"),
        (["data.max_prompt_tokens=1024"], "leaves no token for an answer in data.max_tokens=1024"),
        (["train.micro_batch_tokens=2047"], "2 x data.max_tokens = 2048"),
    ],
)
def test_dpo_arithmetic_that_cannot_work(overrides, part):
    faults = check(dpo(*overrides))
    assert len(faults) == 1
    assert part in faults[0]


@pytest.mark.parametrize(
    ("overrides", "changes", "part"),
    [
        (["rollout.max_response_tokens=481"], {}, "= 513 is longer than the model's 512 positions"),
        (["parallel.tensor=3", "parallel.devices=3"], {}, "parallel.tensor=3 does not divide the model's 4 attention heads: take one of 1, 2, 4"),
        (["parallel.pipeline=3", "parallel.devices=3"], {}, "parallel.pipeline=3 does not divide the model's 2 layers: take one of 1, 2"),
        (["rollout.tensor_parallel=3"], {}, "rollout.tensor_parallel=3 does not divide the model's 4 attention heads"),
        (["rollout.tensor_parallel=2"], {"num_attention_heads": 6, "num_key_value_heads": 3}, "neither divides the model's 3 key-value heads nor"),
        (["rollout.tensor_parallel=4"], {"intermediate_size": 130}, "does not divide the width 130"),
        ([], {"head_dim": 16}, "have 16 dimensions: vLLM's attention on a CPU needs 32 or more"),
    ],
)
def test_model_and_recipe_that_do_not_fit(overrides, changes, part):
    config = dapo(*overrides)
    assert check(config) == []
    faults = check(config, tiny(**changes), platform="cpu")
    assert len(faults) == 1
    assert part in faults[0]
    with pytest.raises(UserError, match=r".") as caught:
        require(config, tiny(**changes), platform="cpu")
    assert caught.value.exit_code == 2


def test_edges_that_do_work():
    assert check(dapo("rollout.max_response_tokens=480", "train.micro_batch_tokens=512"), tiny(), platform="cpu") == []
    assert check(dapo("reward.overlong_buffer_tokens=15")) == []
    assert check(dapo(), tiny(head_dim=16), platform="other") == []
    assert check(dapo("rollout.tensor_parallel=4"), tiny(), platform="cpu") == []  # 4 devices for 2 key-value heads: each held twice
    assert check(dpo("train.micro_batch_tokens=2048")) == []


def test_devices_that_are_short():
    config = dapo("parallel.devices=2", "rollout.engines=2", "rollout.tensor_parallel=2")
    assert devices_needed(config) == 4
    assert check(config, devices=4) == []
    assert check(config, devices=1) == [
        "the run needs 4 devices (parallel.devices=2, in turn with rollout.engines x rollout.tensor_parallel = 2 x 2), but there is 1"
    ]
    assert check(config, platform="cpu", devices=1) == []  # processes share a CPU's cores


def test_memory_of_training_by_hand():
    config = dapo("parallel.devices=2", "train.batch_prompts=4", "rollout.samples_per_prompt=2", "train.micro_batch_tokens=100", "train.head_chunk_tokens=50")
    items = {item.name: item.bytes for item in memory.training(config, tiny())}
    # 4 prompts a update of 32 + 2*16 tokens over 2 ranks: 128 tokens, but never more than 100
    assert memory.update_tokens(config) == 4 * 64
    assert memory.forward_tokens(config) == 100
    # a layer keeps 4*64 + 4*128 + 3*64 + 3*128 = 1,344 numbers a token
    assert memory.layer_activation(tiny(), 1) == 1344
    assert items == {
        "weights": 115_008 * 2,
        "gradients": 115_008 * 4,
        "optimizer": 115_008 * 8 // 2,
        "master weights": 115_008 * 4 // 2,
        "activations": 100 * 2 * 1344 * 2,
        "logits": 3 * 50 * 256 * 4,
    }
    whole = {item.name: item.bytes for item in memory.training(dapo("train.dtype=float32", "train.recompute=true"), tiny())}
    assert "master weights" not in whole
    assert whole["weights"] == 115_008 * 4
    assert whole["activations"] == memory.forward_tokens(dapo()) * (2 * 64 * 4 + 1344 * 4)


def test_prefix_sharing_saves_prompt_tokens():
    assert memory.update_tokens(dapo("train.prefix_sharing=off")) == 32 * 8 * 48
    assert memory.update_tokens(dapo("train.prefix_sharing=on")) == 32 * (32 + 8 * 16)
    assert memory.update_tokens(dpo("train.batch_pairs=3")) == 3 * 2 * 1024


def test_cache_of_the_rollout_engine_is_what_the_engine_asks_for(tmp_path):
    from rlcli.engines.rollout_setup import cache_bytes
    from rlcli.models.registry import read_config

    spec = read_config({**TINY, "hidden_act": "silu"}, tmp_path)
    for config in (dapo(), dapo("rollout.max_response_tokens=400", "rollout.max_running_samples=1000", "rollout.tensor_parallel=2", "rollout.dtype=float32")):
        estimate = {item.name: item.bytes for item in memory.rollout(config, tiny())}["key-value cache"]
        size = 4 if config.rollout.dtype == "float32" else 2
        assert estimate == cache_bytes(spec, config.rollout, config.data.max_prompt_tokens, size, memory.CACHE_BLOCK_TOKENS, free=1 << 50)
    capped = {item.name: item for item in memory.rollout(config, tiny(), room=1000)}["key-value cache"]
    assert capped.bytes == 1000
    assert "fewer samples run at once" in capped.how


def test_a_plan_says_what_a_step_does():
    config = dapo(
        "train.batch_prompts=8", "train.mini_batch_prompts=4", "dapo.epochs=2", "train.steps=5", "rollout.samples_per_prompt=4", "parallel.devices=2"
    )
    shown = plan(config, tiny(), Counts(rows=20, platform="cpu", memory=8 << 30)).to_dict()
    step = shown["One step"]
    assert step["trained on"] == ("8 prompts", "x 4 samples = 32 samples of at most 16 tokens")
    assert step["updates"] == ("4", "2 epochs x 8 / 4 prompts, each on 16 samples")
    assert step["whole run"] == ("5 steps", "40 prompts trained on, 20 updates")
    assert step["training data"] == ("20 prompts", "2.5 steps an epoch, so 2.00 epochs if each is used once")
    assert shown["Layout"]["training"] == ("2 processes", "2 data x 1 tensor x 1 pipeline parallel")
    assert shown["Layout"]["per device"][0] == "2 prompts an update"
    assert shown["Memory of this machine"]["machine"] == ("8.00 GiB", "enough")


def test_a_plan_of_pairs():
    config = dpo("train.batch_pairs=10", "train.epochs=2")
    shown = plan(config, None, Counts(rows=100)).to_dict()
    assert shown["One step"]["whole run"] == ("20 steps", "200 pairs (2 epochs)")
    uneven = plan(config, None, Counts(rows=101)).to_dict()["One step"]
    assert uneven["whole run"] == ("21 steps", "202 pairs (2 epochs)")  # the last update takes two
    assert uneven["training data"] == ("101 pairs", "10.1 steps an epoch, so 2.00 epochs if each is used once")
    assert plan(dpo("train.steps=7", "train.batch_pairs=10"), None, Counts()).to_dict()["One step"]["whole run"] == ("7 steps", "70 pairs")
    assert "Memory of a training device, at its peak" not in shown


def test_sums_are_the_sums_of_what_is_shown():
    items = memory.training(dapo(), tiny())
    assert memory.total(items) == sum(item.bytes for item in items)
    shown = plan(dapo(), tiny(), Counts(memory=1 << 20, devices=1)).to_dict()
    assert shown["Memory of a training device, at its peak"]["together"][0] == memory.size(memory.total(items))
    assert shown["Memory of a rollout device"]["device"][1] == "not enough"


@pytest.mark.parametrize(
    ("overrides", "rows", "part"),
    [
        (["rollout.top_p=0.9"], None, "importance ratios are then biased"),
        (["eval.every=5"], None, "data.eval is not set"),
        (["optim.warmup_steps=100"], None, "the full learning rate is never reached"),
        (["parallel.devices=64"], None, "some ranks may have nothing to do"),
        (["parallel.devices=5"], None, "does not divide over 5 data parallel ranks"),
        ([], 31, "the data has 31 rows, fewer than one update takes (32)"),
    ],
)
def test_what_works_but_is_seldom_meant_is_noted(overrides, rows, part):
    clean = plan(dapo(), None, Counts(rows=32)).warnings
    assert clean == []
    noted = plan(dapo(*overrides), None, Counts(rows=rows)).warnings
    assert any(part in line for line in noted)


@pytest.mark.parametrize(
    ("epochs", "rows", "pairs", "steps"),
    [(1, 320, 320, 10), (1, 321, 321, 11), (0.07, 100, 7, 1), (1.28, 25, 32, 1), (0.01, 10, 1, 1), (3, 3, 9, 1), (0.1, 320, 32, 1), (0.3, 320, 96, 3)],
)
def test_steps_of_epochs_by_hand(epochs, rows, pairs, steps):
    """32 pairs an update. 0.07 x 100 is 7.000000000000001 in floating point."""
    config = dpo(f"train.epochs={epochs}")
    assert (trained_pairs(config, rows), pair_steps(config, rows)) == (pairs, steps)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.epochs=1"], None),  # the only update takes the 20 pairs there are
        (["train.epochs=1.5"], "20 rows, fewer than one update takes (30)"),
        (["train.epochs=9"], "20 rows, fewer than one update takes (32)"),
        (["train.steps=1"], "20 rows, fewer than one update takes (32)"),
        (["eval.every=5"], "data.eval is not set"),
    ],
)
def test_what_is_seldom_meant_with_pairs_is_noted(overrides, part):
    """Twenty pairs repeat within an update only where it goes beyond an epoch."""
    noted = plan(dpo(*overrides), None, Counts(rows=20)).warnings
    assert noted == [] if part is None else any(part in line for line in noted)


def test_a_plan_prints():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan(dapo("rollout.top_p=0.9"), tiny(), Counts(rows=320, platform="cpu", memory=24 << 30)).render())
    text = console.export_text()
    assert "Memory of a training device" in text
    assert "note  rollout.top_p" in text


def test_a_size_that_is_missing_is_named():
    with pytest.raises(UserError, match=r"config\.json: num_hidden_layers is missing"):
        tiny(num_hidden_layers=None)
