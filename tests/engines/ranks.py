"""Starts ranks as processes, runs the same function in each, and gives back what every rank returned. No rank outlives the call."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def launch(function: Callable[..., Any], world: int, folder: Path, *arguments: Any, timeout_s: float = 540) -> list[Any]:
    """`function(rank, world, folder, *arguments)` in `world` processes of one thread each; their results in rank order.

    Raises AssertionError with the traceback of the first rank that failed, or naming the ranks that are not done in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = server()
    processes = [context.Process(target=_rank, args=(function, rank, world, folder, arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode not in (None, 0) for process in processes):
                break
            processes[0].join(0.05)
    finally:
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
    errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
    assert not errors, f"a rank failed:\n{errors[0]}"
    assert not late, f"ranks {late} were not done within {timeout_s} s"
    assert all(process.exitcode == 0 for process in processes), f"exit codes {[process.exitcode for process in processes]}"
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


@functools.cache
def server() -> Any:
    """The context of a server with Megatron imported, which ranks are forked from. It ends with this process."""
    from multiprocessing import forkserver

    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # so that the server finds what it is to import
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rank_preload"])
    forkserver.ensure_running()
    return context


def _rank(function: Callable[..., Any], rank: int, world: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    try:
        result = function(rank, world, folder, *arguments)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
