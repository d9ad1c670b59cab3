"""Tiny HF folders of every family, made from a config alone, and their tensors read without the product's readers."""

import json
import struct
from pathlib import Path

import torch

from rlcli.models.registry import read_config

DENSE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
MLA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50, "kv_lora_rank": 12, "q_lora_rank": 20,
       "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
       "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 64}
FAMILIES = {
    "llama": {**DENSE, "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "qwen2_tied": {**DENSE, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "vocab_size": 51},
    "qwen3": {**DENSE, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "mistral": {**DENSE, "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen3_moe": {**DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "decoder_sparse_step": 2, "norm_topk_prob": True},
    "deepseek_v2": {**MLA, "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**MLA, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2},
}
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """By the format's definition, not by the library or the product."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(folder: Path) -> dict[str, tuple]:
    """(dtype, shape, bytes) of every tensor in a folder's files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.read_bytes()
        length = struct.unpack("<Q", blob[:8])[0]
        for name, info in json.loads(blob[8 : 8 + length]).items():
            if name != "__metadata__":
                low, high = info["data_offsets"]
                found[name] = (info["dtype"], tuple(info["shape"]), blob[8 + length + low : 8 + length + high])
    return found


def make_hf(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **changes) -> Path:
    """A HF folder with random weights, every value different from its neighbours."""
    config = FAMILIES[family] | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    generator = torch.Generator().manual_seed(3)
    shapes = {s.name: s.shape for rule in read_config(config, folder).rules for s in rule.sources}
    tensors = {n: torch.randn(shape, generator=generator).to(torch.float32 if "correction_bias" in n else dtype) for n, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def load_hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as torch tensors."""
    dtypes = {v: k for k, v in CODES.items()}
    return {n: torch.frombuffer(bytearray(raw), dtype=dtypes[code]).view(shape) for n, (code, shape, raw) in read_safetensors(folder).items()}
