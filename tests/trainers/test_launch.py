"""What stands around a run: its first lines, what its folder records, and that wrong input told late leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcli.config.load import load
from rlcli.config.schema import DapoRecipe
from rlcli.errors import RunError, UserError
from rlcli.models.registry import read_model
from rlcli.platforms import allocator
from rlcli.runs.folder import RunFolder
from rlcli.trainers.launch import attended, new_run


@pytest.fixture
def loaded(tiny_model_factory: Callable[..., Path], tmp_path: Path):  # type: ignore[no-untyped-def]
    return load("dapo", None, [f"model={tiny_model_factory('qwen2')}", "data.train=rows.jsonl", f"run.dir={tmp_path}", "run.name=run"])


@pytest.mark.parametrize(("libraries", "said"), [([], allocator.NOT_FOUND), (["/lib/libtcmalloc.so"], "/lib/libtcmalloc.so")])
def test_a_run_says_and_records_its_allocator(
    loaded, libraries: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]  # type: ignore[no-untyped-def]
) -> None:
    monkeypatch.setattr(allocator, "candidates", lambda: libraries)
    monkeypatch.setattr(allocator, "trial", lambda library: None)
    config: DapoRecipe = loaded.dapo
    spec = read_model(config.model)
    with new_run(loaded, config, spec) as run, attended(config, run):
        pass
    assert capsys.readouterr().out.splitlines()[:2] == [f"run folder {run.path}", f"allocator of the workers: {said}"]
    (start,) = json.loads((run.path / "environment.json").read_text())
    assert start["allocator"] == said


def test_input_found_wrong_before_the_first_step_leaves_no_folder(loaded) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="no good"), new_run(loaded, loaded.dapo, read_model(loaded.dapo.model)) as run:
        raise UserError("no good")
    assert not run.path.exists()


def test_a_failure_keeps_the_folder_and_says_what_there_is_to_go_on_from(loaded) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RunError) as caught, new_run(loaded, loaded.dapo, read_model(loaded.dapo.model)) as run, attended(loaded.dapo, run):
        raise RunError("step 1, rollout: it broke")
    assert str(caught.value).splitlines() == ["step 1, rollout: it broke", "there is no checkpoint yet: start again"]
    assert json.loads((run.path / "run.json").read_text())["state"] == "failed"
    assert isinstance(run, RunFolder)


@pytest.mark.parametrize("module", ["rlcli.trainers.launch", "rlcli.trainers.launch_dpo", "rlcli.trainers.resume"])
def test_settings_are_checked_without_torch_and_ray(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
