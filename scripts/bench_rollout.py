"""Tokens a second through the rollout engine (Ray actor, streamed groups) against bare vLLM in one process, at the same settings.

Both are up at once and take turns, wave by wave, so that whatever else the machine does hits both alike; medians are compared.
The last line is `ratio N.NN`: rollout engine over bare vLLM.

    python scripts/bench_rollout.py --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

LEAST = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="HF folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=86)
    parser.add_argument("--tokens", type=int, default=64, help="most response tokens")
    parser.add_argument("--waves", type=int, default=5)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        serve_bare(json.loads(args.bare), args)
    else:
        compare(args)


def prompts(args: argparse.Namespace, wave: int) -> list[list[int]]:
    """Random prompts, new ones each wave, so that no wave finds its prompts cached."""
    draw = np.random.default_rng(wave)
    return draw.integers(1000, 9000, (args.prompts, args.prompt_tokens)).tolist()


def serve_bare(setup: dict[str, Any], args: argparse.Namespace) -> None:
    """The rival's process: a wave for each line that is read."""
    from vllm import LLM

    from rlcli.engines.base import Sampling
    from rlcli.engines.rollout import engine_arguments, sampling_params
    from rlcli.engines.rollout_setup import RolloutSetup

    made = RolloutSetup(**{**setup, "end_tokens": tuple(setup["end_tokens"])})
    llm = LLM(**engine_arguments(made))
    params = sampling_params(made, 0, Sampling(args.samples, args.tokens))
    say({"ready": True})
    for line in sys.stdin:
        wave = prompts(args, int(line))
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in wave], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        say({"tokens": sum(len(sample.token_ids) for output in outputs for sample in output.outputs), "seconds": seconds})


def say(answer: dict[str, Any]) -> None:
    os.write(3, (json.dumps(answer) + "\n").encode())


class Bare:
    """Bare vLLM in a process of its own."""

    def __init__(self, setup: Any, env: dict[str, str]) -> None:
        read, write = os.pipe()
        command = f'exec 3>&{write}; exec "$@"'
        self.answers = os.fdopen(read)
        arguments = ["bash", "-c", command, "bench", sys.executable, *sys.argv, "--bare", json.dumps(asdict(setup))]
        self.process = subprocess.Popen(
            arguments, env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, pass_fds=[write]
        )
        os.close(write)

    def answer(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            raise SystemExit("bare vLLM ended early")
        return json.loads(line)

    def wave(self, number: int) -> tuple[int, float]:
        assert self.process.stdin is not None
        print(number, file=self.process.stdin, flush=True)
        answer = self.answer()
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(args: argparse.Namespace) -> None:
    from rlcli.cluster.launch import LocalCluster
    from rlcli.config.schema import RolloutConfig
    from rlcli.engines.rollout_pool import RolloutPool
    from rlcli.engines.rollout_setup import rollout_setup
    from rlcli.engines.weights import SharedMemoryTransport
    from rlcli.models.registry import read_model
    from rlcli.platforms import allocator
    from rlcli.platforms.base import pick
    from rlcli.platforms.threads import allowed_cores, share

    platform = pick("auto")
    config = RolloutConfig(samples_per_prompt=args.samples, max_response_tokens=args.tokens)
    setup = rollout_setup(read_model(args.model), config, args.prompt_tokens, args.dtype, 1, platform)
    found = allocator.find("auto")
    env = platform.env("rollout", share(allowed_cores(), 1)[0], found.preload())
    print(f"{args.prompts} prompts x {args.samples} samples x at most {args.tokens} tokens, {args.dtype}, allocator {found.note}")
    bare = Bare(setup, env)
    log = Path(tempfile.mkdtemp(prefix="msrl-bench-")) / "engine.log"
    with LocalCluster(cpus=2, heartbeat_s=120.0) as cluster:
        pool = RolloutPool.launch(cluster, setup, [env], [log], SharedMemoryTransport.create(), 600.0)
        try:
            print(f"engine ready after {pool.ready(600.0)[0]:.1f} s")
            bare.answer()
            measure(args, bare, pool)
        finally:
            pool.close()
            bare.close()


def measure(args: argparse.Namespace, bare: Bare, pool: Any) -> None:
    from rlcli.engines.base import Request, Sampling

    sampling = Sampling(args.samples, args.tokens)

    def ours(number: int) -> tuple[int, float]:
        requests = [Request(key, np.asarray(prompt, np.int32)) for key, prompt in enumerate(prompts(args, number))]
        started = time.perf_counter()
        tokens = sum(len(sample.token_ids) for _, samples in pool.generate(requests, sampling) for sample in samples)
        return tokens, time.perf_counter() - started

    sides: dict[str, Callable[[int], tuple[int, float]]] = {"bare vLLM": bare.wave, "rollout engine": ours}
    for run in sides.values():
        run(0)  # warm-up
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1, args.waves + 1):
        for name, run in sides.items():
            tokens, seconds = run(number)
            speeds[name].append(tokens / seconds)
    print("tokens/s         " + "".join(f"{f'wave {n}':>9}" for n in range(1, args.waves + 1)) + "   median")
    for name, values in speeds.items():
        print(f"{name:17}" + "".join(f"{value:9.0f}" for value in values) + f"{statistics.median(values):9.0f}")
    print(f"memory of the rollout engine: {pool.stats()[0].memory / 2**30:.2f} GiB")
    ratio = statistics.median(speeds["rollout engine"]) / statistics.median(speeds["bare vLLM"])
    print(f"target {LEAST}: {'met' if ratio >= LEAST else 'missed'}")
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
