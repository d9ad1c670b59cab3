"""Cores shared out by role, and what the CPU platform makes of them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import UserError
from rlcli.platforms.base import pick
from rlcli.platforms.threads import Threads, allowed_cores, ranges, share


def test_each_role_gets_all_cores_divided_by_its_own_processes() -> None:
    assert share([0, 1], 1) == [Threads(((0, 1),))]
    assert share([0, 1], 2) == [Threads(((0,),)), Threads(((1,),))]
    assert share([0, 1, 2, 3, 4, 5, 6, 7], 2, ranks=2) == [Threads(((0, 1), (2, 3))), Threads(((4, 5), (6, 7)))]
    assert share([3, 5], 3) == [Threads(((3,),)), Threads(((5,),)), Threads(((3,),))]


@given(st.lists(st.integers(0, 200), min_size=1, unique=True), st.integers(1, 9), st.integers(1, 4))
def test_no_core_is_used_twice_where_there_are_enough(cores: list[int], workers: int, ranks: int) -> None:
    shares = share(cores, workers, ranks)
    dealt = [core for worker in shares for rank in worker.ranks for core in rank]
    assert len(shares) == workers
    assert set(dealt) <= set(cores)
    assert len({len(rank) for worker in shares for rank in worker.ranks}) == 1
    if len(cores) >= workers * ranks:
        assert len(dealt) == len(set(dealt))


def test_cores_are_written_as_the_kernel_does() -> None:
    assert ranges([0, 1]) == "0-1"
    assert ranges([5, 0, 1, 2]) == "0-2,5"
    assert ranges([4]) == "4"


def test_the_affinity_of_this_process_is_respected() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert allowed_cores() == [max(before)]
        with pytest.raises(UserError, match=r"cluster.threads=2, but this process may use only 1"):
            allowed_cores(2)
    finally:
        os.sched_setaffinity(0, before)


def test_the_environment_of_each_role() -> None:
    cpu = pick("cpu")
    train = cpu.env("train", Threads(((0, 1, 2),)), "/lib/t.so")
    assert train["OMP_NUM_THREADS"] == "3"
    assert train["LD_PRELOAD"] == "/lib/t.so"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in train
    assert cpu.env("rollout", Threads(((0, 1),)))["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    two = cpu.env("rollout", Threads(((0, 1), (2, 5))))
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2,5"
    assert two["OMP_NUM_THREADS"] == "2"
    assert cpu.env("reward", Threads(((0, 1),)))["OMP_NUM_THREADS"] == "1"
    for role in ("driver", "train", "rollout", "reward"):
        env = cpu.env(role, Threads(((0,),)))  # type: ignore[arg-type]
        assert env["HF_HUB_OFFLINE"] == env["DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == "1"
        assert "LD_PRELOAD" not in env


def test_platforms_are_picked_by_name() -> None:
    assert pick("auto").name == "cpu"
    with pytest.raises(UserError, match=r"cluster.platform=tpu is unknown: use one of auto, cpu"):
        pick("tpu")
    assert {probe.name for probe in pick("cpu").probes()} == {"cores", "memory", "bfloat16", "allocator", "shared memory"}
