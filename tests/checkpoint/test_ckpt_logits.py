"""MLA, shared experts and both routers: logits of a converted DeepSeek, by Megatron, equal those of its HF folder, by transformers."""

import pytest
import torch

from rlcli.checkpoint.convert import Conversion, convert
from rlcli.checkpoint.logits import compare
from rlcli.models.layout import Layout


@pytest.mark.engine
@pytest.mark.parametrize("version", ["V2", "V3"])
def test_logits_of_deepseek(version, tmp_path):
    import transformers

    shape = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 32, "q_lora_rank": 48 if version == "V3" else None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    }
    shape |= {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5} if version == "V3" else {"topk_method": "greedy"}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"Deepseek{version}Config")(**shape), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *(b for b in model.named_buffers() if "correction" in b[0])]:
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.12 * noise)
    model.save_pretrained(tmp_path / "hf")
    convert(Conversion(tmp_path / "hf", tmp_path / "out", "classic", layout=Layout(tensor=2, expert=2), extend=True))
    difference, spread = compare(tmp_path / "hf", tmp_path / "out")
    assert spread > 0.3
    assert difference < 5e-5
