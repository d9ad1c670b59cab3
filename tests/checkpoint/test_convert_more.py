"""Conversion where dtypes mix or narrow, where it is stopped, and where folders are odd."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ckpt_models import load_hf_tensors, make_hf, read_safetensors, write_safetensors

from rlcli.checkpoint.convert import Conversion, convert
from rlcli.errors import UserError

Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


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
    from rlcli.errors import RunError

    to_dtype(llama, "k_proj", torch.float32)
    monkeypatch.setattr(Target, "check_dtypes", lambda self, source: None)
    with pytest.raises(RunError, match=r"k_proj\.weight did not come out"):
        convert(Conversion(llama, tmp_path / "out", "mcore"))
