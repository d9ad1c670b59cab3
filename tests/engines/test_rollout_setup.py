"""What a rollout engine is started with: cache size by hand, end tokens from every file that names one, limits refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcli.config.schema import RolloutConfig
from rlcli.engines.rollout import request_seed
from rlcli.engines.rollout_setup import cache_bytes, end_tokens, rollout_setup
from rlcli.errors import UserError
from rlcli.platforms.base import pick

SPEC: Any = SimpleNamespace(layers=2, kv_heads=3, head_dim=64, max_positions=256, folder=Path("m"))
TOKEN = 2 * 2 * 3 * 64 * 2  # bytes of keys and values of a token in bfloat16


def test_the_cache_holds_all_running_samples_and_their_groups_prompts() -> None:
    config = RolloutConfig(max_running_samples=64, samples_per_prompt=8, max_response_tokens=100)
    # A response of 100 tokens touches 5 blocks of 32 (its first is shared with no one), a prompt of 70 fills 3; 64 samples are 8 groups, one more waits.
    wanted = (64 * 5 * 32 + 9 * 3 * 32) * TOKEN
    assert cache_bytes(SPEC, replace(config), 70, 2, 32, free=1 << 40) == max(wanted, 64 << 20)
    big = replace(config, max_running_samples=6400)
    assert cache_bytes(SPEC, big, 70, 2, 32, free=1 << 40) == (6400 * 160 + 801 * 96) * TOKEN
    assert cache_bytes(SPEC, big, 70, 2, 32, free=1 << 30) == int(0.4 * (1 << 30)), "at most a share of what is free"
    assert cache_bytes(SPEC, replace(big, engines=2), 70, 2, 32, free=1 << 30) == int(0.4 * (1 << 30) / 2)


def test_a_named_cache_is_taken_or_refused() -> None:
    config = RolloutConfig(max_response_tokens=100, kv_cache_gib=0.5)
    assert cache_bytes(SPEC, config, 70, 2, 32, free=0) == 1 << 29
    with pytest.raises(UserError, match=r"rollout.kv_cache_gib=0.0001 holds no sample"):
        cache_bytes(SPEC, replace(config, kv_cache_gib=0.0001), 70, 2, 32, free=0)


def test_tensor_parallel_ranks_hold_their_share_of_the_heads() -> None:
    config = RolloutConfig(max_running_samples=6400, samples_per_prompt=8, max_response_tokens=100, tensor_parallel=3)
    assert cache_bytes(SPEC, config, 70, 2, 32, free=1 << 40) == (6400 * 160 + 801 * 96) * TOKEN // 3


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(UserError, match=r"make 300 tokens, but m has 256 positions: lower one of them"):
        rollout_setup(SPEC, RolloutConfig(max_response_tokens=200), 100, "float32", 1, pick("cpu"))


def test_end_tokens_come_from_every_file_that_names_one(tmp_path: Path) -> None:
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 1, "content": "<s>"}]}))
    assert end_tokens(tmp_path) == (2, 7, 9)


def test_seeds_of_neighbouring_requests_lie_further_apart_than_any_group() -> None:
    """vLLM gives sample i of a request the seed s + i: groups of neighbouring requests must not share seeds."""
    seeds = sorted(request_seed(1, key) for key in range(1000)) + sorted(request_seed(2, key) for key in range(1000))
    seeds.sort()
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 4096
    assert request_seed(1, 5) == request_seed(1, 5)
    assert seeds[0] >= 0
    assert seeds[-1] < 2**56
