"""Writing classic Megatron folders: each file is made at its full size with its pickle first, then its tensors are written in place."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcli.checkpoint.classic import FILE, LATEST
from rlcli.checkpoint.classic_names import Raw, canonical, mindspeed
from rlcli.checkpoint.regions import Region
from rlcli.checkpoint.target import HF_FOLDER, Slot, Target, copy_companions
from rlcli.checkpoint.unpickle import load_plain
from rlcli.errors import UserError
from rlcli.models.layout import Layout
from rlcli.models.megatron import local_rules
from rlcli.models.rules import Rule


def rank_folders(layout: Layout, extend: bool) -> Iterator[tuple[str, Layout]]:
    """(name, layout) of every mp_rank folder. extend: `layout.expert` counts the experts' ranks over EEE and TT together."""
    expert = layout.expert // layout.tensor if extend else layout.expert
    for tt in range(layout.tensor):
        for ee in range(expert):
            if not extend and layout.expert_tensor < layout.tensor and not _meets(tt, ee, layout.tensor, expert):
                continue
            for pp in range(layout.pipeline):
                name = f"mp_rank_{tt:02d}" + (f"_{pp:03d}" if layout.pipeline > 1 else "") + (f"_{ee:03d}" if expert > 1 else "")
                yield name, replace(layout, tensor_rank=tt, pipeline_rank=pp, expert_rank=ee * layout.tensor + tt if extend else ee,
                                    expert_tensor_rank=tt if layout.expert_tensor > 1 else 0)


def _meets(tt: int, ee: int, tensor: int, expert: int) -> bool:
    """With expert tensor parallel size 1, ranks count TT and EEE side by side, so that only some pairs exist."""
    return tt % expert == ee if tensor % expert == 0 else ee % tensor == tt


class ClassicTarget(Target):
    """Writes classic folders. `extend`: experts dealt over TP as MindSpeed's moe_tp_extend_ep; `names`: "mindspeed" or "megatron"."""

    format = "classic"
    extend = False
    names = "mindspeed"

    def create(self) -> None:
        layout = self.layout
        if layout.expert_tensor not in (1, layout.tensor):
            raise UserError(f"classic folders hold experts split over tp={layout.tensor} or whole; --etp {layout.expert_tensor} cannot be written so")
        sparse = self.spec.experts and not self.extend and layout.expert_tensor < layout.tensor
        if sparse and layout.tensor % layout.expert and layout.expert % layout.tensor:
            raise UserError(f"with --etp 1, tp={layout.tensor} and ep={layout.expert} must divide one another")
        super().create()

    def bytes(self) -> int:
        total = 0
        for _, at in rank_folders(self.layout, self.extend):
            for chunk in range(self.layout.virtual):
                total += sum(Region(self.folder, r.dtype, r.shape, 0).bytes for r in self._raw(replace(at, chunk=chunk)).values())
        return total

    def _raw(self, at: Layout) -> dict[str, Raw]:
        """The state dict of one chunk, by the names it is written under."""
        rules = local_rules(self.spec, at)
        shapes = {name: Raw(rule.shape(self._parts(rule, at)[0]), self.dtype_of(rule)) for name, rule in rules.items()}
        return mindspeed(shapes, self.spec) if self.names == "mindspeed" else shapes

    def joined(self, rule: Rule) -> str:
        return next(iter(mindspeed({rule.name: Raw(rule.shape(1), "")}, self.spec))) if self.names == "mindspeed" else rule.name

    def _parts(self, rule: Rule, at: Layout) -> tuple[int, int]:
        """(parts, rank) of a rule in one folder; MindSpeed's joint MLA projections are whole on every rank."""
        if self.names == "mindspeed" and rule.name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight")):
            return 1, 0
        if self.names == "mindspeed" and self.spec.transformer.get("multi_latent_attention") and rule.name.endswith("linear_q_proj.weight"):
            return 1, 0
        return at.split(rule.expert is not None)

    def prepare(self) -> None:
        self.inner = self.partial / f"iter_{(self.step or 1):07d}"
        for name, at in rank_folders(self.layout, self.extend):
            (self.inner / name).mkdir(parents=True)
            chunks = [replace(at, chunk=c) for c in range(self.layout.virtual)]
            self._skeleton(self.inner / name / FILE, [self._raw(c) for c in chunks])
            self._find_slots(self.inner / name / FILE, chunks)

    def _skeleton(self, path: Path, states: list[dict[str, Raw]]) -> None:
        """The file as torch.save writes it, with room where the tensors' bytes will be."""
        import torch

        keys = ["model"] if len(states) == 1 else [f"model{i}" for i in range(len(states))]
        content: dict[str, Any] = {"args": self._args(), "checkpoint_version": 3.0, "iteration": (self.step or 1)}
        for key, state in zip(keys, states, strict=True):
            content[key] = {n: torch.empty(raw.shape, dtype=getattr(torch, raw.dtype)) for n, raw in state.items()}
        with torch.serialization.skip_data():
            torch.save(content, path)

    def _find_slots(self, path: Path, chunks: list[Layout]) -> None:
        loaded = load_plain(path)
        for i, at in enumerate(chunks):
            regions = canonical(loaded["model" if len(chunks) == 1 else f"model{i}"], self.spec, self.layout.expert_tensor, str(path))
            for name, rule in local_rules(self.spec, at).items():
                self.slots.setdefault(rule.name, []).append(Slot(regions[name], *self._parts(rule, at)))

    def _args(self) -> argparse.Namespace:
        """What Megatron compares on loading, and how experts are laid out."""
        spec, layout = self.spec, self.layout
        return argparse.Namespace(
            num_layers=spec.layers, hidden_size=spec.hidden, num_attention_heads=spec.heads, num_query_groups=spec.kv_heads, kv_channels=spec.head_dim,
            ffn_hidden_size=spec.ffn, num_experts=spec.experts or None, padded_vocab_size=-(-spec.vocab // layout.tensor) * layout.tensor,
            max_position_embeddings=spec.max_positions, untie_embeddings_and_output_weights=not spec.tied, add_qkv_bias=spec.qkv_bias,
            qk_layernorm=spec.qk_norm, tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert // layout.tensor if self.extend else layout.expert,
            expert_tensor_parallel_size=layout.tensor if self.extend else layout.expert_tensor, moe_tp_extend_ep=self.extend,
            moe_grouped_gemm=bool(spec.experts) and self.names == "mindspeed",
        )

    def close(self) -> None:
        (self.partial / LATEST).write_text(f"{(self.step or 1)}\n", encoding="utf-8")
        copy_companions(self.spec, self.partial / HF_FOLDER)
