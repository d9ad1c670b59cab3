"""What a user sees for wrong input of `msrl train dapo` and `msrl resume`: exit code 2, one clear line for each fault, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from whole_runs import tiny_recipe

from rlcli.app import main


class Complaints:
    """Runs `msrl` in this process and gives back the lines it complained with."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder

    def __call__(self, *args: str) -> list[str]:
        self.capsys.readouterr()  # what fixtures printed
        before = self.everything()
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        lines = self.capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2, lines
        assert all(line.startswith("error: ") for line in lines), lines
        assert all(len(line) < 500 for line in lines), lines
        assert self.everything() == before, "something was written"
        return [line.removeprefix("error: ") for line in lines]

    def everything(self) -> set[Path]:
        """All files and folders but those of prepared rows: good rows that were prepared stay so, whatever is wrong with the rest."""
        return {path for path in self.folder.rglob("*") if "data-cache" not in path.parts}


@pytest.fixture
def complaints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Complaints:
    return Complaints(capsys, tmp_path)


@pytest.fixture
def model(tiny_model_factory: Callable[..., Path], tmp_path: Path) -> Path:
    """A model's folder of one's own, to spoil."""
    return Path(shutil.copytree(tiny_model_factory("qwen2"), tmp_path / "model"))


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return tiny_recipe(tmp_path, model)


# override -> words of the one line that answers it
SETTINGS = {
    "train.stepz=3": ("train.stepz is not a setting", "did you mean train.steps?", "command line"),
    "train.steps=many": ("train.steps", "whole number", "many"),
    "train.steps=0": ("train.steps", "at least 1"),
    "dapo.aggregate=token_meen": ("dapo.aggregate", "token_mean", "token_meen"),
    "train": ("'train' is not an override", "key=value"),
    "train.mini_batch_prompts=3": ("train.batch_prompts=4 is not a multiple of train.mini_batch_prompts=3",),
    "reward.overlong_buffer_tokens=8": ("reward.overlong_buffer_tokens=8 must be less than rollout.max_response_tokens=8",),
    "rollout.samples_per_prompt=1": ("rollout.samples_per_prompt=1", "take 2 or more"),
    "train.micro_batch_tokens=50": ("train.micro_batch_tokens=50 cannot hold the longest sample", "raise it to at least 104"),
    "rollout.max_response_tokens=4096": ("longer than the model's 2048 positions",),
    "parallel.pipeline=3": ("parallel.pipeline=3",),
    "reward.verifiers=[mathh]": ("unknown verifier 'mathh'", "did you mean math?"),
    "reward.weights=[1.0,2.0]": ("reward.weights has 2 values for 1 verifiers",),
    "reward.options=[length.most=5]": ("reward.options", "length.most=5", "not in reward.verifiers"),
    "model=/nowhere/model": ("/nowhere/model: no such folder",),
    "data.train=/nowhere/rows.jsonl": ("/nowhere/rows.jsonl",),
    "data.eval=/nowhere/held-out.jsonl": ("/nowhere/held-out.jsonl",),
    "run.name=a/b": ("run.name='a/b' is no folder name",),
    "run.trackers=[wandbb]": ("wandbb",),
    "cluster.preload_allocator=/nowhere/lib.so": ("cluster.preload_allocator=/nowhere/lib.so", "no such file"),
}


@pytest.mark.parametrize("override", SETTINGS)
def test_a_wrong_setting(complaints: Complaints, recipe: Path, override: str) -> None:
    lines = complaints("train", "dapo", "--recipe", str(recipe), override)
    assert any(all(word in line for word in SETTINGS[override]) for line in lines), lines


def test_prompts_that_are_all_too_long(complaints: Complaints, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (line,) = complaints("train", "dapo", "--recipe", str(recipe), "data.max_prompt_tokens=5")
    assert line.endswith("none of its 6 rows has a prompt of at most 5 tokens: raise data.max_prompt_tokens")


def test_each_of_several_faults_has_its_line(complaints: Complaints, recipe: Path) -> None:
    lines = complaints("train", "dapo", "--recipe", str(recipe), "train.stepz=3", "optim.lr=fast", "rollout.top_p=2")
    assert len(lines) == 3
    assert [line.split()[0] for line in lines] == ["train.stepz", "optim.lr", "rollout.top_p"]


def test_tensor_parallel_that_does_not_divide_the_heads(complaints: Complaints, recipe: Path) -> None:
    (line,) = complaints("train", "dapo", "--recipe", str(recipe), "parallel.devices=3", "parallel.tensor=3")
    assert line == "parallel.tensor=3 does not divide the model's 4 attention heads: take one of 1, 2, 4"


def change_config(model: Path, **settings: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_an_architecture_that_is_not_supported(complaints: Complaints, recipe: Path, model: Path) -> None:
    change_config(model, architectures=["MambaForCausalLM"])
    (line,) = complaints("train", "dapo", "--recipe", str(recipe))
    assert "config.json: architecture MambaForCausalLM is not supported" in line
    assert "Qwen2ForCausalLM" in line


def test_a_rope_scaling_that_is_not_supported(complaints: Complaints, recipe: Path, model: Path) -> None:
    change_config(model, rope_parameters=None, rope_scaling={"rope_type": "longrope", "factor": 4.0})
    (line,) = complaints("train", "dapo", "--recipe", str(recipe))
    assert "config.json" in line
    assert "longrope" in line


def test_a_config_of_other_shapes(complaints: Complaints, recipe: Path, model: Path) -> None:
    change_config(model, intermediate_size=192)
    (line,) = complaints("train", "dapo", "--recipe", str(recipe))
    assert "mlp" in line
    assert "[256, 128]" in line
    assert "[192, 128]" in line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_lacks_a_file(complaints: Complaints, recipe: Path, model: Path, name: str) -> None:
    (model / name).unlink()
    (line,) = complaints("train", "dapo", "--recipe", str(recipe))
    assert str(model) in line
    assert name.rpartition(".")[2] in line


def test_truncated_weights(complaints: Complaints, recipe: Path, model: Path) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1000)
    (line,) = complaints("train", "dapo", "--recipe", str(recipe))
    assert line == f"{path}: truncated, {size - 1000} bytes where {size} are announced; fetch the file again"


ROWS = {
    "no prompt column": ('{"question_text": "2 + 2", "solution_text": "4"}\n', "question_text"),
    "no rows": ("", "empty"),
    "no JSON": ("prompt,answer\n2+2,4\n", "row 1"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_cannot_be_read(complaints: Complaints, recipe: Path, tmp_path: Path, kind: str) -> None:
    text, word = ROWS[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    lines = complaints("train", "dapo", "--recipe", str(recipe), f"data.train={path}")
    assert str(path) in lines[0]
    assert word in lines[0]


def test_a_recipe_that_is_not_there(complaints: Complaints) -> None:
    (line,) = complaints("train", "dapo", "--recipe", "demoo")
    assert "demoo" in line
    assert "demo" in line.replace("demoo", "")


def test_a_fault_in_a_recipe_names_its_line(complaints: Complaints, recipe: Path) -> None:
    settings = yaml.safe_load(recipe.read_text())
    text = yaml.safe_dump(settings, sort_keys=False) + "optim2:\n  lr: 1\n"
    recipe.write_text(text)
    (line,) = complaints("train", "dapo", "--recipe", str(recipe))
    assert "optim2" in line
    assert f"line {text.splitlines().index('optim2:') + 1}" in line or f"line {text.splitlines().index('optim2:') + 2}" in line


def test_a_name_that_is_taken(complaints: Complaints, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    complaints("train", "dapo", "--recipe", str(recipe), "train.stepz=1")
    before = complaints.everything()
    with pytest.raises(SystemExit):
        main(["train", "dapo", "--recipe", str(recipe)])
    text = complaints.capsys.readouterr().err
    assert "run.name=run" in text
    assert f"msrl resume --ckpt {tmp_path / 'runs' / 'run'}" in text
    assert complaints.everything() == before


def test_resume_of_what_is_no_checkpoint(complaints: Complaints, tmp_path: Path) -> None:
    (line,) = complaints("resume", "--ckpt", str(tmp_path / "missing"))
    assert "no such folder" in line
    (tmp_path / "empty").mkdir()
    (line,) = complaints("resume", "--ckpt", str(tmp_path / "empty"))
    assert "no complete checkpoint here" in line
