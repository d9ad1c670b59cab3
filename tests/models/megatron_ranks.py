"""Run by test_megatron.py in processes of its own: builds Megatron models of HF folders at a layout, loads them, and writes what it finds.

    python megatron_ranks.py RANK WORLD STORE JOBS.json      a job: {folder, tensor, pipeline, expert, logits?, export?, save?, load?}
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlcli.platforms import megatron_cpu

megatron_cpu.install()
warnings.filterwarnings("ignore")

from megatron.core import dist_checkpointing, tensor_parallel  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from rlcli.models.export import HfWriter  # noqa: E402
from rlcli.models.gather import Groups, hf_tensors  # noqa: E402
from rlcli.models.layout import Layout  # noqa: E402
from rlcli.models.load import load_hf  # noqa: E402
from rlcli.models.megatron import gpt_arguments, transformer_config  # noqa: E402
from rlcli.models.registry import read_model  # noqa: E402
from rlcli.models.spec import ModelSpec  # noqa: E402

IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(7))


def build(spec: ModelSpec, layout: Layout) -> GPTModel:
    """The GPTModel of this rank, by Megatron's own local specs."""
    arguments = transformer_config(spec, layout.tensor, layout.pipeline, torch.float32, expert_model_parallel_size=layout.expert)
    if spec.experts:
        arguments["expert_tensor_parallel_size"] = layout.expert_tensor
    kind = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    config = kind(**arguments)
    if spec.experts:
        layer_spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        layer_spec = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    ends = {"pre_process": ps.is_pipeline_first_stage(), "post_process": ps.is_pipeline_last_stage()}
    return GPTModel(config, layer_spec, **ends, **gpt_arguments(spec, layout.tensor)).eval()


def run(job: dict[str, Any]) -> None:
    """Load one folder at one layout; rank 0 writes logits, all ranks write the exported folder."""
    expert = job.get("expert", 1)
    ps.initialize_model_parallel(job["tensor"], job["pipeline"], expert_model_parallel_size=expert, expert_tensor_parallel_size=1 if expert > 1 else job["tensor"])
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layout = Layout(
        tensor=job["tensor"], tensor_rank=ps.get_tensor_model_parallel_rank(), pipeline=job["pipeline"],
        pipeline_rank=ps.get_pipeline_model_parallel_rank(), expert=expert, expert_rank=ps.get_expert_model_parallel_rank(),
        expert_tensor=ps.get_expert_tensor_parallel_world_size(), expert_tensor_rank=ps.get_expert_tensor_parallel_rank(),
    )
    spec = read_model(job["folder"])
    model = build(spec, layout)
    if "load" in job:
        with torch.no_grad():
            model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, job["load"])["model"])
    else:
        load_hf(model, spec, layout)
    if "save" in job:
        if dist.get_rank() == 0:
            Path(job["save"]).mkdir()
        dist.barrier()
        dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 3}, job["save"])
    if "logits" in job:
        positions = torch.arange(IDS.shape[1]).expand_as(IDS)
        with torch.no_grad():
            torch.save(model(IDS, positions, None)[..., : spec.vocab].contiguous(), job["logits"])
    if "export" in job:
        export(job, model, spec, layout)
    ps.destroy_model_parallel()


def export(job: dict[str, Any], model: GPTModel, spec: ModelSpec, layout: Layout) -> None:
    """Every rank writes what it owns into one folder, replicas left out."""
    writer = HfWriter(spec, job["export"], shard_bytes=300_000)
    if dist.get_rank() == 0:
        writer.create()
    dist.barrier()
    tensors = hf_tensors(model, spec, layout, Groups(ps.get_tensor_model_parallel_group(), ps.get_expert_tensor_parallel_group()))
    dense, experts = ps.get_data_parallel_rank() == 0, ps.get_expert_data_parallel_rank() == 0
    count = torch.tensor(writer.write((n, t) for n, t in tensors if (experts if ".experts." in n else dense)))
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        writer.finish(int(count))
    dist.barrier()


def main() -> None:
    rank, world, store, jobs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(Path(sys.argv[4]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    megatron_cpu.patch_megatron(torch.optim.AdamW)
    for job in jobs:
        run(job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
