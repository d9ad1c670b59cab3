"""Safetensors folders: headers read and checked without loading anything, slices read, new folders written tensor by tensor.

Format: 8 bytes little-endian header length, JSON {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import UserError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_MOST_HEADER = 200_000_000


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: file, dtype by safetensors' name, shape, and its bytes' range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; UserError where it is missing, unreadable or another thing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object")
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, checked against the file's size: a truncated or foreign file is a UserError."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            prefix = f.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MOST_HEADER
            if length >= _MOST_HEADER or 8 + length > size:
                raise UserError(f"{path}: truncated, or no safetensors file")
            header = json.loads(f.read(length))
        infos = {n: _info(path, 8 + length, v) for n, v in header.items() if n != "__metadata__"}
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path}: no valid safetensors header ({type(e).__name__}: {e})") from None
    end = max((i.stop for i in infos.values()), default=8 + length)
    if size < end:
        raise UserError(f"{path}: truncated, {size} bytes where {end} are announced; fetch the file again")
    return infos


def _info(path: Path, base: int, value: dict[str, Any]) -> TensorInfo:
    low, high = value["data_offsets"]
    shape, dtype = tuple(value["shape"]), value["dtype"]
    if high - low != math.prod(shape) * BYTES.get(dtype, 0):
        raise ValueError(f"{dtype} {list(shape)} does not fill {high - low} bytes")
    return TensorInfo(path, dtype, shape, base + low, base + high)


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a HF folder, one file or many with an index. Names in two files, or in the index alone, are errors."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) and Path(v).name == v for v in weight_map.values()):
            raise UserError(f"{folder / INDEX}: has no valid weight_map")
        files = sorted(set(weight_map.values()))
    else:
        found = sorted(p.name for p in folder.glob("*.safetensors"))
        files = [name for name in found if not name.startswith("consolidated")] or found  # Mistral's own, the same weights by other names
        weight_map = None
        if not files:
            raise UserError(f"{folder}: has no *.safetensors file" + _other_formats(folder))
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        for key, info in read_header(folder / name).items():
            if key in tensors:
                raise UserError(f"{folder}: tensor {key} is in both {tensors[key].file.name} and {name}")
            tensors[key] = info
    for key, name in (weight_map or {}).items():
        if key not in tensors or tensors[key].file.name != name:
            raise UserError(f"{folder}: the index places {key} in {name}, which does not hold it")
    return tensors


def _other_formats(folder: Path) -> str:
    others = [p.name for pattern in ("*.bin", "*.pth", "*.gguf") for p in folder.glob(pattern)]
    return f"; {others[0]} is another format: save the model with safe_serialization first" if others else ""


class Reader:
    """Reads ranges of tensors; files are opened once and mapped, so that only what is asked for is read."""

    def __init__(self, tensors: dict[str, TensorInfo]) -> None:
        self.tensors = tensors
        self._open: dict[Path, Any] = {}

    def __call__(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """Tensor `name`, or its range [start, stop) along `axis`."""
        from safetensors import safe_open

        path = self.tensors[name].file
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        if axis is None:
            return self._open[path].get_tensor(name)
        view = self._open[path].get_slice(name)
        return view[start:stop] if axis == 0 else view[(slice(None),) * axis + (slice(start, stop),)]

    def close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """(head, places): the bytes a safetensors file begins with for (name, dtype, shape) in order, and each tensor's byte range in the file."""
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {n: (len(head) + v["data_offsets"][0], len(head) + v["data_offsets"][1]) for n, v in header.items() if n != "__metadata__"}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a CPU tensor, without a copy where it is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
