"""Work that is too small to be shared out inside an operation, done side by side instead: one thread for each core, each computing alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def side_by_side(work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """`work(item)` of each item, without gradients, in any order; the results stand in the order of `items`. The largest items should come first."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) == 1:
        with torch.no_grad():
            return [work(item) for item in items]
    return list(_lanes(threads).map(work, items))


@cache
def _lanes(count: int) -> ThreadPoolExecutor:
    """Threads in which torch computes on one core. It takes the last number of threads set anywhere for that of new threads: set back here."""
    ready = threading.Barrier(count + 1)

    def prepare() -> None:
        torch.get_num_threads()  # a thread takes the number set last when it is first asked: now, not after what follows
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        ready.wait()

    lanes = ThreadPoolExecutor(count, thread_name_prefix="lane", initializer=prepare)
    for _ in range(count):  # one thread each, as none is idle before all are ready
        lanes.submit(int)
    ready.wait()
    torch.set_num_threads(count)
    return lanes
