"""What a user reads when a model folder is not as it should be: one line naming file and key, before anything is loaded."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

from rlcli.errors import UserError
from rlcli.models.export import HfWriter, export_hf
from rlcli.models.files import Reader, read_folder, read_header
from rlcli.models.registry import read_model


@pytest.fixture
def folder(tiny_model_factory, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model_factory("llama", False), tmp_path / "model"))


def change(folder: Path, **keys) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def fails(folder: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_model(folder)
    assert "\n" not in str(caught.value)


def test_reads_a_good_folder(folder):
    spec = read_model(folder)
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab, spec.tied) == (2, 128, 4, 2, 32, 320, False)
    each = 2 * 128 + 128 * 128 * 2 + 64 * 128 * 2 + 3 * 128 * 256  # two norms, q and o, k and v, the MLP
    assert spec.parameters == 2 * 320 * 128 + 128 + 2 * each
    assert spec.dtype == "float32"


def test_missing_folder(tmp_path):
    fails(tmp_path / "nothing", "no such folder")


@pytest.mark.parametrize(("name", "words"), [("config.json", "config.json: file is missing"), ("model.safetensors", "no .*safetensors"), ("tokenizer.json", "no tokenizer")])
def test_missing_file(folder, name, words):
    (folder / name).unlink()
    fails(folder, words)


@pytest.mark.parametrize(("keys", "words"), [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
    ({"architectures": []}, "none named"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is .*; a list of names is needed"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope scaling 'yarn' is not supported"),
    ({"rope_parameters": {}, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
    ({"hidden_size": 64}, r"has shape \[320, 128\], but config.json makes it \[320, 64\]"),
    ({"num_hidden_layers": 3}, "tensor model.layers.2.* is missing"),
    ({"num_hidden_layers": 1}, "holds model.layers.1.*, which a llama model of this config.json does not have"),
])
def test_config_that_does_not_fit(folder, keys, words):
    change(folder, **keys)
    fails(folder, words)


def test_mistral_with_sliding_window(tiny_model_factory, tmp_path):
    folder = Path(shutil.copytree(tiny_model_factory("mistral"), tmp_path / "model"))
    read_model(folder)
    change(folder, sliding_window=4096)
    fails(folder, "sliding_window=4096")


@pytest.mark.parametrize("keep", [0, 4, 100, -5])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    fails(folder, "model.safetensors: (truncated|no valid)")


@pytest.mark.parametrize("header", [b"{}x", b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}', b'{"a":[]}', b"[1]"])
def test_header_that_lies(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    with pytest.raises(UserError, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


def shards(folder: Path) -> Path:
    """The same model as several files with an index."""
    spec = read_model(folder)
    out = folder.with_name("sharded")
    writer = HfWriter(spec, out, shard_bytes=200_000)
    writer.create()
    writer.finish(writer.write((n, Reader(spec.tensors)(n)) for n in writer.places))
    return out


def test_shards_with_index(folder):
    out = shards(folder)
    assert len(list(out.glob("*.safetensors"))) > 2
    spec, again = read_model(folder), read_model(out)
    assert all(torch.equal(Reader(spec.tensors)(n), Reader(again.tensors)(n)) for n in spec.tensors)


def test_missing_shard_and_wrong_index(folder):
    out = shards(folder)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    first = index["weight_map"]["model.norm.weight"]
    moved = shutil.move(out / first, out.parent / first)
    fails(out, f"{first}: file is missing")
    shutil.move(moved, out / first)
    other = next(f for f in index["weight_map"].values() if f != first)
    index["weight_map"]["model.norm.weight"] = other
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(out, "the index places model.norm.weight in")
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "../../outside.safetensors"}}))
    fails(out, "no valid weight_map")


def test_export_refuses_what_exists_and_leaves_nothing_half_done(folder, tmp_path):
    spec = read_model(folder)
    read = Reader(spec.tensors)
    with pytest.raises(UserError, match="exists already"):
        export_hf(spec, folder, [])
    with pytest.raises(Exception, match="tensors were written where the model has"):
        export_hf(spec, tmp_path / "out", [("model.norm.weight", read("model.norm.weight"))])
    assert not (tmp_path / "out").exists()


def test_export_in_another_dtype(folder, tmp_path):
    spec = read_model(folder)
    read = Reader(spec.tensors)
    export_hf(spec, tmp_path / "half", ((n, read(n)) for n in spec.tensors), dtype="bfloat16")
    assert {i.dtype for i in read_folder(tmp_path / "half").values()} == {"BF16"}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    half = read_model(tmp_path / "half")
    assert torch.equal(Reader(half.tensors)("lm_head.weight"), read("lm_head.weight").bfloat16())
