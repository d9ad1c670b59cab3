"""Conversion there and back, for every family, format and several layouts; and what is written, against shards cut by hand."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ckpt_models import FAMILIES, load_hf_tensors, make_hf, read_safetensors

from rlcli.checkpoint.convert import Conversion, convert
from rlcli.checkpoint.formats import detect, open_stored
from rlcli.checkpoint.target import MARK
from rlcli.errors import RunError, UserError
from rlcli.models.layout import Layout

MOE = ("qwen3_moe", "deepseek_v2", "deepseek_v3")


def layouts(family: str) -> dict[str, Layout]:
    """Three layouts, with experts where the family has them."""
    expert = 2 if family in MOE else 1
    return {
        "tp2": Layout(tensor=2, expert_tensor=2),
        "pp_ep": Layout(pipeline=2, expert=expert, stages=(1, 3)),
        "all": Layout(tensor=2, pipeline=2, virtual=2, expert=expert, expert_tensor=2 if expert > 1 else 1),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: make_hf(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("layout", ["tp2", "pp_ep", "all"])
@pytest.mark.parametrize("to", ["mcore", "torch_dist", "classic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family, to, layout, folders, tmp_path):
    source = folders[family]
    there = convert(Conversion(source, tmp_path / "there", to, layout=layouts(family)[layout], threads=2))
    assert there.verified == len(open_stored(source).spec.rules) - (family == "qwen2_tied")
    assert detect(tmp_path / "there") == to
    back = convert(Conversion(tmp_path / "there", tmp_path / "back", "hf", named="mcore", threads=2))
    assert back.verified == there.verified
    assert read_safetensors(tmp_path / "back") == read_safetensors(source)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((source / name).read_text())
    assert not list(tmp_path.glob("*.partial"))


def test_between_megatron_formats_and_layouts(folders, tmp_path):
    """HF -> classic with dealt experts -> own -> torch_dist -> classic, each at another layout -> HF."""
    steps = [("classic", Layout(tensor=2, expert=2), True), ("mcore", Layout(pipeline=2, expert=4), None), ("torch_dist", Layout(), None),
             ("classic", Layout(tensor=2, expert=2), None)]
    at = folders["deepseek_v3"]
    for i, (to, layout, extend) in enumerate(steps):
        convert(Conversion(at, tmp_path / str(i), to, layout=layout, extend=extend, threads=1))
        at = tmp_path / str(i)
    convert(Conversion(at, tmp_path / "hf", "hf"))
    assert read_safetensors(tmp_path / "hf") == read_safetensors(folders["deepseek_v3"])


def rank_state(folder: Path, name: str) -> dict:
    return torch.load(folder / "iter_0000001" / name / "model_optim_rng.pt", weights_only=False)


def test_classic_folders_hold_what_megatron_expects(folders, tmp_path):
    """Against torch.load and shards cut here by hand: Qwen2 at TP2 and PP2, tied, its vocabulary of 51 padded to 52."""
    convert(Conversion(folders["qwen2_tied"], tmp_path / "out", "classic", layout=Layout(tensor=2, pipeline=2)))
    hf = load_hf_tensors(folders["qwen2_tied"])
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert sorted(p.name for p in (tmp_path / "out" / "iter_0000001").iterdir()) == [f"mp_rank_0{t}_00{p}" for t in (0, 1) for p in (0, 1)]
    loaded = rank_state(tmp_path / "out", "mp_rank_01_001")
    state = loaded["model"]
    assert loaded["checkpoint_version"] == 3.0
    assert loaded["args"].tensor_model_parallel_size == 2
    p = "model.layers.2."  # the first layer of the second stage
    q, k, v = (hf[f"{p}self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(state["decoder.layers.0.self_attention.linear_qkv.weight"], torch.cat([q[16:32], k[8:16], v[8:16]]))  # the second KV group
    q, k, v = (hf[f"{p}self_attn.{x}_proj.bias"] for x in "qkv")
    assert torch.equal(state["decoder.layers.0.self_attention.linear_qkv.bias"], torch.cat([q[16:32], k[8:16], v[8:16]]))
    gate, up = hf[f"{p}mlp.gate_proj.weight"], hf[f"{p}mlp.up_proj.weight"]
    assert torch.equal(state["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    assert torch.equal(state["decoder.layers.0.mlp.linear_fc2.weight"], hf[f"{p}mlp.down_proj.weight"][:, 24:])
    assert torch.equal(state["decoder.layers.0.self_attention.linear_proj.weight"], hf[f"{p}self_attn.o_proj.weight"][:, 16:])
    embedding = hf["model.embed_tokens.weight"]
    assert torch.equal(state["output_layer.weight"], torch.cat([embedding[26:], torch.zeros(1, 32, dtype=torch.bfloat16)]))
    assert torch.equal(state["decoder.final_layernorm.weight"], hf["model.norm.weight"])
    assert "embedding.word_embeddings.weight" not in state
    assert len(state) == 2 * 7 + 2


@pytest.mark.parametrize("extend", [False, True])
def test_classic_grouped_experts_as_mindspeed_lays_them_out(extend, folders, tmp_path):
    """weight1 is [hidden, experts x gate|up]: a stack of transposed experts. Split over TP, or whole and dealt (moe_tp_extend_ep)."""
    layout = Layout(tensor=2, expert=2, expert_tensor=2)
    convert(Conversion(folders["qwen3_moe"], tmp_path / "out", "classic", layout=layout, extend=extend))
    hf = load_hf_tensors(folders["qwen3_moe"])
    loaded = rank_state(tmp_path / "out", "mp_rank_01_001")
    weight1, weight2 = (loaded["model"][f"decoder.layers.1.mlp.experts.{n}"] for n in ("weight1", "weight2"))
    experts = (6, 7) if extend else (4, 5, 6, 7)  # dealt: 8 experts over 2 x 2 ranks, this is the last; split: the second half, half of each
    rows = slice(0, 16) if extend else slice(8, 16)
    expected1 = [torch.cat([hf[f"model.layers.1.mlp.experts.{e}.{n}_proj.weight"][rows] for n in ("gate", "up")]).t() for e in experts]
    expected2 = [hf[f"model.layers.1.mlp.experts.{e}.down_proj.weight"][:, rows].t() for e in experts]
    assert torch.equal(weight1.view(len(experts), 32, -1), torch.stack(expected1))
    assert torch.equal(weight2.view(len(experts), -1, 32), torch.stack(expected2))
    assert weight1.shape[0] == 32
    assert loaded["args"].moe_tp_extend_ep is extend


def test_classic_with_whole_experts_by_name(folders, tmp_path):
    """Without grouping, the number of experts in a file tells that they are dealt over TP; with ETP 1 only some folders exist."""
    dealt = Conversion(folders["qwen3_moe"], tmp_path / "dealt", "classic", layout=Layout(tensor=2, expert=2), extend=True, names="megatron")
    convert(dealt)
    state = rank_state(tmp_path / "dealt", "mp_rank_01_000")["model"]
    hf = load_hf_tensors(folders["qwen3_moe"])
    assert torch.equal(state["decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight"], hf["model.layers.3.mlp.experts.3.down_proj.weight"])
    convert(Conversion(tmp_path / "dealt", tmp_path / "hf", "hf"))
    assert read_safetensors(tmp_path / "hf") == read_safetensors(folders["qwen3_moe"])
    convert(Conversion(folders["qwen3_moe"], tmp_path / "sparse", "classic", layout=Layout(tensor=2, expert=4, expert_tensor=1), names="megatron"))
    assert sorted(p.name for p in (tmp_path / "sparse" / "iter_0000001").iterdir()) == [f"mp_rank_0{t}_00{e}" for t, e in ((0, 0), (0, 2), (1, 1), (1, 3))]
    convert(Conversion(tmp_path / "sparse", tmp_path / "hf2", "hf"))
    assert read_safetensors(tmp_path / "hf2") == read_safetensors(folders["qwen3_moe"])


def test_reads_a_file_of_the_predecessor_made_by_hand(folders, tmp_path):
    """MLA with its joint projection, Transformer Engine's norm names and expert names, an extra state and a random state, all by torch.save."""
    hf, state = load_hf_tensors(folders["deepseek_v2"]), {}
    for i in range(4):
        p, m = f"model.layers.{i}.", f"decoder.layers.{i}."
        state[m + "input_layernorm.weight"] = hf[p + "input_layernorm.weight"]
        state[m + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"]
        state[m + "self_attention.linear_qkv.weight"] = torch.cat([hf[p + "self_attn.q_proj.weight"], hf[p + "self_attn.kv_a_proj_with_mqa.weight"]])
        state[m + "self_attention.linear_kv_up_proj.layer_norm_weight"] = hf[p + "self_attn.kv_a_layernorm.weight"]
        state[m + "self_attention.linear_kvb.weight"] = hf[p + "self_attn.kv_b_proj.weight"]
        state[m + "self_attention.linear_proj.weight"] = hf[p + "self_attn.o_proj.weight"]
        state[m + "self_attention.linear_proj._extra_state"] = None
        for theirs, mine in (("mlp.", "mlp."),) if i == 0 else (("mlp.shared_experts.", "mlp.shared_experts."),):
            state[m + mine + "linear_fc1.weight"] = torch.cat([hf[p + theirs + "gate_proj.weight"], hf[p + theirs + "up_proj.weight"]])
            state[m + mine + "linear_fc2.weight"] = hf[p + theirs + "down_proj.weight"]
        if i > 0:
            state[m + "mlp.router.weight"] = hf[p + "mlp.gate.weight"]
            for e in range(8):
                q = f"{p}mlp.experts.{e}."
                state[f"{m}mlp.experts.linear_fc1.weight{e}"] = torch.cat([hf[q + "gate_proj.weight"], hf[q + "up_proj.weight"]])
                state[f"{m}mlp.experts.linear_fc2.weight{e}"] = hf[q + "down_proj.weight"].t().contiguous().t()  # stored transposed
    padding = torch.full((78, 32), 7.0, dtype=torch.bfloat16)  # Megatron pads the vocabulary to a multiple of 128
    state["embedding.word_embeddings.weight"] = torch.cat([hf["model.embed_tokens.weight"], padding])
    state["output_layer.weight"] = torch.cat([hf["lm_head.weight"], padding])
    state["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    file = tmp_path / "old" / "iter_0000250" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"model": state, "iteration": 250, "rng_state": [{"torch_rng_state": torch.get_rng_state()}], "path": Path("x")}, file)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("250")
    convert(Conversion(tmp_path / "old", tmp_path / "hf", "hf", model=folders["deepseek_v2"]))
    assert read_safetensors(tmp_path / "hf") == read_safetensors(folders["deepseek_v2"])
    assert open_stored(tmp_path / "old", None, folders["deepseek_v2"]).step == 250


def test_dtype(folders, tmp_path):
    done = convert(Conversion(folders["deepseek_v3"], tmp_path / "out", "mcore", dtype="float32", layout=Layout(tensor=2, expert_tensor=2)))
    assert done.verified > 0
    convert(Conversion(tmp_path / "out", tmp_path / "hf", "hf", dtype="bfloat16"))
    assert read_safetensors(tmp_path / "hf") == read_safetensors(folders["deepseek_v3"])  # the router's bias stayed float32


def test_multi_token_prediction_is_left_out_and_named(folders, tmp_path):
    from ckpt_models import write_safetensors

    folder = Path(shutil.copytree(folders["deepseek_v3"], tmp_path / "mtp"))
    write_safetensors(folder / "model.safetensors", load_hf_tensors(folder) | {"model.layers.4.eh_proj.weight": torch.ones(2), "model.layers.4.enorm.weight": torch.ones(2)})
    assert convert(Conversion(folder, tmp_path / "out", "mcore")).left_out == ["model.layers.4 (2 tensors)"]


@pytest.mark.parametrize(("layout", "words"), [
    (Layout(tensor=3), "4 attention heads do not divide over tensor=3"),
    (Layout(pipeline=3), "4 layers do not divide over pipeline=3"),
    (Layout(tensor=2, expert=3, expert_tensor=2), "8 experts do not divide over expert=3"),
    (Layout(virtual=2), "--vpp 2: model chunks are those of pipeline ranks; give --pp too"),
    (Layout(pipeline=2, stages=(-1, 5)), "4 layers do not divide over pipeline=2 as -1,5"),
])
def test_layouts_that_cannot_be_leave_nothing(layout, words, folders, tmp_path):
    with pytest.raises(UserError, match=words):
        convert(Conversion(folders["qwen3_moe"], tmp_path / "out", "mcore", layout=layout))
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way(folders, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists already"):
        convert(Conversion(folders["llama"], tmp_path / "out", "mcore"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    for to in ("hf", "mcore", "torch_dist", "classic"):
        with pytest.raises(UserError, match=r"KiB are needed, 1000 bytes are free"):
            convert(Conversion(folders["llama"], tmp_path / "new", to))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_sizes_for_experts_of_a_model_without(folders, tmp_path):
    for layout, words in ((Layout(expert=2), "expert=2 must be 1"), (Layout(tensor=4, expert_tensor=2), "--etp 2: a llama model has no experts")):
        with pytest.raises(UserError, match=words):
            convert(Conversion(folders["llama"], tmp_path / "out", "mcore", layout=layout))


@pytest.mark.parametrize(("number", "error", "words"), [
    (30, UserError, "cannot be written; nothing is left there: read-only file system; choose another folder for --save"),
    (13, UserError, "cannot be written; nothing is left there: permission denied"),
    (5, RunError, "cannot be written; nothing is left there: Input/output error"),
])
def test_a_folder_that_cannot_be_written(number, error, words, folders, tmp_path, monkeypatch):
    import os

    def refuse(self, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(error, match=words):
        convert(Conversion(folders["llama"], tmp_path / "out", "mcore"))


def test_places_that_are_no_new_folder(folders, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written"):
        convert(Conversion(folders["llama"], tmp_path / "file" / "out", "mcore"))
    monkeypatch.chdir(tmp_path)
    for save in (".", "..", "file"):
        with pytest.raises(UserError, match="exists already and is not empty"):
            convert(Conversion(folders["llama"], Path(save), "mcore"))
    assert (tmp_path / "file").read_text() == "mine"


def test_what_stands_where_the_work_is_done(folders, tmp_path):
    """Beside the new folder: somebody's files are kept, another conversion's too."""
    import fcntl

    beside = tmp_path / "out.partial"
    beside.mkdir()
    (beside / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out\.partial: is in the way and no conversion made it"):
        convert(Conversion(folders["llama"], tmp_path / "out", "mcore"))
    with open(beside / MARK, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another conversion is writing it"):
            convert(Conversion(folders["llama"], tmp_path / "out", "mcore"))
    assert (beside / "thesis.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.partial"]


KILLED = """
import os, signal, sys
from pathlib import Path
from rlcli.checkpoint import convert as c
from rlcli.checkpoint.regions import RegionWriter
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
owner, name = {"write": (RegionWriter, "write_rows"), "verify": (c, "check_copies"), "rename": (os, "rename")}[sys.argv[1]]
setattr(owner, name, die)
c.convert(c.Conversion(Path(sys.argv[2]), Path(sys.argv[3]), "mcore"))
"""


@pytest.mark.parametrize("at", ["write", "verify", "rename"])
def test_kill_9_leaves_no_folder_of_that_name_and_the_next_cleans_up(at, folders, tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, at, str(folders["llama"]), str(tmp_path / "out")], check=False, timeout=100)
    assert run.returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    convert(Conversion(folders["llama"], tmp_path / "out", "mcore"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / MARK).exists()


def test_an_error_on_the_way_leaves_nothing(folders, tmp_path, monkeypatch):
    from rlcli.checkpoint.regions import RegionWriter

    def full(self, region, row, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RegionWriter, "write_rows", full)
    with pytest.raises(RunError, match=r"out: cannot be written; nothing is left there: the disk is full \(.* free\); free some space, or choose another"):
        convert(Conversion(folders["llama"], tmp_path / "out", "mcore"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["hf", "mcore", "torch_dist", "classic"])
def test_verification_finds_one_wrong_bit(to, folders, tmp_path, monkeypatch):
    from rlcli.checkpoint.regions import RegionWriter

    write = RegionWriter.write_rows

    def flip(self, region, row, tensor):
        if tuple(tensor.shape) == (32,) and not flipped:
            flipped.append(region)
            tensor = tensor.clone()
            tensor.view(torch.int16)[5] ^= 1
        write(self, region, row, tensor)

    flipped: list = []
    monkeypatch.setattr(RegionWriter, "write_rows", flip)
    with pytest.raises((RunError, UserError), match=r"did not come out|differs between"):
        convert(Conversion(folders["llama"], tmp_path / "out", to, layout=Layout(tensor=2), threads=1))
    assert flipped
    assert list(tmp_path.iterdir()) == []


def test_a_run_checkpoint_converts(folders, tmp_path):
    """A run's newest good checkpoint: its weights are a distributed checkpoint, its manifest names the model's folder."""
    from rlcli.checkpoint.inspect import inspect, verify_folder
    from rlcli.checkpoint.manifest import Manifest
    from rlcli.checkpoint.store import Store

    with Store(tmp_path / "run" / "checkpoints") as store:
        partial = store.begin(12)
        convert(Conversion(folders["qwen3"], partial / "model", "torch_dist"))
        shutil.rmtree(partial / "model" / "hf")  # a run's checkpoint has none
        store.finish(12, Manifest(kind="dapo", step=12, config={"model": str(folders["qwen3"])}))
    convert(Conversion(tmp_path / "run", tmp_path / "hf", "hf"))
    assert read_safetensors(tmp_path / "hf") == read_safetensors(folders["qwen3"])
    lines = dict(inspect(tmp_path / "run"))
    assert (lines["format"], lines["step"]) == ("run", "12")
    assert lines["checksums"].endswith("files, all right")
    assert verify_folder(tmp_path / "run")[1].startswith("checksums right: ")
    for name in ("best", "step-00000012"):  # a checkpoint on its own, under whatever name
        alone = shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000012", tmp_path / name)
        assert dict(inspect(alone))["format"] == "run"
    (tmp_path / "latest").symlink_to(tmp_path / "best")
    assert verify_folder(tmp_path / "latest")[0].startswith("run: all 35 parameters")
    (tmp_path / "step-00000012" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"this checkpoint is damaged \(manifest.json is missing"):
        inspect(tmp_path / "step-00000012")
    with Store(tmp_path / "run" / "checkpoints") as store:
        shutil.copytree(tmp_path / "best" / "model", store.begin(13) / "model")
        store.finish(13, Manifest(kind="dapo", step=13, config={"model": str(folders["qwen3"])}))
    assert verify_folder(tmp_path / "run")[0].startswith("run: ")
    older = tmp_path / "run" / "checkpoints" / "step-00000012" / "model" / "__0_0.distcp"
    older.write_bytes(older.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"step-00000012: is damaged \(.*__0_0.distcp differs from its checksum\); step-00000013 is whole"):
        verify_folder(tmp_path / "run")
