"""One rollout engine: vLLM's asynchronous engine inside a Ray actor. Token ids in, token ids and the log-probs they were sampled with out."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from rlcli.cluster.host import redirect_output
from rlcli.cluster.processes import ProcessId, die_with_parent, ignore_stop_signals, tree_memory
from rlcli.engines.base import Request, Sampling, WeightHandle
from rlcli.engines.rollout_setup import RolloutSetup
from rlcli.engines.vllm_worker import OWNER
from rlcli.errors import RunError
from rlcli.types import FloatArray, Int32Array, Sample

LIFE = "life"  # Ray's concurrency group that answers signs of life while the engine is busy
SHUTDOWN_SECONDS = 1.0  # vLLM's processes hold nothing worth more patience; then they are killed
BATCHED_TOKENS = 8192  # most tokens that one engine step computes


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What one engine has done since it was started."""

    tokens: int  # response tokens
    samples: int
    busy_s: float  # seconds with at least one prompt in work
    running: int  # prompts in work now
    version: int  # of the weights
    memory: int  # bytes (PSS) of the actor and all its children


class RolloutWorker:
    """The actor's class. All methods but `ping` run in one event loop; `start` comes first, `close` last."""

    def __init__(self, setup: RolloutSetup, log: str) -> None:
        redirect_output(log)
        die_with_parent()
        ignore_stop_signals()
        self.setup = setup
        self.process = ProcessId.own()
        self.version = 0
        self._engine: Any = None
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._number = self._tokens = self._samples = 0
        self._busy_s = self._busy_since = 0.0

    @ray.method(concurrency_group=LIFE)
    def ping(self) -> bool:
        """A sign of life; False once vLLM's own process has died."""
        return self._engine is None or not self._engine.errored

    async def identity(self) -> tuple[ProcessId, str]:
        """This process, and the address of its node."""
        return self.process, ray.util.get_node_ip_address()

    async def start(self) -> float:
        """Load the model and be ready; the seconds it took."""
        started = time.monotonic()
        os.environ[OWNER] = f"{self.process.pid} {self.process.started}"
        self._engine = _engine(self.setup)
        return time.monotonic() - started

    async def sample(self, request: Request, sampling: Sampling) -> list[Sample]:
        """The prompt's samples; those cut off by `abort` have the finish reason "abort"."""
        version = self.version
        output = await self._finish(await self._submit(request, sampling))
        return self._samples_of(output, version)

    async def wave(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[int, list[Sample]]]:
        """All prompts at once, in the same batches every time: what deterministic runs need. The answers are in the order of the requests.

        The engine is held until it knows all prompts, so that their arrival times cannot change what shares a batch; its prefix cache is
        emptied first, so that neither can what came before.
        """
        version = self.version
        await self._engine.pause_generation()
        try:
            collectors = [await self._submit(request, sampling) for request in requests]
        finally:
            await self._engine.resume_generation()
        outputs = await asyncio.gather(*(self._finish(collector) for collector in collectors))
        return [(request.key, self._samples_of(output, version)) for request, output in zip(requests, outputs, strict=True)]

    async def abort(self) -> int:
        """Cut off all that runs; the number of prompts."""
        running = set(self._running)
        self._aborted |= running
        await self._engine.abort(list(running))
        return len(running)

    async def score(self, sequences: Sequence[tuple[Int32Array, Int32Array]], temperature: float) -> list[FloatArray]:
        """Log-probs of each second part's tokens after the first, under the live weights and the temperature."""
        await self._engine.collective_rpc("msrl_score_temperature", args=(temperature,))
        try:
            outputs = await asyncio.gather(*(self._prefill(np.concatenate(pair)) for pair in sequences))
        finally:
            await self._engine.collective_rpc("msrl_score_temperature", args=(1.0,))
        return [_scores(output, len(second)) for output, (_, second) in zip(outputs, sequences, strict=True)]

    async def update_weights(self, handle: WeightHandle) -> int:
        """Take new weights into every rank and drop what was computed with the old ones; the version now live."""
        if self._running:
            raise RunError(f"weight sync to version {handle.version}: {len(self._running)} prompts are still in work")
        args = (handle.version, list(handle.files), handle.tied_head)
        versions = await self._engine.collective_rpc("msrl_update_weights", args=args)
        if not await self._engine.reset_prefix_cache():
            raise RunError(f"weight sync to version {handle.version}: vLLM did not empty its prefix cache")
        if set(versions) != {handle.version}:
            raise RunError(f"weight sync to version {handle.version}: the engine's ranks report versions {versions}")
        self.version = handle.version
        return self.version

    async def stats(self) -> RolloutStats:
        busy = self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)
        memory = await asyncio.to_thread(tree_memory, self.process)
        return RolloutStats(self._tokens, self._samples, busy, len(self._running), self.version, memory)

    async def close(self) -> None:
        """End vLLM's processes."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.to_thread(engine.shutdown, timeout=SHUTDOWN_SECONDS)

    async def _submit(self, request: Request, sampling: Sampling) -> tuple[str, Any]:
        self._number += 1
        name = f"{request.key}-{self._number}"
        if not self._running:
            self._busy_since = time.monotonic()
        self._running.add(name)
        try:
            prompt = {"prompt_token_ids": request.token_ids.tolist()}
            collector = await self._engine.add_request(name, prompt, sampling_params(self.setup, request.key, sampling))
            if name in self._aborted:  # while vLLM did not know it yet
                await self._engine.abort(name)
            return name, collector
        except BaseException:
            self._done(name)
            raise

    async def _finish(self, submitted: tuple[str, Any]) -> Any:
        name, collector = submitted
        try:
            output = await collector.get()
            while not output.finished:
                output = await collector.get()
            return output
        except asyncio.CancelledError:
            await self._engine.abort(name)
            raise
        finally:
            collector.close()
            self._done(name)

    def _done(self, name: str) -> None:
        self._running.discard(name)
        self._aborted.discard(name)
        if not self._running:
            self._busy_s += time.monotonic() - self._busy_since

    async def _prefill(self, token_ids: Int32Array) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        collector = await self._engine.add_request(f"score-{self._number}", {"prompt_token_ids": token_ids.tolist()}, params)
        return await collector.get()

    def _samples_of(self, output: Any, version: int) -> list[Sample]:
        samples = [_sample(completion, version) for completion in output.outputs]
        self._tokens += sum(len(sample.token_ids) for sample in samples)
        self._samples += len(samples)
        return samples


def _engine(setup: RolloutSetup) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(setup)))


def engine_arguments(setup: RolloutSetup) -> dict[str, Any]:
    """vLLM's own names for what the setup says."""
    return {
        "model": setup.model,
        "skip_tokenizer_init": not setup.needs_text,
        "dtype": setup.dtype,
        "max_model_len": setup.max_tokens,
        "max_num_seqs": setup.max_running_samples,
        "max_num_batched_tokens": max(BATCHED_TOKENS, setup.max_tokens),
        "kv_cache_memory_bytes": setup.cache_bytes,
        "tensor_parallel_size": setup.tensor_parallel,
        "seed": setup.seed,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "worker_extension_cls": setup.extension,
        **setup.options,
    }


def sampling_params(setup: RolloutSetup, key: int, sampling: Sampling) -> Any:
    """vLLM's sampling parameters of the request `key`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.samples,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(setup.end_tokens),
        seed=None if sampling.seed is None else request_seed(sampling.seed, key),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def request_seed(seed: int, key: int) -> int:
    """A request's own seed; its samples count on from it, so neighbouring requests must lie far apart."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest(), "big")


def _sample(completion: Any, version: int) -> Sample:
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = np.asarray(completion.logprobs.logprobs if completion.logprobs is not None else [], dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise RunError(f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens")
    return Sample(token_ids, logprobs, completion.finish_reason or "abort", version)


def _scores(output: Any, count: int) -> FloatArray:
    return np.asarray(output.prompt_logprobs.logprobs[-count:], dtype=np.float32)
