"""The file operations of checkpoints, each durable and each failing with one line that names what and why.

Everything that changes a checkpoint folder goes through these functions, so that a test can stop at any one of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rlcli.errors import MsrlError, RunError, UserError

BLOCK = 4 << 20  # bytes read at once while hashing
THREADS = min(8, os.cpu_count() or 1)
FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


def make_folder(path: Path) -> None:
    """Make a folder and those above it."""
    with named("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file and see it to the disk."""
    with named("write", path), path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def seal_files(paths: Sequence[Path]) -> list[tuple[int, str]]:
    """(bytes, sha256) of files that somebody else wrote, after seeing them to the disk; the disk and the hashing work at the same time."""
    with ThreadPoolExecutor(THREADS) as flushing, ThreadPoolExecutor(THREADS) as hashing:
        flushed = [flushing.submit(sync_file, path) for path in paths]
        sealed = list(hashing.map(hash_file, paths))
        for done in flushed:
            done.result()
    return sealed


def sync_file(path: Path) -> None:
    """See the content of a file that somebody else wrote to the disk."""
    with named("see to the disk", path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def hash_file(path: Path) -> tuple[int, str]:
    """(bytes, sha256) of a file, read in blocks."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(BLOCK))
    with named("read", path), path.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, digest.hexdigest()


def sync_folder(path: Path) -> None:
    """See a folder's entries to the disk, so that a rename in it survives a power cut."""
    sync_file(path)


def rename(old: Path, new: Path) -> None:
    """Give a folder its new name, in one step; there must be nothing of that name."""
    if new.exists():
        raise RunError(f"checkpoint: cannot rename {old} to {new.name}: exists already")
    with named("rename to " + new.name, old):
        os.rename(old, new)


def delete_folder(path: Path) -> None:
    """Remove a folder and all in it."""
    with named("remove", path):
        shutil.rmtree(path)


def files_in(folder: Path) -> list[Path]:
    """All regular files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def named(what: str, path: Path) -> Iterator[None]:
    """Turns the system's errors into one line."""
    try:
        yield
    except OSError as error:
        raise explained(f"checkpoint: cannot {what} {path}", path, error) from error


def explained(
    problem: str,
    path: Path,
    error: OSError,
    room: str = "or lower checkpoint.keep_last",
    elsewhere: str = "choose a folder that can be written to (run.dir=...)",
) -> MsrlError:
    """The error that a user reads: `problem`, the system's reason, and what to do about a full disk or a folder that cannot be written."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return RunError(f"{problem}: the disk is full ({_free(path)}); free some space, {room}")
    if error.errno in NOT_WRITABLE:
        return UserError(f"{problem}: {reason.lower()}; {elsewhere}")
    where = f" ({error.filename})" if error.filename and str(error.filename) not in problem else ""
    return RunError(f"{problem}: {reason}{where}")


def _free(path: Path) -> str:
    while not path.exists():
        path = path.parent
    return f"{shutil.disk_usage(path).free / 2**30:.2f} GiB free"
