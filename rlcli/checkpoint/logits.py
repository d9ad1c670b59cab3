"""Logits of a stored model on a few tokens: of a HF folder by transformers, of any Megatron folder by Megatron-core itself.

Run as a process of its own (`python -m rlcli.checkpoint.logits FOLDER OUT [MODEL]`): Megatron changes the process it is in. All in float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.checkpoint.formats import open_stored
from rlcli.checkpoint.stored import Stored
from rlcli.errors import RunError
from rlcli.models.load import pair
from rlcli.models.megatron import gpt_arguments, transformer_config
from rlcli.models.rules import join
from rlcli.platforms import precision

if TYPE_CHECKING:
    import torch

SEQUENCES, TOKENS = 4, 32


def compare(first: Path, second: Path, model: Path | None = None, extend: bool | None = None) -> tuple[float, float]:
    """(largest |difference|, standard deviation) of two folders' logits on the same random tokens; RunError where one cannot be computed."""
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        outs = []
        for i, folder in enumerate((first, second)):
            out = Path(scratch) / f"{i}.pt"
            words = [str(folder.resolve()), str(out), str(model.resolve() if model else ""), "" if extend is None else str(int(extend))]
            command = [sys.executable, "-m", "rlcli.checkpoint.logits", *words]
            run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[2])
            if run.returncode:
                raise RunError(f"{folder}: logits could not be computed: {(run.stderr.strip().splitlines() or ['no message'])[-1]}")
            outs.append(torch.load(out, weights_only=True))
            if not bool(torch.isfinite(outs[-1]).all()):
                raise RunError(f"{folder}: logits are not finite, so that they cannot be compared; msrl ckpt verify finds weights that are not")
    return float((outs[0] - outs[1]).abs().max()), float(outs[0].std())


def logits(stored: Stored) -> torch.Tensor:
    """Logits [SEQUENCES, TOKENS, vocabulary] of a stored model."""
    import torch

    precision.settle()
    ids = torch.randint(0, stored.spec.vocab, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return _transformers(stored, ids) if stored.format == "hf" else _megatron(stored, ids)


def _transformers(stored: Stored, ids: torch.Tensor) -> torch.Tensor:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(stored.folder, dtype=torch.float32, attn_implementation="eager")
    return model(ids).logits


def _megatron(stored: Stored, ids: torch.Tensor) -> torch.Tensor:
    """One rank of Megatron's own local layers, its weights put together from all shards."""
    import torch

    model = _build(stored)
    rules = {s.name: rule for rule in stored.spec.rules if not rule.copy for s in rule.sources}

    def read(name: str, axis: int | None, start: int, stop: int) -> torch.Tensor:
        rule = rules[name]
        whole = stored.tensors(rule)[[s.name for s in rule.sources].index(name)]
        return whole if axis is None else whole.narrow(axis, start, stop - start)

    for rule, live in pair(model, stored.spec, type(stored.layout)()):
        live.copy_(join(rule, 1, 0, read))
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, None)[..., : stored.spec.vocab]


def _build(stored: Stored) -> Any:
    from rlcli.platforms.cpu import CpuPlatform

    CpuPlatform().before_megatron()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads the name even without Transformer Engine
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})  # 0.16 asks isinstance of it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    arguments = transformer_config(stored.spec, 1, 1, torch.float32)
    config = (MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig)(**arguments)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if arguments.get("multi_latent_attention"):
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=_core_attention())
    return GPTModel(config, block, **gpt_arguments(stored.spec, 1)).eval()


def _core_attention() -> Any:
    """A causal attention whose values may be narrower than its keys, which MLA needs and Megatron's own without Transformer Engine is not."""
    import torch.nn.functional as F
    from megatron.core.transformer.module import MegatronModule

    class CoreAttention(MegatronModule):
        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, n, d] -> [b, n, s, d]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    return CoreAttention


def main(folder: str, out: str, model: str = "", extend: str = "") -> None:
    """Write the logits of `folder` to `out`."""
    import torch

    stored = open_stored(Path(folder), None, Path(model) if model else None, None if extend == "" else bool(int(extend)), unfinished=True)
    torch.save(logits(stored).float().clone(), out)
    sys.stdout.flush()
    os._exit(0)  # Megatron leaves process groups that warn when torn down


if __name__ == "__main__":
    main(*sys.argv[1:])
