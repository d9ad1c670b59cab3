"""Damaged, foreign and hostile checkpoints: refused with one line that names the file, and nothing of them is run."""

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ckpt_models import make_hf

from rlcli.checkpoint.convert import Conversion, convert
from rlcli.checkpoint.formats import detect, open_stored
from rlcli.checkpoint.inspect import inspect, verify_folder
from rlcli.checkpoint.regions import Region
from rlcli.checkpoint.unpickle import load_plain
from rlcli.errors import UserError
from rlcli.models.layout import Layout

RANK = "iter_0000001/mp_rank_01/model_optim_rng.pt"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    hf = make_hf(root / "hf", "llama")
    for to in ("mcore", "torch_dist", "classic"):
        convert(Conversion(hf, root / to, to, layout=Layout(tensor=2)))
    return root


@pytest.fixture
def copy(made, tmp_path):
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def fails(folder: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        verify_folder(folder)
    assert "\n" not in str(caught.value)


class Bomb:
    """Runs a command when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_checkpoint_is_refused_and_does_nothing(protocol, copy, tmp_path):
    folder, marker = copy("classic"), tmp_path / "marker"
    torch.save({"model": {}, "args": Bomb(marker)}, folder / RANK, pickle_protocol=protocol if protocol > 1 else 2)
    fails(folder, r"its pickle calls (posix|os)\.system")
    assert not marker.exists()
    torch.load(folder / RANK, weights_only=False)  # the proof that it would have run
    assert marker.exists()


def test_a_hostile_description_is_refused(copy, tmp_path):
    folder, marker = copy("torch_dist"), tmp_path / "marker"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    fails(folder, r"its pickle calls (posix|os)\.system")
    assert not marker.exists()


@pytest.mark.parametrize("call", ["builtins\neval", "builtins\ngetattr", "builtins\n__import__", "subprocess\nPopen", "rlcli.errors\nUserError", "torch_evil\nx"])
def test_other_names_are_refused(call, tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"c" + call.encode() + b"\n(S'1'\ntR.")
    with pytest.raises(UserError, match="its pickle calls " + call.replace("\n", ".")):
        load_plain(tmp_path / "x.pt")


def test_known_libraries_become_inert(tmp_path):
    """An enum of a library, a Namespace and a numpy array in one file: read, and nothing but the Namespace remains of them."""
    import numpy as np

    namespace = argparse.Namespace(tensor_model_parallel_size=2, dtype=torch.bfloat16)
    torch.save({"args": namespace, "rng": np.zeros(3), "kind": torch.strided, "x": torch.arange(6.0).view(2, 3), "t": torch.zeros(2, 3).t()}, tmp_path / "x.pt")
    loaded = load_plain(tmp_path / "x.pt")
    assert loaded["args"]["tensor_model_parallel_size"] == 2
    assert isinstance(loaded["x"], Region)
    assert loaded["x"].meant == (2, 3)
    assert loaded["t"].meant == (3, 2)
    assert loaded["t"].transposed


def test_tensors_may_not_reach_outside_their_data(tmp_path):
    whole = torch.arange(100.0)
    torch.save(whole[90:], tmp_path / "x.pt")
    assert load_plain(tmp_path / "x.pt").meant == (10,)
    torch.save(whole.as_strided((4, 4), (1, 1)), tmp_path / "y.pt")
    with pytest.raises(UserError, match="strides"):
        load_plain(tmp_path / "y.pt")


@pytest.mark.parametrize("keep", [0, 10, 200, -10])
def test_truncated_classic_file(keep, copy):
    folder = copy("classic")
    (folder / RANK).write_bytes((folder / RANK).read_bytes()[:keep])
    fails(folder, "model_optim_rng.pt: (truncated|cannot be read)")


def test_classic_files_that_lack_or_add_something(copy):
    folder = copy("classic")
    (folder / "SHA256SUMS").unlink()  # as Megatron writes none
    state = torch.load(folder / RANK, weights_only=False)
    layer = "decoder.layers.2.mlp.linear_fc2.weight"

    def with_model(model: dict) -> None:
        torch.save({**state, "model": model}, folder / RANK)

    with_model({k: v for k, v in state["model"].items() if k != layer})
    fails(folder, f"{layer} is missing")
    with_model({**state["model"], "decoder.layers.2.mlp.extra.weight": torch.zeros(1)})
    fails(folder, "holds decoder.layers.2.mlp.extra.weight, which a llama model")
    with_model({**state["model"], layer: torch.zeros(3, 3, dtype=torch.bfloat16)})
    fails(folder, r"linear_fc2.weight is \[3, 3\], where config.json and 2 shards make it \[32, 24\]")
    with_model({**state["model"], layer: state["model"][layer].float()})
    fails(folder, "is float32, but bfloat16")
    with_model({**state["model"], "decoder.layers.2.input_layernorm.weight": torch.zeros(32, dtype=torch.bfloat16)})
    fails(folder, "input_layernorm.weight of tensor rank 0 differs between")
    with_model({**state["model"], layer: torch.full((32, 24), float("nan"), dtype=torch.bfloat16)})
    fails(folder, "down_proj.weight holds numbers that are not finite")
    shutil.rmtree(folder / "iter_0000001" / "mp_rank_00")
    fails(folder, "lacks the shards of tensor ranks 0 of 2")


def test_a_classic_folder_without_one_of_its_ranks(copy):
    folder = copy("classic")
    shutil.rmtree(folder / "iter_0000001" / "mp_rank_01")
    fails(folder, "holds mp_rank folders of 1 tensor parallel ranks where its files say 2")


def test_other_entries_of_classic_folders(copy):
    folder = copy("classic")
    (folder / "latest_checkpointed_iteration.txt").write_text("soon")
    fails(folder, "holds 'soon', no iteration number")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    fails(folder, "iter_0000007: has no mp_rank_")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    shutil.rmtree(folder / "hf")
    fails(folder, "has no config.json; name the HF folder .* with --model")


def test_damaged_own_folder(copy):
    folder = copy("mcore")
    assert verify_folder(folder) == ["mcore: all 27 parameters of llama are there, in shape and finite", "checksums right: 5 files"]
    file = folder / "dense.tp01.pp000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    inspect(folder)  # headers are well
    fails(folder, "tp01.pp000.safetensors: differs from its checksum")
    file.write_bytes(data[:-100])
    fails(folder, "tp01.pp000.safetensors: truncated")
    file.rename(folder / "dense.tp02.pp000.safetensors")
    fails(folder, "tp01.pp000.safetensors: file is missing")


WEIGHTS = {"hf": "model.safetensors", "mcore": "dense.tp01.pp000.safetensors", "torch_dist": "__0_0.distcp", "classic": RANK}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_flipped_bit_is_found_in_every_format_and_not_converted(name, copy, tmp_path):
    folder = copy(name)
    if name == "hf":  # its maker wrote no checksums; msrl does
        convert(Conversion(folder, tmp_path / "again", "hf"))
        folder = tmp_path / "again"
    file = folder / WEIGHTS[name]
    assert verify_folder(folder)[1].startswith("checksums right: ")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    fails(folder, f"{file.name}: differs from its checksum")
    with pytest.raises(UserError, match="differs from its checksum"):
        convert(Conversion(folder, tmp_path / "out", "mcore"))
    assert not (tmp_path / "out").exists()
    if name != "mcore":  # without the note nobody can tell, and another's folder has none
        (folder / "SHA256SUMS").unlink()
        verify_folder(folder)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_changed_configuration_or_tokenizer_is_found_in_every_format(name, copy, tmp_path):
    folder = copy(name)
    if name == "hf":
        convert(Conversion(folder, tmp_path / "again", "hf"))
        folder = tmp_path / "again"
    beside = folder if name == "hf" else folder / "hf"
    config = json.loads((beside / "config.json").read_text())
    (beside / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    words = r"config.json: differs from its checksum; .* \(if that was meant, remove its line from SHA256SUMS\)"
    fails(folder, words)
    with pytest.raises(UserError, match=words):
        convert(Conversion(folder, tmp_path / "out", "mcore"))
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "config.json" not in line or "generation" in line))
    verify_folder(folder)
    (beside / "tokenizer.json").write_text("")
    fails(folder, "tokenizer.json: differs from its checksum")
    (beside / "tokenizer.json").unlink()
    fails(folder, "tokenizer.json: file is missing, though a checksum was noted of it")


@pytest.mark.parametrize("line", ["nonsense", "0" * 64 + "  ../outside", "0" * 64 + "  /etc/passwd"])
def test_checksums_of_something_else(line, copy):
    folder = copy("torch_dist")
    (folder / "SHA256SUMS").write_text(line + "\n")
    fails(folder, "SHA256SUMS: line 1 is no checksum of a file in this folder")


def test_sha256sum_agrees(copy):
    run = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=copy("classic"), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_own_folder_from_another_version(copy):
    folder = copy("mcore")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    fails(folder, "version 2 is not known")
    (folder / "manifest.json").write_text(json.dumps(manifest | {"layout": {"width": 1}}))
    fails(folder, "has no valid layout")
    for changes in ({"layout": {"tensor": 0}}, {"layout": {"tensor": "a"}}, {"files": []}):
        (folder / "manifest.json").write_text(json.dumps(manifest | changes))
        fails(folder, "has no valid layout or list of files")
    (folder / "manifest.json").unlink()
    fails(folder, "manifest.json: file is missing; without it")


def test_damaged_distributed_checkpoint(copy):
    folder = copy("torch_dist")
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-20])  # within the last object, where no weight is
    fails(folder, rf"__0_0.distcp: truncated, {len(data) - 20} bytes where .metadata places {len(data)}")
    (folder / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    fails(folder, "__0_0.distcp: (truncated|cannot be read)")
    (folder / "__0_0.distcp").unlink()
    fails(folder, "__0_0.distcp: file is missing")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    fails(folder, "sharded_backend 'zarr' is not supported")


def test_formats_are_told_apart(made, tmp_path):
    assert [detect(made / name) for name in ("hf", "mcore", "torch_dist", "classic")] == ["hf", "mcore", "torch_dist", "classic"]
    assert detect(made / "classic" / "iter_0000001") == "classic"
    with pytest.raises(UserError, match="holds no model"):
        detect(tmp_path)
    with pytest.raises(UserError, match="is in the format hf, not mcore"):
        open_stored(made / "hf", "mcore")
    with pytest.raises(UserError, match="--from zarr: no such format"):
        open_stored(made / "hf", "zarr")


def test_commands(made, tmp_path):
    """As a user calls them: output and exit codes."""

    def msrl(*words: object) -> tuple[int, str]:
        command = "from rlcli.app import main; main()"
        run = subprocess.run([sys.executable, "-c", command, "ckpt", *map(str, words)], capture_output=True, text=True, check=False, timeout=120)
        return run.returncode, run.stdout + run.stderr

    code, text = msrl("convert", "--load", made / "hf", "--save", tmp_path / "out", "--to", "classic", "--tp", 2, "--pp", 2, "--pp-layout", "1,3")
    assert code == 0
    assert "verified: 27 parameters equal bit for bit" in text
    code, text = msrl("inspect", tmp_path / "out")
    assert code == 0
    assert "TP 2, PP 2, layers 1,3" in text
    assert "bfloat16" in text
    code, text = msrl("verify", tmp_path / "out")
    assert code == 0
    assert "all 27 parameters of llama are there" in text
    code, text = msrl("convert", "--load", made / "hf", "--save", tmp_path / "o2", "--to", "classic", "--tp", 8)
    assert code == 2
    assert "4 attention heads do not divide over tensor=8" in text
    assert "Traceback" not in text
