"""How new weights travel from the training ranks to the rollout engines.

A transport has a publishing side, called by every training rank that holds weights, and a reading side, called in every process
of a rollout engine. Shared memory serves one machine; collectives between devices fit behind the same protocol.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlcli.cluster.processes import ProcessId
from rlcli.engines.base import WeightHandle
from rlcli.errors import RunError, UserError

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "msrl-weights-"
PART_BYTES = 512 << 20  # a writer keeps at most about so much beside the model while it writes
REMEDY = "enlarge it (mount -o remount,size=..., or docker run --shm-size=...), or free what lies there"


class WeightTransport(Protocol):
    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], writer: int = 0) -> list[str]:
        """Make `tensors` (Hugging Face names, whole tensors) readable as part of `version`; what to put into WeightHandle.files.

        Args:
            writer: number of the publishing rank; the tensors of all writers of a version together are the model.
        Raises:
            RunError: there is no room.
        """
        ...

    def read(self, handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `handle`, one after the other. Each is valid until the next is asked for."""
        ...

    def release(self, version: int) -> None:
        """All engines took `version`: it and all older ones may go."""
        ...

    def close(self) -> None:
        """Nothing is left behind."""
        ...


class SharedMemoryTransport:
    """Safetensors files in a private folder of /dev/shm, which belongs to one driver process and goes with it.

    The driver calls `create` and hands `folder` to the ranks, which attach by `SharedMemoryTransport(folder)`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: int | None = None

    @classmethod
    def create(cls, need_bytes: int = 0, root: Path = SHARED_MEMORY) -> SharedMemoryTransport:
        """Make the folder; first remove those of drivers that are gone.

        Args:
            need_bytes: size of one version of the weights. Raises UserError where it does not fit.
        """
        if not root.is_dir():
            raise UserError(f"weight sync needs shared memory, but {root} does not exist: mount a tmpfs there")
        sweep(root)
        free = _free(root)
        if need_bytes > free:
            raise UserError(f"weight sync needs {_gib(need_bytes)} in {root}, which has {_gib(free)} free: {REMEDY}")
        own = ProcessId.own()
        transport = cls(tempfile.mkdtemp(prefix=f"{PREFIX}{own.pid}-{int(own.started)}-", dir=root))  # mkdtemp: only the owner may enter
        transport._lock = os.open(transport.folder / "owner", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(transport._lock, fcntl.LOCK_EX)  # held until this process ends, however it ends
        return transport

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], writer: int = 0) -> list[str]:
        parts = enumerate(_parts(tensors, PART_BYTES))
        return [self._write(self.folder / f"{version:08d}-w{writer:05d}-{number:05d}.safetensors", part, version) for number, part in parts]

    def _write(self, path: Path, tensors: dict[str, Tensor], version: int) -> str:
        from safetensors.torch import save_file

        need, free = sum(tensor.nbytes for tensor in tensors.values()), _free(self.folder)
        if need > free:
            raise RunError(f"weights of version {version} need {_gib(need)} more in {self.folder.parent}, which has {_gib(free)} free: {REMEDY}")
        beside = path.with_suffix(".writing")
        try:
            save_file(tensors, beside, metadata={"version": str(version)})
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return str(path)

    def read(self, handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
        return read_files(handle)

    def release(self, version: int) -> None:
        for path in self.folder.glob("*.safetensors"):
            if int(path.name.split("-", 1)[0]) <= version:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_files(handle: WeightHandle) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the files of `handle`, mapped, not copied.

    Raises RunError where a file is missing or belongs to another version.
    """
    from safetensors import SafetensorError, safe_open

    for name in handle.files:
        try:
            with safe_open(name, framework="pt") as part:
                found = (part.metadata() or {}).get("version")
                if found != str(handle.version):
                    raise RunError(f"weight sync: {name} holds version {found}, not {handle.version}")
                for key in part.keys():  # noqa: SIM118  safe_open is no mapping
                    yield key, part.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise RunError(f"weight sync: {name} of version {handle.version} cannot be read: {error}") from error


def sweep(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders whose driver is gone; returns them. A folder counts as owned while its driver holds the lock."""
    removed = []
    for folder in root.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not _owned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _owned(folder: Path) -> bool:
    match = re.fullmatch(PREFIX + r"(\d+)-(\d+)-.*", folder.name)
    if match and ProcessId(int(match[1]), int(match[2]) + 0.5).alive():
        return True
    # Another container may share this memory but not our process numbers: the lock tells.
    with contextlib.suppress(FileNotFoundError), open(folder / "owner", "rb") as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _parts(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
    if part:
        yield part


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
