"""The rollout engine against transformers: generation, log-probs, weight sync, probe, determinism, abort, and death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import rollout_faults

from rlcli.config.schema import RolloutConfig
from rlcli.engines import probe
from rlcli.engines.base import Request, Sampling, WeightHandle
from rlcli.engines.weights import SharedMemoryTransport
from rlcli.errors import RunError
from rlcli.platforms.base import pick
from rlcli.platforms.threads import Threads
from rlcli.types import Int32Array, Sample

pytestmark = pytest.mark.engine
PROMPTS = [np.arange(10 + i, 70 + i, dtype=np.int32) for i in range(4)]
GREEDY = Sampling(1, 12, temperature=0.0)


@pytest.fixture(scope="module")
def model_folder(tiny_model_factory: Any) -> Path:
    return tiny_model_factory("llama", tie=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from rlcli.cluster.launch import LocalCluster

    with LocalCluster(cpus=2, heartbeat_s=120.0) as made:
        yield made


@pytest.fixture(scope="module")
def keep_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the engine does not repair its tied head after a sync (rollout_faults)."""
    return tmp_path_factory.mktemp("switch") / "keep_head"


@pytest.fixture(scope="module")
def pool(cluster: Any, model_folder: Path, keep_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from rlcli.engines.rollout_pool import RolloutPool
    from rlcli.engines.rollout_setup import rollout_setup
    from rlcli.models.registry import read_model

    platform = pick("cpu")
    config = RolloutConfig(max_response_tokens=64, max_running_samples=8, samples_per_prompt=4, stop=["e"])
    setup = rollout_setup(read_model(model_folder), config, 70, "float32", 1, platform)
    setup = replace(setup, extension="rollout_faults.KeepsItsHead")
    here = str(Path(__file__).parent)
    env = platform.env("rollout", Threads(((0,),))) | {"PYTHONPATH": here, rollout_faults.SWITCH: str(keep_head)}
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    made = RolloutPool.launch(cluster, setup, [env], [log], SharedMemoryTransport.create(), 300.0)
    made.ready(300.0)
    yield made
    made.close()


def load(folder: Path, seed: int = 0) -> Any:
    """transformers' model; seed > 0: every weight changed by it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3 * weight.abs().mean())
    return model


def publish(pool: Any, model: Any, version: int) -> WeightHandle:
    tensors = [(name, value) for name, value in model.state_dict().items() if name != "lm_head.weight"]
    return WeightHandle(version, tuple(pool.transport.publish(version, tensors)), tied_head=True)


def logprobs(model: Any, prompt: Int32Array, response: Int32Array, temperature: float = 1.0) -> Any:
    import torch

    ids = torch.tensor([prompt.tolist() + response.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def greedy(model: Any, prompt: Int32Array, count: int) -> list[int]:
    """Greedy continuation by whole forward passes, ended by the end token."""
    import torch

    ids = prompt.tolist()
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 258:
            break
    return ids[len(prompt) :]


def generate(pool: Any, sampling: Sampling, prompts: Sequence[Int32Array] = PROMPTS) -> dict[int, list[Sample]]:
    return dict(pool.generate([Request(key, prompt) for key, prompt in enumerate(prompts)], sampling))


def test_greedy_equals_transformers_before_and_after_a_sync(pool: Any, model_folder: Path) -> None:
    before = generate(pool, GREEDY)
    old = load(model_folder)
    assert [before[key][0].token_ids.tolist() for key in range(4)] == [greedy(old, prompt, 12) for prompt in PROMPTS]
    new = load(model_folder, seed=3)
    pool.update_weights(publish(pool, new, 1))
    after = generate(pool, GREEDY)
    wanted = [greedy(new, prompt, 12) for prompt in PROMPTS]
    assert [after[key][0].token_ids.tolist() for key in range(4)] == wanted
    assert wanted != [greedy(old, prompt, 12) for prompt in PROMPTS], "the change of weights must change the answers, else this test shows nothing"
    assert {sample.policy_version for samples in after.values() for sample in samples} == {1}
    assert list(pool.transport.folder.glob("*.safetensors")) == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_samples_and_of_given_tokens_are_those_of_transformers(pool: Any, model_folder: Path, temperature: float) -> None:
    model = load(model_folder, seed=5)
    pool.update_weights(publish(pool, model, 2))
    groups = generate(pool, Sampling(4, 16, temperature=temperature))
    for key, samples in groups.items():
        assert len(samples) == 4
        scores = pool.score([(PROMPTS[key], sample.token_ids) for sample in samples], temperature)
        for sample, score in zip(samples, scores, strict=True):
            wanted = logprobs(model, PROMPTS[key], sample.token_ids, temperature)
            np.testing.assert_allclose(sample.logprobs, wanted, atol=1e-4)
            np.testing.assert_allclose(score, wanted, atol=1e-4)
    assert len({tuple(sample.token_ids) for samples in groups.values() for sample in samples}) > 4, "samples must differ"


def test_finish_reasons_tell_the_end_token_from_the_limit(pool: Any) -> None:
    groups = generate(pool, Sampling(4, 64))
    for sample in (sample for samples in groups.values() for sample in samples):
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 258 else "length")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == 64
        assert 258 not in sample.token_ids[:-1]


def test_stop_strings_end_a_response_and_are_part_of_it(pool: Any, model_folder: Path) -> None:
    from transformers import AutoTokenizer

    letter = AutoTokenizer.from_pretrained(model_folder).convert_tokens_to_ids("e")
    samples = [sample for group in generate(pool, Sampling(8, 64, stop=("e",))).values() for sample in group]
    stopped = [sample for sample in samples if sample.token_ids[-1] == letter]
    assert stopped, "random tokens of 320 hit the letter in 32 responses of 64 tokens"
    assert {sample.finish_reason for sample in stopped} == {"stop"}
    assert all(letter not in sample.token_ids[:-1] for sample in samples)
    assert all(len(sample.logprobs) == len(sample.token_ids) for sample in samples)


def test_stop_aborts_what_is_unfinished_and_the_engine_goes_on(pool: Any) -> None:
    finished: list[int] = []
    many = [np.arange(5, 60, dtype=np.int32)] * 40
    for key, samples in pool.generate([Request(key, prompt) for key, prompt in enumerate(many)], Sampling(4, 64), lambda: bool(finished)):
        finished.append(key)
        assert len(samples) == 4
    assert 1 <= len(finished) < 40
    assert pool.stats()[0].running == 0
    assert len(generate(pool, GREEDY)) == 4


def test_an_abort_reaches_prompts_that_were_only_just_handed_over(pool: Any) -> None:
    import ray

    actor = pool.workers[0].actor
    references = [actor.sample.remote(Request(key, PROMPTS[0]), Sampling(4, 64)) for key in range(12)]
    aborted = ray.get(actor.abort.remote(), timeout=60)
    groups = ray.get(references, timeout=60)
    cut = sum(any(sample.finish_reason == "abort" for sample in samples) for samples in groups)
    assert 0 < cut <= aborted <= 12  # on a busy machine some prompts are finished before the abort arrives


def test_an_abandoned_generator_leaves_the_engine_idle(pool: Any) -> None:
    answers = pool.generate([Request(key, PROMPTS[0]) for key in range(20)], Sampling(4, 64))
    next(answers)
    answers.close()
    assert pool.stats()[0].running == 0


def test_a_wave_repeats_bit_for_bit(pool: Any) -> None:
    sampling = Sampling(4, 16, seed=7)
    pool.deterministic = True
    try:
        first, second = generate(pool, sampling), generate(pool, sampling)
        other = generate(pool, Sampling(4, 16, seed=8))
    finally:
        pool.deterministic = False
    for key in range(4):
        for one, two in zip(first[key], second[key], strict=True):
            assert one.token_ids.tobytes() == two.token_ids.tobytes()
            assert one.logprobs.tobytes() == two.logprobs.tobytes()
    assert any(a.token_ids.tobytes() != b.token_ids.tobytes() for key in range(4) for a, b in zip(first[key], other[key], strict=True))
    assert len({sample.token_ids.tobytes() for sample in first[0]}) > 1, "each sample of a group has a seed of its own"


def test_a_wrong_version_is_refused_and_named(pool: Any, model_folder: Path) -> None:
    handle = publish(pool, load(model_folder), 9)
    with pytest.raises(RunError, match="holds version 9, not 10"):
        pool.update_weights(replace(handle, version=10))


def test_the_probe_catches_a_head_that_keeps_its_old_weights(pool: Any, model_folder: Path, keep_head: Path) -> None:
    """The fault is real: vLLM's CPU linears are packed copies, and reloading leaves a tied head's copy alone. Only the repair differs."""
    sequences = [(prompt, np.arange(100, 116, dtype=np.int32)) for prompt in PROMPTS[:2]]
    limit = probe.tolerance(0.0, "float32")

    def probed(version: int, seed: int) -> probe.ProbeReport:
        model, before = load(model_folder, seed), pool.score(sequences)
        pool.update_weights(publish(pool, model, version))
        trainer = [logprobs(model, *sequence) for sequence in sequences]
        scores = pool.score(sequences)
        return probe.check(scores, trainer, limit, engine="rollout engine 0", version=version, before=before, tied_head=True)

    assert probed(20, seed=3).largest < 1e-4
    keep_head.touch()
    with pytest.raises(RunError, match=r"probe after weight sync 21: rollout engine 0 .*(?s:.*)tied head"):
        probed(21, seed=4)
    keep_head.unlink()
    assert probed(22, seed=4).largest < 1e-4


def test_z_killing_the_actor_leaves_no_process(pool: Any) -> None:
    """The last of this file: it ends the engine that all tests share."""
    process = pool.workers[0].process
    family = process.tree()
    assert len(family) > 1, "the engine has a process of its own"
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="rollout engine 0 died"):
        generate(pool, GREEDY)
    deadline = time.monotonic() + 60
    while any(member.alive() for member in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [psutil.Process(member.pid).cmdline() for member in family if member.alive()] == []
