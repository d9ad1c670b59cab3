"""The weight tables against live Megatron models: logits equal transformers', and any layout gives back the very bytes it was loaded from."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcli.models.files import read_folder

pytestmark = pytest.mark.engine
KINDS = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe")
CASES = [(kind, tie) for kind in KINDS for tie in (False, True)]
VARIANTS = {  # a kind with config.json changed, in both spellings of rope
    "llama3": ("llama", {"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "theta": ("qwen3", {"rope_parameters": None, "rope_theta": 1000000.0}),
    "unnormalised": ("qwen3_moe", {"norm_topk_prob": False}),
}
LAYOUTS = [("tp2_pp2", 2, 2, 1), ("pp2", 1, 2, 1), ("tp2", 2, 1, 1)]


def run_ranks(folder: Path, world: int, jobs: list[dict]) -> None:
    """Run megatron_ranks.py in `world` processes; their last words on failure."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script, root = Path(__file__).with_name("megatron_ranks.py"), Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [str(world), str(folder / "store"), str(folder / "jobs.json")]
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(world)
    ]
    try:
        outputs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(o[-2000:] for o in outputs)


@pytest.fixture(scope="module")
def logits(tmp_path_factory, tiny_model_factory):
    folder = tmp_path_factory.mktemp("logits")
    folders = {f"{kind}-{tie}": tiny_model_factory(kind, tie) for kind, tie in CASES}
    for name, (kind, changes) in VARIANTS.items():
        folders[name] = Path(shutil.copytree(tiny_model_factory(kind, False), folder / name))
        change_config(folders[name], changes)
    run_ranks(folder, 1, [{"folder": str(f), "tensor": 1, "pipeline": 1, "logits": str(folder / f"{name}.pt")} for name, f in folders.items()])
    return {name: (f, torch.load(folder / f"{name}.pt")) for name, f in folders.items()}


def change_config(folder: Path, changes: dict) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("name", [*(f"{kind}-{tie}" for kind, tie in CASES), *VARIANTS])
def test_logits_equal_transformers(name, logits):
    import transformers

    folder, found = logits[name]
    ids = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(7))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(ids).logits
    assert expected.std() > 0.3  # else closeness would say little
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


def test_variants_matter(logits):
    plain = logits["llama-False"][1]
    assert all((logits[name][1] - plain).abs().max() > 1e-2 for name in ("llama3", "linear"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_model_factory):
    folder = tmp_path_factory.mktemp("exported")
    jobs = [
        {"folder": str(tiny_model_factory(kind, tie)), "tensor": tp, "pipeline": pp, "expert": ep, "export": str(folder / f"{kind}-{tie}-{name}")}
        for kind, tie in (("qwen2", True), ("qwen3", False), ("llama", True), ("qwen3_moe", False))
        for name, tp, pp, ep in LAYOUTS
    ]
    jobs.append({"folder": jobs[-1]["folder"], "tensor": 1, "pipeline": 1, "expert": 4, "export": str(folder / "qwen3_moe-False-ep4")})
    run_ranks(folder, 4, jobs)
    return [(Path(job["folder"]), Path(job["export"])) for job in jobs]


def test_export_of_every_layout_is_bit_equal(exported):
    for source, copy in exported:
        assert tensors_bytes(copy) == tensors_bytes(source), copy.name


def test_export_loads_in_transformers_with_its_tokenizer(exported):
    import transformers

    source, copy = exported[0]
    ids = torch.tensor([[1, 2, 3, 4]])
    models = [transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (source, copy)]
    with torch.no_grad():
        torch.testing.assert_close(models[1](ids).logits, models[0](ids).logits, atol=0, rtol=0)
    tokenizers = [transformers.AutoTokenizer.from_pretrained(f) for f in (source, copy)]
    chat = [t.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) for t in tokenizers]
    assert chat[0] == chat[1]
    assert json.loads((copy / "generation_config.json").read_text()) == json.loads((source / "generation_config.json").read_text())


def tensors_bytes(folder: Path) -> dict[str, tuple]:
    """Each tensor's dtype, shape and bytes, read without the product's reader of slices."""
    found = {}
    for name, info in read_folder(folder).items():
        with open(info.file, "rb") as f:
            f.seek(info.start)
            found[name] = (info.dtype, info.shape, f.read(info.stop - info.start))
    return found


@pytest.fixture(scope="module")
def distributed(tmp_path_factory, tiny_model_factory):
    """Checkpoints of Megatron's own saving at one layout, and ours loaded by Megatron at another."""
    from rlcli.checkpoint.convert import Conversion, convert
    from rlcli.models.layout import Layout

    folder, jobs = tmp_path_factory.mktemp("distributed"), []
    for kind, tie in (("qwen2", True), ("qwen3_moe", False)):
        source = tiny_model_factory(kind, tie)
        convert(Conversion(source, folder / f"{kind}-ours", "torch_dist", layout=Layout(tensor=2)))
        jobs.append({"folder": str(source), "tensor": 2, "pipeline": 1, "save": str(folder / f"{kind}-theirs")})
        jobs.append({"folder": str(source), "tensor": 1, "pipeline": 2, "load": str(folder / f"{kind}-ours"), "export": str(folder / f"{kind}-loaded")})
    run_ranks(folder, 2, jobs)
    return folder


@pytest.mark.parametrize(("kind", "tie"), [("qwen2", True), ("qwen3_moe", False)])
def test_distributed_checkpoints_with_megatron(kind, tie, distributed, tiny_model_factory):
    """Megatron loads what msrl converted, and msrl converts what Megatron saved: bit for bit."""
    from rlcli.checkpoint.convert import Conversion, convert

    source = tiny_model_factory(kind, tie)
    assert tensors_bytes(distributed / f"{kind}-loaded") == tensors_bytes(source)
    convert(Conversion(distributed / f"{kind}-theirs", distributed / f"{kind}-back", "hf", model=source))
    assert tensors_bytes(distributed / f"{kind}-back") == tensors_bytes(source)
