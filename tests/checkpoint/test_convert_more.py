"""Conversion where dtypes mix or narrow, where it is stopped, and where folders are odd."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ckpt_models import load_hf_tensors, make_hf, read_safetensors, write_safetensors

from rlcli.checkpoint.convert import Conversion, convert
from rlcli.checkpoint.inspect import inspect, verify_folder
from rlcli.checkpoint.target import is_mount
from rlcli.errors import RunError, UserError
from rlcli.models.layout import Layout
from rlcli.models.registry import read_model

K = "model.layers.1.self_attn.k_proj.weight"


def rewrite(folder: Path, **tensors: torch.Tensor) -> Path:
    """Put other tensors into a folder that make_hf made."""
    write_safetensors(folder / "model.safetensors", load_hf_tensors(folder) | tensors)
    return folder


def to_dtype(folder: Path, part: str, dtype: torch.dtype) -> Path:
    """Every tensor with `part` in its name becomes `dtype`, and holds what bfloat16 cannot."""
    return rewrite(folder, **{n: (t.float() + 1e-5).to(dtype) for n, t in load_hf_tensors(folder).items() if part in n})


@pytest.fixture
def llama(tmp_path):
    return make_hf(tmp_path / "hf", "llama")


@pytest.mark.parametrize("part", ["k_proj", "up_proj", "layers.2.mlp.up_proj"])
def test_tensors_of_several_dtypes_that_megatron_joins(part, llama, tmp_path):
    """HF folders keep each tensor's own; Megatron formats refuse before anything is written, and take them widened."""
    to_dtype(llama, part, torch.float32)
    convert(Conversion(llama, tmp_path / "same", "hf"))
    assert read_safetensors(tmp_path / "same") == read_safetensors(llama)
    for to in ("mcore", "torch_dist", "classic"):
        with pytest.raises(UserError, match=rf"hf: model\S* is bfloat16 and model\S*{part}\.weight float32, which {to} folders hold in one .* --dtype float32 \(nothing"):
            convert(Conversion(llama, tmp_path / "out", to))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "same"]
    convert(Conversion(llama, tmp_path / "wide", "mcore", dtype="float32"))
    convert(Conversion(tmp_path / "wide", tmp_path / "back", "hf"))
    back, source = load_hf_tensors(tmp_path / "back"), load_hf_tensors(llama)
    assert all(torch.equal(back[name], tensor.float()) for name, tensor in source.items())


@pytest.mark.parametrize(("family", "part", "to"), [
    ("qwen3_moe", "layers.1.mlp.experts.3.down_proj", "torch_dist"), ("qwen3_moe", "layers.1.mlp.experts.3.down_proj", "classic"),
    ("llama", "layers.2.input_layernorm", "torch_dist"), ("deepseek_v3", "layers.1.self_attn.kv_a_proj", "classic"),
])
def test_parameters_of_several_dtypes_that_a_format_joins(family, part, to, tmp_path):
    """Layers and experts are one tensor in torch_dist, experts and MLA's projections in MindSpeed's classic folders; msrl's own keeps them apart."""
    folder = to_dtype(make_hf(tmp_path / "hf", family), part, torch.float32)
    with pytest.raises(UserError, match=f"{part}.* float32, which {to} folders hold in one dtype"):
        convert(Conversion(folder, tmp_path / "out", to))
    convert(Conversion(folder, tmp_path / "own", "mcore"))
    convert(Conversion(tmp_path / "own", tmp_path / "back", "hf"))
    assert read_safetensors(tmp_path / "back") == read_safetensors(folder)


def test_verification_compares_with_the_dtype_of_each_tensor(llama, tmp_path, monkeypatch):
    """Were the refusal not there, the loss would be found."""
    from rlcli.checkpoint.target import Target

    to_dtype(llama, "k_proj", torch.float32)
    monkeypatch.setattr(Target, "check_dtypes", lambda self, source: None)
    with pytest.raises(RunError, match=r"k_proj\.weight did not come out"):
        convert(Conversion(llama, tmp_path / "out", "mcore"))


KILLED = """
import os, signal, sys
from pathlib import Path
from rlcli.checkpoint import convert as c
from rlcli.checkpoint.target import Target
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
owner, name = {"finish": (Target, "finish"), "rename": (os, "rename")}[sys.argv[1]]
setattr(owner, name, die)
c.convert(c.Conversion(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
"""


def killed(at: str, load: Path, save: Path, to: str) -> Path:
    """What a conversion killed at this point leaves."""
    run = subprocess.run([sys.executable, "-c", KILLED, at, str(load), str(save), to], check=False, timeout=100)
    assert run.returncode == -9
    return save.with_name(save.name + ".partial")


@pytest.mark.parametrize("to", ["hf", "mcore", "torch_dist", "classic"])
def test_what_a_killed_conversion_leaves_is_no_model(to, llama, tmp_path):
    partial = killed("finish", llama, tmp_path / "out", to)
    moved = partial.rename(tmp_path / "moved")
    for folder in (moved, moved / "iter_0000001"):
        for reads in (inspect, verify_folder, lambda at: convert(Conversion(at, tmp_path / "next", "hf", model=llama))):
            with pytest.raises(UserError, match=r"moved: was not written to the end \(stopped, or still at work\); write it again, or remove it"):
                reads(folder)
    with pytest.raises(UserError, match="was not written to the end"):
        convert(Conversion(llama, tmp_path / "next", "mcore", model=moved))
    with pytest.raises(UserError, match="was not written to the end"):
        read_model(moved)


def test_a_whole_folder_that_lacks_its_name_alone_is_a_model_and_no_conversion_deletes_it(llama, tmp_path):
    partial = killed("rename", llama, tmp_path / "out", "mcore")
    assert verify_folder(partial)
    for load, model in ((partial, None), (llama, partial / "hf")):
        with pytest.raises(UserError, match=r"out\.partial\S*: is where a conversion to \S*out works; rename it, or choose another folder"):
            convert(Conversion(load, tmp_path / "out", "hf", model=model))
    assert verify_folder(partial)


def test_an_export_that_was_not_finished_is_no_model(llama, tmp_path):
    from rlcli.models.export import HfWriter

    writer = HfWriter(read_model(llama), tmp_path / "out")
    writer.create()
    with pytest.raises(UserError, match="was not written to the end"):
        read_model(writer.partial)
    writer.finish(writer.write(load_hf_tensors(llama).items()))
    assert read_safetensors(tmp_path / "out") == read_safetensors(llama)
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_followed(there, llama, tmp_path):
    """The work is done beside the folder that it leads to, and the link stays."""
    (tmp_path / "disk").mkdir()
    if there:
        (tmp_path / "disk" / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    convert(Conversion(llama, tmp_path / "link", "hf"))
    assert (tmp_path / "link").is_symlink()
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["real"]
    assert read_safetensors(tmp_path / "link") == read_safetensors(llama)


def test_links_in_a_circle_and_mount_points_are_refused_before_any_work(llama, tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="is a symbolic link that leads nowhere"):
        convert(Conversion(llama, tmp_path / "a", "hf"))
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "mount")
    with pytest.raises(UserError, match=r"mount: is a mount point, .*; give a new folder below it, as \S*mount/model"):
        convert(Conversion(llama, tmp_path / "mount", "hf"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "hf", "mount"]
    assert is_mount(Path("/proc"))
    assert not is_mount(llama)


@pytest.mark.parametrize("to", ["hf", "mcore", "torch_dist", "classic"])
def test_values_that_overflow_in_a_narrower_dtype_are_refused(to, llama, tmp_path):
    """What was infinite or no number before stays so, and the largest that fits is no overflow."""
    large, odd = load_hf_tensors(llama)[K].float(), torch.tensor([float("nan"), float("inf"), -float("inf"), 65504.0, -65510.0] + [1.0] * 27)
    to_dtype(llama, "", torch.float32)
    rewrite(llama, **{"model.norm.weight": odd})
    convert(Conversion(llama, tmp_path / "fits", to, dtype="float16"))
    large[3, 5] = -65600.0
    rewrite(llama, **{K: large})
    convert(Conversion(llama, tmp_path / "own", "mcore", layout=Layout(tensor=2)))
    for load in (llama, tmp_path / "own"):
        with pytest.raises(UserError, match=rf"{K} would overflow to infinity in float16; take --dtype bfloat16 or float32"):
            convert(Conversion(load, tmp_path / "out", to, dtype="float16"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fits", "hf", "own"]
    convert(Conversion(llama, tmp_path / "out", to, dtype="bfloat16"))
    large[3, 5] = 3.4e38
    with pytest.raises(UserError, match=rf"{K} would overflow to infinity in bfloat16; take --dtype float32"):
        convert(Conversion(rewrite(llama, **{K: large}), tmp_path / "more", to, dtype="bfloat16"))


STOPPED = """
import os, sys
from rlcli.checkpoint import convert as c
from rlcli.checkpoint.target import Target
from rlcli.app import main
at, number, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
owner, name = {"write": (c, "_move"), "verify": (c, "differing"), "seal": (Target, "seal")}[at]
done = getattr(owner, name)
def stop(*args):
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # again, at once
    return done(*args)
setattr(owner, name, stop)
main(argv)
"""


@pytest.mark.parametrize(("at", "name"), [("write", "SIGTERM"), ("verify", "SIGINT"), ("seal", "SIGHUP")])
def test_signals_leave_nothing_and_say_so_in_one_line(at, name, llama, tmp_path):
    number = getattr(signal, name)
    argv = [sys.executable, "-c", STOPPED, at, str(int(number)), "ckpt", "convert", "--load", str(llama), "--save", str(tmp_path / "out"), "--to", "hf"]
    run = subprocess.run(argv, check=False, timeout=100, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (128 + number, "")
    assert run.stderr == f"stopped: {name}; nothing unfinished is left at {tmp_path / 'out'}\n"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_signal_that_was_ignored_stays_so(llama, tmp_path):
    """As under nohup."""
    argv = [sys.executable, "-c", "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + STOPPED, "write", str(int(signal.SIGHUP)),
            "ckpt", "convert", "--load", str(llama), "--save", str(tmp_path / "out"), "--to", "hf"]
    assert subprocess.run(argv, check=False, timeout=100).returncode == 0
    assert read_safetensors(tmp_path / "out") == read_safetensors(llama)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("family", "keys", "words"), [
    ("llama", {"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10000000; more than 5000 is not supported"),
    ("qwen3_moe", {"num_experts": 10_000_000}, "num_experts is 10000000; more than"),
    ("deepseek_v3", {"num_hidden_layers": 4000, "n_routed_experts": 4000}, "4000 layers of 4000 experts are more than the 100000"),
    ("qwen3", {"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, "num_attention_heads is 1000000000; more than"),
])
def test_numbers_in_config_that_no_model_has_are_refused_at_once(family, keys, words, tmp_path):
    folder = make_hf(tmp_path / "hf", family)
    convert(Conversion(folder, tmp_path / "own", "mcore"))
    for path in (folder / "config.json", tmp_path / "own" / "hf" / "config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    for load in (folder, tmp_path / "own"):
        with pytest.raises(UserError, match=rf"config\.json: {words}"):
            convert(Conversion(load, tmp_path / "out", "hf"))


def test_weights_that_stand_there_a_second_time_as_mistral_names_them(tmp_path):
    folder = make_hf(tmp_path / "hf", "mistral")
    write_safetensors(folder / "consolidated.safetensors", {"layers.0.attention.wq.weight": torch.ones(32, 32)})
    convert(Conversion(folder, tmp_path / "own", "mcore"))
    convert(Conversion(tmp_path / "own", tmp_path / "back", "hf"))
    (folder / "consolidated.safetensors").unlink()
    assert read_safetensors(tmp_path / "back") == read_safetensors(folder)


@pytest.mark.parametrize("which", ["hf", "out"])
def test_logits_that_are_not_finite_are_told_with_their_folder(which, tmp_path, monkeypatch):
    from rlcli.checkpoint import logits

    def run(command, **more):
        torch.save(torch.full((2,), float("nan") if command[3].endswith(which) else 1.0), command[4])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(logits.subprocess, "run", run)
    with pytest.raises(RunError, match=f"{which}: logits are not finite, so that they cannot be compared"):
        logits.compare(tmp_path / "hf", tmp_path / "out")
