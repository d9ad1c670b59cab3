"""Records of torch.save whose like was read before: a checkpoint holds thousands, and opening each as a zip costs more than moving its bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rlcli.checkpoint.regions import Region

ZIP_END = 22  # bytes of a zip's last record, which counts what the zip holds and where


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a tensor's bytes in its record: the same for all tensors of a shape and dtype that one program wrote."""

    head: bytes  # the pickle and all else before the tensor's bytes
    end: bytes
    length: int  # of the record
    region: Region

    @classmethod
    def around(cls, region: Region, start: int, length: int) -> Frame:
        """That of the record [start, start + length) of a file, which was parsed and holds the tensor `region`."""
        with open(region.file, "rb", buffering=0) as f:
            head, end = os.pread(f.fileno(), region.start - start, start), os.pread(f.fileno(), ZIP_END, start + length - ZIP_END)
        return cls(head, end, length, region)

    def find(self, path: Path, start: int) -> Region | None:
        """The tensor of another record of this length, at `start`; None where something else stands around it: then it must be parsed."""
        try:
            with open(path, "rb", buffering=0) as f:
                head, end = os.pread(f.fileno(), len(self.head), start), os.pread(f.fileno(), ZIP_END, start + self.length - ZIP_END)
        except OSError:
            return None  # parsing will name the fault
        return replace(self.region, file=path, start=start + len(head)) if (head, end) == (self.head, self.end) else None
