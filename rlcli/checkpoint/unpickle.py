"""Reading what torch.save wrote without running any of it: an unpickler that builds plain containers and tensor descriptions, and no more.

A pickle names functions to call. Here only the few that containers and tensors need exist, in versions of our own; names of libraries that
checkpoints of Megatron and its kin mention (an enum, a random state) become inert records; every other name is refused. No module is imported
on a pickle's behalf, and no tensor is read: it becomes a Region of the file.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlcli.checkpoint.regions import SIZES, Region
from rlcli.errors import UserError

STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}
INERT = ("megatron", "mindspeed", "mindspeed_llm", "mindspeed_rl", "torch", "torch_npu", "numpy", "transformer_engine", "pathlib", "enum", "datetime")
INERT_NAMES = {("_io", "BytesIO"), ("io", "BytesIO"), ("types", "SimpleNamespace"), ("functools", "partial"), ("_codecs", "encode"), ("copyreg", "_reconstructor")}
PLAIN = {"set": set, "frozenset": frozenset, "complex": complex, "dict": dict, "list": list, "tuple": tuple, "slice": slice}


class Inert:
    """Stands for an object of a library that is not needed: it remembers nothing and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...


class Record(dict[str, Any]):
    """An argparse.Namespace, or a dataclass that is asked for by name, as a dict of its fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], (dict, type(None))):  # (fields, slots)
            state = {**(state[0] or {}), **(state[1] or {})}
        self.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


@dataclass(frozen=True, slots=True)
class DtypeMark:
    """The class of a storage, or a torch dtype, by the dtype's name."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    dtype: str
    key: str
    count: int


class Window:
    """Bytes [start, start + length) of a file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = (0, self.at, self.length)[whence] + offset
        return self.at

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self.at, 0)
        self.file.seek(self.start + self.at)
        data = self.file.read(left if size < 0 else min(size, left))
        self.at += len(data)
        return data


def load_plain(path: Path, start: int = 0, length: int | None = None, records: tuple[str, ...] = ()) -> Any:
    """The object that torch.save wrote to `path` (or to that range of it), tensors as Regions.

    `records` are classes ("module.Name") to give as dicts of their fields. UserError for a file that is no zip of torch.save, is truncated,
    is compressed, or whose pickle names anything but containers, tensors and known libraries.
    """
    try:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            window = Window(f, start, size - start if length is None else length)
            with _errors(path), zipfile.ZipFile(window) as archive:  # type: ignore[arg-type]
                return _Reader(path, f, start, archive, records).load()
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e})") from None


def load_pickle(path: Path, records: tuple[str, ...]) -> Any:
    """A bare pickle under the same rules; it can hold no tensors."""
    try:
        with open(path, "rb") as f, _errors(path):
            return _Unpickler(f, path, records, None).load()
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing") from None


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Whatever a broken or hostile file makes the readers raise, as one line."""
    try:
        yield
    except (UserError, FileNotFoundError):
        raise
    except zipfile.BadZipFile as e:
        raise UserError(f"{path}: truncated, or not written by torch.save in its zip format ({e})") from None
    except Exception as e:  # any opcode may fail on crafted input
        raise UserError(f"{path}: cannot be read as a checkpoint ({type(e).__name__}: {e})") from None


class _Reader:
    """One zip of torch.save: its pickle, and where its storages lie."""

    def __init__(self, path: Path, file: IO[bytes], start: int, archive: zipfile.ZipFile, records: tuple[str, ...]) -> None:
        self.path, self.file, self.start, self.archive, self.records = path, file, start, archive, records
        self.entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        self.pickle = self.entries.get("data.pkl")
        if self.pickle is None:
            raise UserError(f"{path}: not written by torch.save (it holds no data.pkl)")
        self._places: dict[str, tuple[int, int]] = {}

    def load(self) -> Any:
        assert self.pickle is not None
        with self.archive.open(self.pickle) as stream:
            return _Unpickler(stream, self.path, self.records, self).load()

    def tensor(self, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Region:
        """Where a tensor lies; UserError where it reaches outside its storage or is not dense."""
        start, size = self._place(storage.key)
        dense, transposed = _contiguous(shape, stride), len(shape) == 2 and _contiguous(shape[::-1], stride[::-1])
        if not (dense or transposed):
            raise UserError(f"{self.path}: holds a tensor of shape {list(shape)} with strides {list(stride)}; save it contiguous first")
        width = SIZES[storage.dtype]
        region = Region(self.path, storage.dtype, shape if dense else shape[::-1], start + offset * width, not dense)
        if offset < 0 or any(n < 0 for n in shape) or offset * width + region.bytes > size:
            raise UserError(f"{self.path}: a tensor of shape {list(shape)} reaches outside its {size} bytes")
        return region

    def _place(self, key: str) -> tuple[int, int]:
        """(first byte in the file, size) of a storage's data."""
        if key not in self._places:
            info = self.entries.get(f"data/{key}")
            if info is None or info.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{self.path}: tensor data {key} is missing or compressed")
            self.file.seek(self.start + info.header_offset)
            head = self.file.read(30)  # a local file header: its last two fields are the lengths of name and extra
            lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            self._places[key] = (self.start + info.header_offset + 30 + lengths, info.file_size)
        return self._places[key]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], path: Path, records: tuple[str, ...], reader: _Reader | None) -> None:
        super().__init__(stream)
        self.path, self.records, self.reader = path, records, reader

    def persistent_load(self, pid: Any) -> Storage:
        if self.reader is None or not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], DtypeMark)):
            raise UserError(f"{self.path}: refers to data in an unknown way")
        return Storage(pid[1].name, str(pid[2]), int(pid[4]))

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in self.records or (module, name) == ("argparse", "Namespace"):
            return type(name, (Record,), {})
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return self._tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *rest: data
        if module == "torch" and name == "Size":
            return tuple
        if module in ("torch", "torch.storage") and name in STORAGES:
            return DtypeMark(STORAGES[name])
        if module == "torch" and name in SIZES:
            return DtypeMark(name)
        if module == "builtins" and name in PLAIN:
            return PLAIN[name]
        if module.partition(".")[0] in INERT or (module, name) in INERT_NAMES:
            return type(name, (Inert,), {})
        raise UserError(f"{self.path}: its pickle calls {module}.{name}, which no checkpoint needs; the file is not read")

    def _tensor(self, storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> Region:
        if self.reader is None or not isinstance(storage, Storage):
            raise UserError(f"{self.path}: holds a tensor without data")
        return self.reader.tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
