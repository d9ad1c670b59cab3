"""A folder that appears whole or not at all: written beside its place, flushed to disk, renamed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` to write into; when the block ends well it takes the place of `out`, else it is removed.

    A process killed outright leaves `.NAME.partial-PID`, which no reader takes for a data set; the next preparation removes it.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        with _terminated_as_interrupt():
            yield partial
        _flush(partial)
        _take_place(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that it cleans up as well. Only the main thread may set this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _flush(folder: Path) -> None:
    for path in [*sorted(folder.rglob("*")), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _take_place(partial: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    handle = os.open(out.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(out: Path) -> None:
    """Remove what preparations of `out` that were killed left behind; bring back an old set whose successor never took its place."""
    for path in out.parent.glob(f".{out.name}.*-*"):
        kind, _, pid = path.name.removeprefix(f".{out.name}.").partition("-")
        if kind not in ("partial", "old") or not pid.isdigit() or (int(pid) != os.getpid() and _alive(int(pid))):
            continue
        if kind == "old" and not out.exists():
            path.rename(out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
