"""Greedy tokens of a HF folder by vLLM or by transformers, as anybody would call them: run in a process of its own.

    python generate_with.py vllm|transformers FOLDER DTYPE COUNT '[[1, 2, 3], ...]'      the last line of its output is the tokens as JSON
"""

import json
import os
import sys


def by_vllm(folder: str, dtype: str, count: int, prompts: list[list[int]]) -> list[list[int]]:
    """By vLLM's offline engine, in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, disable_log_stats=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def by_transformers(folder: str, dtype: str, count: int, prompts: list[list[int]]) -> list[list[int]]:
    """By transformers, one token after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    found = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


if __name__ == "__main__":
    who, folder, dtype, count, prompts = sys.argv[1:]
    tokens = (by_vllm if who == "vllm" else by_transformers)(folder, dtype, int(count), json.loads(prompts))
    print(json.dumps(tokens), flush=True)
    os._exit(0)  # vLLM's process groups warn when they are torn down
