"""Make a tiny random model as an HF folder with a byte-level tokenizer: seconds on a CPU, and every part of the real thing.

Every weight is random and none is at its usual start (norms are not 1, biases are not 0), so that a weight left out or mixed up shows in the logits.

    python scripts/make_tiny_model.py --kind qwen3 --out /tmp/tiny
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

CONFIGS = {
    "llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "mistral": "MistralConfig", "qwen3_moe": "Qwen3MoeConfig",
    "deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config",
}
KINDS = tuple(CONFIGS)
MLA = {  # the ranks and rotary size are those of the real models: vLLM's kernels take no others
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 96, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
}
VOCABULARY = 320  # 256 bytes, 3 special tokens, and room: divisible by 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are the 256 bytes and three special tokens: any text survives the round trip."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def make_config(kind: str, tie: bool, layers: int) -> Any:
    """The transformers configuration of a tiny model: hidden size 128, 4 heads of 32 over 2 key-value heads (DeepSeek: 4 heads of MLA)."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tie,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    if kind.startswith("deepseek"):
        shape.pop("head_dim")
        groups = {"topk_method": "greedy", "n_group": 1, "q_lora_rank": None} if kind == "deepseek_v2" else {"topk_method": "noaux_tc", "n_group": 2}
        shape |= MLA | groups | {"topk_group": 1}
    if kind == "qwen2":
        shape.pop("head_dim")  # derived from hidden size and heads
    if kind == "mistral":
        shape["sliding_window"] = None
    if kind == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return getattr(transformers, CONFIGS[kind])(**shape)


def make_model(folder: Path, kind: str = "llama", tie: bool = False, layers: int = 2, seed: int = 1, dtype: str = "float32") -> Path:
    """Write config, safetensors, generation config and tokenizer into `folder`; the same arguments give the same bytes."""
    import torch
    import transformers

    config = make_config(kind, tie, layers)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.08 * noise)
    model.tie_weights()
    make_tokenizer(folder)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="llama")
    parser.add_argument("--tie", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(make_model(args.out, args.kind, args.tie, args.layers, args.seed, args.dtype))


if __name__ == "__main__":
    main()
