"""`msrl recipes`: what it prints, copies and imports."""

import pytest
import yaml
from typer.testing import CliRunner

from rlcli import app
from rlcli.config.load import load
from rlcli.config.mindspeed import VERIFIERS, recipe_text, translate
from rlcli.errors import UserError

OLD = {
    "defaults": [{"model": ["qwen25_7b"]}],
    "megatron_training": {
        "stage": "ray_dapo", "global-batch-size": 96, "tokenizer_name_or_path": "/models/m", "train_iters": 200, "save_interval": 50,
        "data_path": "./data", "split": "100,0,0", "no_shuffle": True, "use_fused_rmsnorm": True, "seed": 1,
    },
    "actor_config": {
        "micro_batch_size": 1, "tensor_model_parallel_size": 2, "lr": 2e-6, "lr_decay_style": "constant", "lr_warmup_fraction": 0.05,
        "bf16": True, "expert_model_parallel_size": 1, "load": "./ckpt", "weight_decay": 0.1,
    },
    "rl_config": {
        "clip_higher_enable": True, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "token_level_loss": True, "overlong_buffer_enable": True,
        "overlong_buffer": 512, "rollout_max_tokens": 8192, "filter_groups_enable": True, "filter_groups_train_batch_size": 32,
        "filter_groups_max_batches": 4, "mini_batch_size": 16, "max_prompt_length": 2048, "n_samples_per_prompt": 16,
        "verifier_function": ["acc_for_dapo", "made_up_acc"], "verifier_weight": [1.0, 0.5], "partial_rollout_max_split": 2, "lam": 0.9,
        "made_up": 1, "actor_resource": {"num_npus": 8}, "use_wandb": True, "wandb_project": "mine", "multi_turn_enable": False,
    },
    "generate_config": {"infer_tensor_parallel_size": 4, "max_num_seqs": 256, "gpu_memory_utilization": 0.5,
                        "sampling_config": {"max_tokens": 8192, "temperature": 1, "top_p": 1.0, "top_k": -1, "logprobs": 1}},
    "msprobe_config": {"msprobe": False},
}  # fmt: skip


def run(*args: str):
    return CliRunner().invoke(app.application(), ["recipes", *args], env={"COLUMNS": "200"})


def test_list_names_every_recipe_with_its_purpose():
    result = run("list")
    assert result.exit_code == 0
    for words in ("demo", "SmolLM2-135M-Instruct", "dapo_paper", "arXiv 2503.14476", "demo_dpo"):
        assert words in result.output


def test_show_prints_value_meaning_default_and_source():
    result = run("show", "demo", "train.steps=7")
    line = next(line for line in result.output.splitlines() if line.startswith("steps"))
    assert line.split()[:2] == ["steps", "7"]
    assert "steps of the run" in line
    assert "default 100; command line" in result.output
    assert "default 1e-06; recipe demo line" in result.output


def test_show_diff_names_only_what_differs_and_what_is_missing():
    result = run("show", "qwen3_8b", "--diff")
    shown = [line.split()[0] for line in result.output.splitlines()[1:] if line.strip()]
    assert "parallel.tensor" in shown
    assert "dapo.clip_low" not in shown
    assert shown[-2:] == ["model", "data.train"]


def test_show_yaml_is_a_recipe(tmp_path):
    (tmp_path / "all.yaml").write_text(run("show", "demo", "--yaml").output)
    assert load("dapo", str(tmp_path / "all.yaml"), []).config == load("dapo", "demo", []).config


def test_show_finds_the_kind_or_asks():
    assert "beta" in run("show", "demo_dpo").output
    assert isinstance(run("show", "qwen3_30b_a3b").exception, UserError)
    assert "beta" in run("show", "qwen3_30b_a3b", "--kind", "dpo").output
    assert run("show", "--kind", "dpo", "dpo.beta=3").exit_code == 0
    assert isinstance(run("show").exception, UserError)


def test_copy_keeps_the_text_and_replaces_nothing(tmp_path):
    mine = tmp_path / "mine.yaml"
    assert run("copy", "demo", str(mine)).exit_code == 0
    assert load("dapo", str(mine), []).config == load("dapo", "demo", []).config
    mine.write_text("# edited\n")
    assert isinstance(run("copy", "demo", str(mine)).exception, UserError)
    assert mine.read_text() == "# edited\n"
    assert run("copy", "demo", str(mine), "--force").exit_code == 0
    assert isinstance(run("copy", "demo", str(tmp_path / "mine")).exception, UserError)
    assert run("copy", "demo", str(tmp_path)).exit_code == 0
    assert (tmp_path / "demo.yaml").is_file()


def test_import_carries_over_what_has_a_counterpart():
    out = translate(OLD)
    assert out.kind == "dapo"
    assert out.settings == {
        "model": "/models/m",
        "train.steps": 200,
        "optim.lr": 2e-6,
        "optim.warmup_steps": 10,
        "parallel.tensor": 2,
        "parallel.devices": 8,
        "checkpoint.every": 50,
        "data.shuffle": False,
        "data.max_prompt_tokens": 2048,
        "rollout.samples_per_prompt": 16,
        "rollout.max_response_tokens": 8192,
        "rollout.tensor_parallel": 4,
        "rollout.engines": 2,
        "rollout.max_running_samples": 256,
        "train.mini_batch_prompts": 16,
        "train.micro_batch_tokens": 2048 + 8192,
        "dapo.clip_high": 0.3,
        "reward.overlong_buffer_tokens": 512,
        "sampling.max_batches": 4,
        "run.trackers": ["wandb"],
        "run.project": "mine",
    }


def test_import_accounts_for_every_setting_of_the_file():
    """Each setting is carried over, looked at on the way, or left out with a reason; none is lost."""
    out = translate(OLD)
    left = {key for keys in out.left_out.values() for key in keys}
    assert "rl_config.made_up" in left
    assert out.left_out["no counterpart"] == ["rl_config.made_up"]
    assert "rl_config.verifier_function: made_up_acc" in left
    assert out.left_out["samples are always finished within their step"] == ["rl_config.partial_rollout_max_split"]
    assert out.left_out["switched off, as in msrl"] == ["rl_config.multi_turn_enable"]
    assert {"megatron_training.data_path", "megatron_training.load", "generate_config.gpu_memory_utilization", "msprobe_config.msprobe"} <= left
    more = {**OLD, "rl_config": {**OLD["rl_config"], "another_one": 5}}
    assert "rl_config.another_one" in translate(more).left_out["no counterpart"]


def test_import_of_dpo():
    out = translate(
        {"megatron_training": {"stage": "dpo", "global_batch_size": 64, "seq_length": 4096, "dpo_loss_type": "ipo", "train_iters": 10, "pipeline_model_parallel_size": 8,
                               "tensor_model_parallel_size": 2, "lr": 5e-8, "lr_decay_style": "cosine"}}
    )  # fmt: skip
    assert out.kind == "dpo"
    assert out.settings == {
        "train.batch_pairs": 64, "data.max_tokens": 4096, "dpo.losses": ["ipo"], "train.steps": 10, "parallel.tensor": 2, "parallel.pipeline": 8,
        "parallel.devices": 16, "optim.lr": 5e-8, "optim.schedule": "cosine",
    }  # fmt: skip


def test_what_import_writes_is_a_valid_recipe(tmp_path):
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(OLD))
    result = run("import", str(tmp_path / "old.yaml"), str(tmp_path / "new.yaml"))
    assert result.exit_code == 0, result.exception
    assert "made_up" in result.output
    loaded = load("dapo", str(tmp_path / "new.yaml"), ["data.train=x"])
    assert loaded.config.rollout.max_response_tokens == 8192
    assert (tmp_path / "new.yaml").read_text() == recipe_text(translate(OLD), "old.yaml")


def test_import_refuses_what_it_cannot_mean(tmp_path):
    with pytest.raises(UserError, match="no MindSpeed-RL configuration"):
        translate({"train": {"steps": 3}})
    with pytest.raises(UserError, match="ray_ppo has no counterpart"):
        translate({"megatron_training": {"stage": "ray_ppo"}})
    with pytest.raises(UserError, match="needs a critic"):
        translate({"megatron_training": {"stage": "ray_dapo"}, "rl_config": {"adv_estimator": "gae"}})
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "is not valid YAML" in str(run("import", str(tmp_path / "bad.yaml")).exception)
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump({"megatron_training": {"stage": "ray_dapo", "lr": -1}}))
    assert "optim.lr must be" in str(run("import", str(tmp_path / "odd.yaml")).exception)


def test_verifiers_that_import_names_exist():
    from rlcli.rewards.verifiers import check_names

    names = sorted({new for new, _ in VERIFIERS.values()})
    check_names(names, [1.0] * len(names))
    assert len(VERIFIERS) == 10  # all that the predecessor has
    old = {**OLD, "rl_config": {**OLD["rl_config"], "verifier_function": ["acc", "strict_format"]}}
    assert translate(old).settings["reward.verifiers"] == ["acc", "strict_format"]
    assert translate(old).settings["reward.weights"] == [1.0, 0.5]
