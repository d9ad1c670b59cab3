"""Every family to every Megatron format at three layouts and back, and what came back generating in transformers and in vLLM.

    python scripts/check_conversions.py [--model SmolLM2] [--no-generate]

A row is one layout of one model. "there" and "back" name the formats where the conversion was verified, every tensor of the two sides compared, and where
the HF folder that came back is that which went in, bit by bit, read by the safetensors library. Tiny models have random weights; DeepSeek's are in bfloat16,
the only dtype in which vLLM computes its experts on a CPU. "tokens" compares 16 greedy tokens of two prompts with those of the folder that went in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from make_tiny_model import KINDS, make_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from rlcli.checkpoint.convert import Conversion, convert  # noqa: E402
from rlcli.models.layout import Layout  # noqa: E402

FORMATS = ("mcore", "torch_dist", "classic")
DENSE = {"tp2": Layout(tensor=2), "pp2": Layout(pipeline=2), "tp2 pp2": Layout(tensor=2, pipeline=2)}
EXPERTS = {"tp2": Layout(tensor=2), "ep2 etp1": Layout(expert=2, expert_tensor=1), "tp2 pp2 ep2": Layout(tensor=2, pipeline=2, expert=2, expert_tensor=1)}
THIRDS = {"tp3": Layout(tensor=3), "pp2": Layout(pipeline=2), "tp3 pp2": Layout(tensor=3, pipeline=2)}  # 9 heads, 3 of them of key-values
PROMPTS = [list(range(10, 40)), list(range(97, 123))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a HF folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """The same names, dtypes and bits."""
    return first.keys() == second.keys() and all(
        t.dtype == second[n].dtype and t.shape == second[n].shape and t.contiguous().view(torch.uint8).equal(second[n].contiguous().view(torch.uint8))
        for n, t in first.items()
    )


def tokens(who: str, folder: Path, dtype: str) -> list[list[int]] | str:
    """Greedy tokens of a folder in a process of its own, or why there are none."""
    words = [sys.executable, str(ROOT / "scripts" / "generate_with.py"), who, str(folder), dtype, "16", json.dumps(PROMPTS)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    if run.returncode:
        return (run.stderr.strip().splitlines() or ["no message"])[-1]
    found: list[list[int]] = json.loads(run.stdout.splitlines()[-1])
    return found


def check(name: str, model: Path, layouts: dict[str, Layout], dtype: str, generate: bool, work: Path) -> bool:
    """Print a row for each layout; whether all is well."""
    original, well, back = weights(model), True, work / "none"
    for label, layout in layouts.items():
        there, returned, verified = [], [], 0
        for to in FORMATS:
            made, back = work / f"{label} {to}", work / f"{label} {to} back"
            verified = convert(Conversion(model, made, to, layout=layout)).verified
            there.append(to)
            convert(Conversion(made, back, "hf"))
            if same(original, weights(back)):
                returned.append(to)
        well = well and returned == there
        print(f"{name:12s} {label:12s} {verified:5d} parameters   there {', '.join(there)}   back {', '.join(returned)}", flush=True)
    if generate:
        found = {(who, folder): tokens(who, folder, dtype) for who in ("transformers", "vllm") for folder in (model, back)}
        equal = [found[who, model] == found[who, back] and isinstance(found[who, back], list) for who in ("transformers", "vllm")]
        words = ["as before" if e else f"NOT as before: {found[w, back]}" for w, e in zip(("transformers", "vllm"), equal, strict=True)]
        both = "equal" if found["transformers", back] == found["vllm", back] else "not equal"
        well = well and all(equal)
        print(f"{name:12s} tokens: transformers {words[0]}, vLLM {words[1]}; the two {both} ({dtype})", flush=True)
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a model beside the tiny ones, whose heads and key-value heads three divides")
    parser.add_argument("--no-generate", dest="generate", action="store_false")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    well = True
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        for kind in KINDS:
            dtype = "bfloat16" if kind.startswith("deepseek") else "float32"
            model = make_model(work / kind / "hf", kind, tie=kind == "qwen2", layers=4, dtype=dtype)
            well = check(kind, model, EXPERTS if "moe" in kind or "deepseek" in kind else DENSE, dtype, options.generate, work / kind) and well
        if options.model:
            well = check(options.model.name, options.model, THIRDS, "float32", options.generate, work / "given") and well
    print("all as it should be" if well else "NOT all as it should be")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
