"""Writing Megatron's distributed checkpoints: every tensor is one record of torch.save in one file, laid out first and filled in as it comes."""

from __future__ import annotations

from rlcli.checkpoint.dist_format import keys_of
from rlcli.checkpoint.dist_records import Placed, bytes_of, describe, frame
from rlcli.checkpoint.regions import Region
from rlcli.checkpoint.target import HF_FOLDER, Slot, Target, copy_companions
from rlcli.models.rules import Rule, padded

DATA = "__0_0.distcp"
# Megatron-core's linear layers without Transformer Engine save an empty "extra state", which loading asks for.
LINEAR = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
          "linear_kv_down_proj", "linear_kv_up_proj")


class DistTarget(Target):
    """Writes a torch_dist checkpoint. The layout only pads the vocabulary; the files serve any."""

    format = "torch_dist"

    def joined(self, rule: Rule) -> str:
        return keys_of(rule, self.spec)[0].name

    def _rules(self) -> list[Rule]:
        return [rule for rule in self.spec.rules if not rule.copy]

    def _shape(self, rule: Rule) -> tuple[int, ...]:
        shape = rule.shape(1)
        return (padded(shape[0], self.layout.tensor), *shape[1:]) if rule.order == "padded" else shape

    def bytes(self) -> int:
        return sum(Region(self.folder, self.dtype_of(r), self._shape(r), 0).bytes for r in self._rules())

    def prepare(self) -> None:
        self.placed: list[Placed] = []
        at = 0
        with open(self.partial / DATA, "wb") as f:
            for rule in self._rules():
                key, shape, dtype = keys_of(rule, self.spec)[0], self._shape(rule), self.dtype_of(rule)
                box = (*(1,) * len(key.index), *shape)
                head, tail, size = frame(box, dtype)
                f.seek(at)
                f.write(head)
                f.seek(at + len(head) + size)
                f.write(tail)
                region = Region(self.partial / DATA, dtype, shape, at + len(head))
                self.slots[rule.name] = [Slot(region, 1, 0)]
                length = len(head) + size + len(tail)
                self.placed.append(Placed(key.name, DATA, at, length, dtype, (*key.counts, *shape), (*key.index, *(0,) * len(shape)), box))
                at += length
            for name in self._extra_states():
                record = bytes_of([None])
                f.write(record)
                self.placed.append(Placed(name, DATA, at, len(record)))
                at += len(record)

    def _extra_states(self) -> list[str]:
        names = []
        for rule in self._rules():
            key = keys_of(rule, self.spec)[0]
            module, _, last = key.name.rpartition(".")
            if last == "weight" and module.rpartition(".")[2] in LINEAR:
                index, counts = (".".join(map(str, x)) for x in (key.index or (0,), key.counts or (1,)))
                names.append(f"{module}._extra_state/shard_{index}_{counts}")
        return names

    def close(self) -> None:
        describe(self.partial, self.placed, {"iteration": self.step or 0, "checkpoint_version": 3.0})
        copy_companions(self.spec, self.partial / HF_FOLDER)
