"""Rollout engines split over two devices, and prompts spread over several engines."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from rlcli.config.schema import RolloutConfig
from rlcli.engines.base import Request, Sampling, WeightHandle
from rlcli.engines.weights import SharedMemoryTransport
from rlcli.errors import RunError
from rlcli.platforms.base import pick
from rlcli.platforms.threads import Threads

PROMPT = np.arange(10, 70, dtype=np.int32)


@pytest.mark.engine
def test_two_tensor_ranks_generate_sync_and_die_together(tiny_model_factory: Any, tmp_path: Path) -> None:
    """Greedy tokens equal transformers' before and after a sync; a rank killed ends the call and is named; no process is left."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlcli.cluster.launch import LocalCluster
    from rlcli.engines.rollout_pool import RolloutPool
    from rlcli.engines.rollout_setup import rollout_setup
    from rlcli.models.registry import read_model

    folder, platform = tiny_model_factory("qwen3", tie=True), pick("cpu")
    config = RolloutConfig(max_response_tokens=64, max_running_samples=8, tensor_parallel=2)
    setup = rollout_setup(read_model(folder), config, 70, "float32", 1, platform)
    cores = sorted(os.sched_getaffinity(0))
    env = platform.env("rollout", Threads(((cores[0],), (cores[-1],))))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def wanted() -> list[int]:
        ids = PROMPT.tolist()
        with torch.no_grad():
            for _ in range(8):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]

    with LocalCluster(cpus=2, heartbeat_s=120.0) as cluster:
        pool = RolloutPool.launch(cluster, setup, [env], [tmp_path / "engine.log"], SharedMemoryTransport.create(), 300.0)
        pool.ready(300.0)
        family = pool.workers[0].process.tree()
        assert len(family) >= 4, "the actor, vLLM's engine, and a process for each rank"
        greedy = Sampling(1, 8, temperature=0.0)
        (_, before), *_ = pool.generate([Request(0, PROMPT)], greedy)
        first = wanted()
        assert before[0].token_ids.tolist() == first
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3 * weight.abs().mean())
        tensors = [(name, value) for name, value in model.state_dict().items() if name != "lm_head.weight"]
        pool.update_weights(WeightHandle(1, tuple(pool.transport.publish(1, tensors)), tied_head=True))
        (_, after), *_ = pool.generate([Request(0, PROMPT)], greedy)
        second = wanted()
        assert after[0].token_ids.tolist() == second
        assert first != second
        os.kill(family[-1].pid, signal.SIGKILL)
        with pytest.raises(RunError, match="rollout engine 0"):
            list(pool.generate([Request(0, PROMPT)], Sampling(4, 64)))
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while any(member.alive() for member in family) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [psutil.Process(member.pid).cmdline() for member in family if member.alive()] == []
        pool.close()


def test_the_next_prompt_goes_to_the_least_loaded_engine_until_all_are_full() -> None:
    from rlcli.engines.rollout_pool import RolloutPool

    pool: Any = SimpleNamespace(setup=SimpleNamespace(max_running_samples=8))
    requests = (Request(key, PROMPT) for key in itertools.count())
    loads = {0: 3, 1: 0, 2: 1}
    dealt = [(request.key, engine) for request, engine in RolloutPool._deal(pool, requests, loads, Sampling(8, 1))]
    # Two batches of 8 samples are 2 prompts, and 2 more wait: 4 each. Ties go to the first engine.
    assert dealt == [(0, 1), (1, 1), (2, 2), (3, 1), (4, 2), (5, 0), (6, 1), (7, 2)]
    assert loads == {0: 4, 1: 4, 2: 4}
    assert next(requests).key == 8, "prompts that find no room are not drawn"
