"""What one rollout engine is started with, worked out by the driver from the settings, the model and the machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.config.schema import RolloutConfig
from rlcli.errors import UserError
from rlcli.models.files import read_json
from rlcli.models.spec import ModelSpec
from rlcli.platforms.base import Platform

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARE_OF_FREE = 0.4  # most of the free memory that caches of key-values take when the user names no size
LEAST_CACHE = 64 << 20


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Everything a RolloutWorker needs; travels to its process by value."""

    model: str
    dtype: str
    max_tokens: int  # longest prompt and response together
    max_running_samples: int
    cache_bytes: int  # key-values, a rank
    tensor_parallel: int = 1
    end_tokens: tuple[int, ...] = ()
    needs_text: bool = False  # stop strings are looked for, so tokens are turned to text
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # the platform's arguments of vLLM's engine
    extension: str = "rlcli.engines.vllm_worker.WorkerExtension"


def rollout_setup(spec: ModelSpec, rollout: RolloutConfig, max_prompt_tokens: int, train_dtype: str, seed: int, platform: Platform) -> RolloutSetup:
    """Raises UserError where the lengths exceed the model's positions, or the key-value cache cannot hold one sample."""
    longest = max_prompt_tokens + rollout.max_response_tokens
    if longest > spec.max_positions:
        raise UserError(
            f"data.max_prompt_tokens={max_prompt_tokens} and rollout.max_response_tokens={rollout.max_response_tokens} make {longest} tokens, "
            f"but {spec.folder} has {spec.max_positions} positions: lower one of them"
        )
    dtype = train_dtype if rollout.dtype == "auto" else rollout.dtype
    options = platform.rollout_options(rollout.tensor_parallel)
    return RolloutSetup(
        model=str(spec.folder),
        dtype=dtype,
        max_tokens=min(longest + 1, spec.max_positions),  # one more, so that sequences of full length can be scored
        max_running_samples=rollout.max_running_samples,
        cache_bytes=cache_bytes(spec, rollout, max_prompt_tokens, BYTES[dtype], options.get("block_size", 16), platform.memory().free),
        tensor_parallel=rollout.tensor_parallel,
        end_tokens=end_tokens(spec.folder),
        needs_text=bool(rollout.stop),
        seed=seed,
        options=options,
    )


def cache_bytes(spec: ModelSpec, rollout: RolloutConfig, max_prompt_tokens: int, item_bytes: int, block: int, free: int) -> int:
    """Size of one rank's key-value cache.

    Enough for `max_running_samples` responses of full length and one prompt for each group of them, whole blocks each, within a share
    of the `free` bytes; never less than one sample needs. Raises UserError where a named size holds no sample.
    """
    kv_heads = -(-spec.kv_heads // rollout.tensor_parallel)
    token_bytes = 2 * spec.layers * kv_heads * spec.head_dim * item_bytes
    response = (rollout.max_response_tokens // block + 2) * block  # its first block also holds the prompt's last, unshared tokens
    prompt = -(-max_prompt_tokens // block) * block
    one = (prompt + response + block) * token_bytes
    if rollout.kv_cache_gib > 0:
        named = int(rollout.kv_cache_gib * 2**30)
        if named < one:
            raise UserError(f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} holds no sample of full length: set at least {one / 2**30:.3f}, or 0")
        return named
    running = rollout.max_running_samples
    prompts = -(-running // rollout.samples_per_prompt) + 1
    wanted = (running * response + prompts * prompt) * token_bytes
    most = int(free * SHARE_OF_FREE / (rollout.engines * rollout.tensor_parallel))
    return max(one, min(wanted, most), min(LEAST_CACHE, most))


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Tokens that end a response: those of generation_config.json, config.json and the tokenizer's own end token."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        found.update([value] if isinstance(value, int) else value or [])
    own = _tokenizer_end(folder)
    return tuple(sorted(found | ({own} if own is not None else set())))


def _tokenizer_end(folder: Path) -> int | None:
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not settings.is_file() or not vocabulary.is_file():
        return None
    end = read_json(settings).get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    added = json.loads(vocabulary.read_text(encoding="utf-8")).get("added_tokens", [])
    return next((int(token["id"]) for token in added if token["content"] == text), None)
