"""`msrl ckpt` on what a training run left: its checkpoints hold the model and the optimizer, in boxes, as Megatron's ranks wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_runs import Finished, checkpoints_of, weights_of

from rlcli.app import main

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture
def msrl(capsys: pytest.CaptureFixture[str]):
    """Runs `msrl ckpt ...`: exit code and all that was printed."""

    def run(*args: object) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["ckpt", *map(str, args)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return run


def test_a_checkpoint_becomes_the_model_that_the_run_exported(undisturbed: Finished, msrl, tmp_path: Path) -> None:
    newest = checkpoints_of(undisturbed.run)[-1]
    code, text = msrl("convert", "--from", "mcore", "--to", "hf", "--load", newest, "--save", tmp_path / "hf")
    assert code == 0, text
    assert "equal bit for bit" in text
    ours, theirs = weights_of(tmp_path / "hf"), weights_of(undisturbed.run / "final")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    for name in ("tokenizer.json", "config.json"):
        assert (tmp_path / "hf" / name).is_file()
    earlier = checkpoints_of(undisturbed.run)[0]
    assert msrl("convert", "--to", "mcore", "--tp", 2, "--load", earlier, "--save", tmp_path / "mcore")[0] == 0
    assert msrl("convert", "--to", "hf", "--load", tmp_path / "mcore", "--save", tmp_path / "before")[0] == 0
    before = weights_of(tmp_path / "before")
    assert any(before[name].tobytes() != theirs[name].tobytes() for name in theirs)


def test_inspect_and_verify_tell_of_the_run(undisturbed: Finished, msrl, tmp_path: Path) -> None:
    run = Path(shutil.copytree(undisturbed.run, tmp_path / "elsewhere"))  # nothing in it says where it was
    newest = checkpoints_of(run)[-1]
    for path in (run, run / "checkpoints", newest):
        code, text = msrl("inspect", path)
        assert code == 0, text
        lines = dict(line.split(None, 1) for line in text.splitlines() if not line.startswith(("to resume", "also there")))
        assert lines["step"] == "16 of 16"
        assert lines["run"].startswith("dapo, ")
        assert lines["checksums"].endswith("files, all right")
        assert lines["checkpoint"] == str(newest)
        assert "to resume   yes" in text
        code, text = msrl("verify", path)
        assert code == 0, text
        assert "are there, in shape and finite" in text
        assert "checksums right: " in text


def test_damaged_and_newer_ones_are_refused(undisturbed: Finished, msrl, tmp_path: Path) -> None:
    run = Path(shutil.copytree(undisturbed.run, tmp_path / "run"))
    newest, before = checkpoints_of(run)[-1], checkpoints_of(run)[-2]
    file = next(newest.rglob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for words in (("inspect", newest), ("verify", newest), ("convert", "--load", newest, "--to", "hf", "--save", tmp_path / "hf")):
        code, text = msrl(*words)
        assert code == 2
        assert f"this checkpoint is damaged (model/{file.name} differs from its checksum)" in text
        assert not (tmp_path / "hf").exists()
    code, text = msrl("inspect", run)  # of a run, the newest good one is meant
    assert code == 0
    assert f"checkpoint  {before}" in text
    assert f"damaged     {newest.name} is damaged: model/{file.name} differs" in text
    code, text = msrl("verify", run)
    assert code == 2
    assert f"{newest.name} is damaged" in text
    code, text = msrl("convert", "--load", run, "--to", "hf", "--save", tmp_path / "hf")
    assert code == 0
    assert f"note: checkpoint {newest.name} is damaged" in text
    for path in checkpoints_of(run):
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    code, text = msrl("verify", run)
    assert code == 2
    assert "written by a newer msrl" in text


def test_a_model_folder_that_is_gone_is_asked_for(undisturbed: Finished, msrl, tmp_path: Path) -> None:
    run = Path(shutil.copytree(undisturbed.run, tmp_path / "run"))
    newest = checkpoints_of(run)[-1]
    shutil.rmtree(run / "final")
    _, text = msrl("inspect", newest, "--model", tmp_path / "nothing")
    assert "name the HF folder of this model's architecture and tokenizer with --model" in text
    assert msrl("inspect", newest, "--model", undisturbed.model)[0] == 0
