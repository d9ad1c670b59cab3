"""Tensors as ranges of bytes in files, whatever the file's format: read by mapping, written in place, both without a second copy in memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import RunError, UserError

if TYPE_CHECKING:
    import torch

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_BLOCK = 1 << 18  # bytes that are gathered, converted or compared at once: they stay in the processor's cache
_FLUSH = 64 << 20  # bytes written until the disk is set to work
_memcmp = ctypes.CDLL(None).memcmp  # runs without the interpreter's lock
_PREFAULT = 22  # MADV_POPULATE_READ (Linux 5.14): one call instead of a fault for every few pages


@dataclass(frozen=True, slots=True)
class Region:
    """A dense tensor of torch's dtype name at byte `start` of `file`. `shape` is the stored one; transposed: the tensor meant is its transpose."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    transposed: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def meant(self) -> tuple[int, ...]:
        """Shape of the tensor that is read."""
        return self.shape[::-1] if self.transposed else self.shape


def read_region(region: Region) -> torch.Tensor:
    """The tensor, mapped from the file: its pages are read when touched and dropped with it. Do not write to it."""
    import torch

    dtype = getattr(torch, region.dtype)
    if region.bytes == 0:
        return torch.empty(region.meant, dtype=dtype)
    base = region.start - region.start % mmap.ALLOCATIONGRANULARITY
    lead = region.start - base
    try:
        with open(region.file, "rb") as f:
            if os.fstat(f.fileno()).st_size < region.start + region.bytes:
                raise UserError(f"{region.file}: truncated; {region.start + region.bytes} bytes are needed")
            mapped = mmap.mmap(f.fileno(), lead + region.bytes, access=mmap.ACCESS_COPY, offset=base)
    except OSError as e:
        raise UserError(f"{region.file}: cannot be read ({e})") from None
    with contextlib.suppress(OSError, AttributeError, ValueError):  # an older kernel: the pages come one by one
        mapped.madvise(_PREFAULT)
    tensor = torch.frombuffer(mapped, dtype=dtype, count=math.prod(region.shape), offset=lead).view(region.shape)
    return tensor.t() if region.transposed else tensor


class RegionWriter:
    """Writes tensors to their places in files that exist already with their full size. Several threads may use one.

    One more sees what was written to the disk, so that the disk is at work while the next tensors are read and gathered.
    """

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._unseen = 0  # bytes written since the disk was last set to work
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flushing: Future[None] | None = None

    def write(self, region: Region, tensor: torch.Tensor) -> None:
        """Put `tensor` into its place, converted to the region's dtype; RunError where the shapes differ."""
        import torch

        if tuple(tensor.shape) != region.meant:
            raise RunError(f"{region.file}: a tensor of shape {list(tensor.shape)} does not fit the place of one of {list(region.meant)}")
        stored = tensor.detach().to("cpu", getattr(torch, region.dtype))
        stored = (stored.t() if region.transposed else stored).contiguous()
        if stored.numel():
            self._put(region.file, stored, region.start)

    def write_rows(self, region: Region, row: int, tensor: torch.Tensor) -> None:
        """Put rows into their place from row `row` of the region on, straight from where they lie in memory if dtype and layout allow."""
        import torch

        if tuple(tensor.shape[1:]) != region.shape[1:] or row + tensor.shape[0] > region.shape[0] or region.transposed:
            raise RunError(f"{region.file}: rows of shape {list(tensor.shape)} do not fit at row {row} of {list(region.shape)}")
        width = math.prod(region.shape[1:]) * SIZES[region.dtype]
        step = max(_BLOCK // max(width, 1), 1) if not tensor.is_contiguous() or region.dtype != str(tensor.dtype)[6:] else max(tensor.shape[0], 1)
        for at in range(0, tensor.shape[0], step):  # what must be gathered or converted is so in blocks: no large memory is touched afresh
            block = tensor[at : at + step].detach().to("cpu", getattr(torch, region.dtype)).contiguous()
            if block.numel():
                self._put(region.file, block, region.start + (row + at) * width)

    def write_columns(self, region: Region, pieces: list[torch.Tensor]) -> None:
        """Put matrices that stand side by side into the place of the whole, a few rows at a time."""
        import torch

        step = max(_BLOCK // max(region.shape[1] * SIZES[region.dtype], 1), 1)
        for at in range(0, region.shape[0], step):
            self.write_rows(region, at, torch.cat([piece[at : at + step] for piece in pieces], dim=1))

    def _put(self, path: Path, tensor: torch.Tensor, offset: int) -> None:
        import torch

        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        pwrite(self._handle(path), data, offset)
        with self._lock:
            self._unseen += len(data)
            if self._unseen < _FLUSH or not (self._flushing is None or self._flushing.done()):
                return
            self._unseen = 0
            before, self._flushing = self._flushing, self._flusher.submit(self._flush)
        if before is not None:
            before.result()  # raises what went wrong

    def _flush(self) -> None:
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            os.fdatasync(handle)

    def _handle(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_WRONLY)
            return self._handles[path]

    def close(self, sync: bool = True) -> None:
        """Close all files, their content on the disk if `sync`."""
        try:
            self._flusher.shutdown(cancel_futures=not sync)
            if sync and self._flushing is not None:
                self._flushing.result()
            for handle in self._handles.values():
                if sync:
                    os.fsync(handle)
        finally:
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()


def pwrite(handle: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset`."""
    while data:
        written = os.pwrite(handle, data[: 2**30], offset)
        data, offset = data[written:], offset + written


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (NaN included)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return not a.numel() or not _memcmp(ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()), ctypes.c_size_t(a.numel() * a.element_size()))
    step = max(_BLOCK * a.shape[0] // (a.numel() * a.element_size() or 1), 1)
    return all(same_bits(a[at : at + step].contiguous(), b[at : at + step].contiguous()) for at in range(0, a.shape[0], step))
