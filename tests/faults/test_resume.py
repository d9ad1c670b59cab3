"""What `msrl resume` refuses, and what it takes: all decided before anything starts, from a finished run's folder or a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whole_runs import Finished, checkpoints_of, finish, rows_of, steps_of, weights_of

from rlcli.app import main
from rlcli.checkpoint.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


class Copy:
    """A copy of the finished run, lying elsewhere, and what `msrl resume` says to it."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self.capsys = run, capsys

    def refused(self, *args: str, path: Path | None = None) -> str:
        """The one line of a refusal; nothing in the folder changes."""
        self.capsys.readouterr()
        before = {file: file.stat().st_mtime_ns for file in self.run.rglob("*") if file.is_file()}
        with pytest.raises(SystemExit) as ended:
            main(["resume", "--ckpt", str(path or self.run), *args])
        error = self.capsys.readouterr().err
        assert ended.value.code == 2, error
        assert {file: file.stat().st_mtime_ns for file in self.run.rglob("*") if file.is_file()} == before
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, error
        return lines[0].removeprefix("error: ")


@pytest.fixture
def copy(undisturbed: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Copy:
    return Copy(Path(shutil.copytree(undisturbed.run, tmp_path / "elsewhere")), capsys)


def test_a_finished_run_says_so(copy: Copy) -> None:
    for path in (copy.run, copy.run / "checkpoints", checkpoints_of(copy.run)[-1]):
        with pytest.raises(SystemExit) as ended:
            main(["resume", "--ckpt", str(path)])
        assert ended.value.code in (0, None)
        assert "finished, all 16 steps are done; to go on, give more" in copy.capsys.readouterr().out


UNSAFE = ["train.seed=4", "train.dtype=bfloat16", "rollout.samples_per_prompt=8", "data.max_prompt_tokens=90", "data.shuffle=false"]


@pytest.mark.parametrize("override", UNSAFE)
def test_what_would_make_another_run_of_it_is_refused_by_name(copy: Copy, override: str) -> None:
    line = copy.refused("train.steps=20", override)
    assert line.startswith(f"{override} cannot be changed when resuming (the checkpoint was made with ")
    assert "start a new run" in line


def test_unknown_settings_and_impossible_layouts_are_refused(copy: Copy) -> None:
    assert "did you mean train.steps?" in copy.refused("train.stepz=20")
    assert copy.refused("train.steps=20", "parallel.devices=3", "parallel.tensor=3").startswith("parallel.tensor=3 does not divide")


def test_other_data_is_refused_with_the_remedy(copy: Copy, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Something else.", "answer": "1"}\n')
    line = copy.refused("train.steps=20", f"data.train={rows}")
    assert f"the training data {rows} is not the one that the checkpoint was made with" in line
    assert "--allow-data-change" in line


def test_another_model_and_another_tokenizer_are_refused(copy: Copy, tiny_model_factory: Callable[..., Path], undisturbed: Finished, tmp_path: Path) -> None:
    line = copy.refused("train.steps=20", f"model={tiny_model_factory('qwen2', layers=3)}")
    assert "is not the one that the checkpoint was made with (its tensors have other names or shapes, config.json): give the same one as model=DIR" in line
    model = Path(shutil.copytree(undisturbed.model, tmp_path / "other-tokenizer"))
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|im_over|>"))
    assert "is not the one that the checkpoint was made with (tokenizer.json)" in copy.refused("train.steps=20", f"model={model}")


@pytest.mark.parametrize(("file", "change", "words"), [
    ("config.json", {"rms_norm_eps": 1e-3}, "(config.json)"),
    ("config.json", {"eos_token_id": 7}, "(config.json, the tokens that end a response)"),
    ("generation_config.json", {"eos_token_id": [7, 258]}, "(the tokens that end a response)"),
])
def test_a_model_of_the_same_shapes_that_computes_or_ends_otherwise_is_refused(
    copy: Copy, undisturbed: Finished, tmp_path: Path, file: str, change: dict[str, object], words: str
) -> None:
    model = Path(shutil.copytree(undisturbed.model, tmp_path / "other"))
    (model / file).write_text(json.dumps({**json.loads((model / file).read_text()), **change}))
    assert f"is not the one that the checkpoint was made with {words}: give the same one" in copy.refused("train.steps=20", f"model={model}")


def test_another_chat_template_is_another_data_set(copy: Copy, undisturbed: Finished, tmp_path: Path) -> None:
    model = Path(shutil.copytree(undisturbed.model, tmp_path / "other"))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_end|> "))
    line = copy.refused("train.steps=20", f"model={model}")
    assert "is not the one that the checkpoint was made with: give the same rows" in line
    assert "with the chat template of then" in line


def test_a_damaged_checkpoint_that_was_named_is_refused(copy: Copy) -> None:
    newest = checkpoints_of(copy.run)[-1]
    file = next(newest.rglob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-5])
    line = copy.refused(path=newest)
    assert "this checkpoint is damaged" in line
    assert file.name in line
    assert f"give {newest.parent} to take the newest good one" in line


def test_no_whole_checkpoint_at_all(copy: Copy) -> None:
    for path in checkpoints_of(copy.run):
        (path / "sampler.json").unlink()
    line = copy.refused()
    assert "no checkpoint is whole" in line
    assert "sampler.json is missing" in line


def test_a_newer_manifest_asks_for_an_upgrade(copy: Copy) -> None:
    for path in checkpoints_of(copy.run):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    line = copy.refused()
    assert "written by a newer msrl" in line
    assert "upgrade msrl" in line


@pytest.fixture
def writer(copy: Copy) -> Iterator[None]:
    """Another run at work in the folder."""
    import fcntl
    import os

    handle = os.open(copy.run / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
    os.close(handle)


def test_two_runs_in_one_folder_are_refused(copy: Copy, writer: None) -> None:
    assert "is in use by another run" in copy.refused("train.steps=20")


def test_a_run_ended_while_it_wrote_its_model_writes_it_when_resumed_and_can_be_made_longer(copy: Copy, undisturbed: Finished, tmp_path: Path) -> None:
    """In a folder that was copied elsewhere, with its data moved: the exported model comes back, and two more steps replace it."""
    shutil.rmtree(copy.run / "final")
    rows = Path(shutil.copy(undisturbed.run.parent.parent / "train.jsonl", tmp_path / "moved.jsonl"))
    finish("resume", "--ckpt", str(copy.run), f"data.train={rows}", "data.eval=null")
    ours, theirs = weights_of(copy.run / "final"), weights_of(undisturbed.run / "final")
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert steps_of(copy.run) == steps_of(undisturbed.run)
    finish("resume", "--ckpt", str(copy.run), "train.steps=18", f"data.train={rows}", "checkpoint.keep_last=1", "checkpoint.keep_every=17")
    longer = weights_of(copy.run / "final")
    assert any(longer[name].tobytes() != theirs[name].tobytes() for name in theirs)
    assert [row["step"] for row in steps_of(copy.run)] == list(range(1, 19))
    assert [path.name for path in checkpoints_of(copy.run)] == ["step-00000017", "step-00000018"]
    assert not list(copy.run.glob(".final*"))
    with Store(copy.run / "checkpoints") as store:  # nobody holds it any more
        assert store.latest() is not None


def test_new_data_may_be_allowed(undisturbed: Finished, tmp_path: Path, copy: Copy) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Another prompt {number}.", "answer": "1"}) + "\n" for number in range(5)))
    finish("resume", "--ckpt", str(copy.run), "train.steps=17", f"data.train={rows}", "data.eval=null", "--allow-data-change")
    assert steps_of(copy.run)[-1]["step"] == 17
    last = [row for row in rows_of(copy.run / "samples" / "train.jsonl") if row["step"] == 17]
    assert last
