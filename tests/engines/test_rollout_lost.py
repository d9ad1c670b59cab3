"""vLLM's own process killed while a call of each kind waits for it: the call ends soon, and the error says what was lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcli.config.schema import RolloutConfig
from rlcli.engines.base import Request, Sampling, WeightHandle
from rlcli.engines.weights import SharedMemoryTransport
from rlcli.errors import WorkerLost
from rlcli.platforms.base import pick
from rlcli.platforms.threads import Threads

pytestmark = pytest.mark.engine

PROMPT = np.arange(10, 70, dtype=np.int32)
TIMEOUT_S = 300.0  # of a call, which would end with another message


def wave(pool: Any) -> None:
    """As deterministic runs sample: it begins by a call that vLLM never answers once its process is gone."""
    pool.deterministic = True
    list(pool.generate([Request(0, PROMPT)], Sampling(4, 8)))


def stream(pool: Any) -> None:
    list(pool.generate([Request(0, PROMPT)], Sampling(4, 8)))


def abort(pool: Any) -> None:
    """As when enough groups are finished: the rest is cut off."""
    worker = pool.workers[0]
    pool._abort({worker.actor.sample.remote(Request(0, PROMPT), Sampling(4, 64)): worker})


def score(pool: Any) -> None:
    pool.score([(PROMPT, PROMPT[:8])], 0.7)


def sync(pool: Any) -> None:
    pool.update_weights(WeightHandle(1, (), tied_head=False))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from rlcli.cluster.launch import LocalCluster

    with LocalCluster(cpus=2, heartbeat_s=120.0) as cluster:
        yield cluster


@pytest.mark.parametrize("call", [wave, stream, abort, score, sync])
def test_a_call_that_waits_for_a_killed_process_ends_soon(cluster: Any, call: Callable[[Any], None], tiny_model_factory: Any, tmp_path: Path) -> None:
    from rlcli.engines.rollout_pool import RolloutPool
    from rlcli.engines.rollout_setup import rollout_setup
    from rlcli.models.registry import read_model

    platform = pick("cpu")
    config = RolloutConfig(max_response_tokens=64, max_running_samples=8)
    setup = rollout_setup(read_model(tiny_model_factory("qwen3", tie=True)), config, 70, "float32", 1, platform)
    env = platform.env("rollout", Threads((tuple(sorted(os.sched_getaffinity(0))),)))
    pool = RolloutPool.launch(cluster, setup, [env], [tmp_path / "engine.log"], SharedMemoryTransport.create(), TIMEOUT_S)
    try:
        pool.ready(TIMEOUT_S)
        core = next(member for member in pool.workers[0].process.tree() if b"EngineCore" in Path(f"/proc/{member.pid}/cmdline").read_bytes())
        os.kill(core.pid, signal.SIGSTOP)  # so that the call is surely on its way when the process goes
        killer = threading.Timer(2.0, os.kill, (core.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerLost, match="rollout engine 0 lost vLLM's own process, which ended"):
            call(pool)
        killer.join()
    finally:
        pool.close()
