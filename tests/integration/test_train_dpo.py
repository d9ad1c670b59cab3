"""`msrl train dpo` as a user runs it, on a tiny model that learns which sums are right: metrics, evaluation, best checkpoint, resume, live reference."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from whole_runs import checkpoints_of, command, differences, finish, pair_recipe, rows_of, steps_of, weights_of

from rlcli.app import main
from rlcli.runs.metrics import meaning

pytestmark = pytest.mark.engine

STEPS = 8  # of `pair_recipe`
ALWAYS = {
    "update/loss", "update/reward_chosen", "update/reward_rejected", "update/margin", "update/accuracy", "update/logp_chosen", "update/logp_rejected",
    "update/token_logp_chosen", "update/token_logp_rejected", "update/kl", "update/tokens_chosen", "update/tokens_rejected", "update/truncated_pairs",
    "update/pairs", "update/grad_norm", "update/lr", "update/skipped", "rate/pairs_per_s", "rate/update_tokens_per_s", "seconds/step", "seconds/update",
    "memory/all_gib",
}  # fmt: skip


@dataclass(frozen=True)
class Learnt:
    """A finished run, its recipe, and what it printed."""

    run: Path
    recipe: Path
    output: str


@pytest.fixture(scope="module")
def learnt(tiny_model_factory: Callable[..., Path], demo_data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    folder = tmp_path_factory.mktemp("dpo")
    recipe = pair_recipe(folder, tiny_model_factory("llama"), demo_data_folder)
    output = finish("train", "dpo", "--recipe", str(recipe))
    return Learnt(folder / "runs" / "run", recipe, output)


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run / "metrics.jsonl") if "eval/loss" in row]


def test_held_out_pairs_are_ranked_better(learnt: Learnt) -> None:
    before, *_, after = evaluations(learnt.run)
    assert (before["eval/accuracy"], after["eval/accuracy"] > 0.65) == (0.5, True)
    assert after["eval/margin"] > 0.3
    assert after["eval/loss"] < before["eval/loss"] - 0.1
    assert [row["step"] for row in evaluations(learnt.run)] == [0, 2, 4, 6, 8]


def test_before_the_first_update_the_loss_is_ln_2(learnt: Learnt) -> None:
    """Exactly, for held-out pairs and the first update; and what the cache holds differs by rounding alone."""
    before, first = evaluations(learnt.run)[0], steps_of(learnt.run)[0]
    for row, kind in ((before, "eval"), (first, "update")):
        assert row[f"{kind}/loss"] == pytest.approx(math.log(2), abs=6e-8)
        assert [row[f"{kind}/{name}"] for name in ("margin", "reward_chosen", "reward_rejected", "kl", "accuracy")] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert before["eval/reference_gap"] == 0.0  # packed as the cache was: the same bits
    assert 0 <= first["update/reference_gap"] < 1e-5


def test_every_step_has_every_metric_and_each_is_explained(learnt: Learnt) -> None:
    steps = steps_of(learnt.run)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert set(row) >= ALWAYS
        assert all(math.isfinite(row[name]) for name in ALWAYS)
        assert row["update/pairs"] == 16
        assert row["update/margin"] == pytest.approx(row["update/reward_chosen"] - row["update/reward_rejected"], abs=1e-5)
    written = {name for row in rows_of(learnt.run / "metrics.jsonl") for name in row if name not in ("step", "time", "when")}
    assert [name for name in sorted(written) if not meaning(name)] == []


def test_it_says_what_it_does(learnt: Learnt) -> None:
    for words in ("320 training pairs", "64 held-out pairs", "reference log-probs of 320 pairs: 320 computed", "evaluation before: 50.0% right", "evaluation after"):
        assert words in learnt.output
    assert "Traceback" not in learnt.output
    page = (learnt.run / "report.html").read_text()
    assert all(words in page for words in ("held-out accuracy", "held-out margin", "pairs/s"))
    assert weights_of(learnt.run / "final").keys() == weights_of(Path(yaml.safe_load(learnt.recipe.read_text())["model"])).keys()


def test_the_best_checkpoint_is_kept(learnt: Learnt) -> None:
    assert [path.name for path in checkpoints_of(learnt.run)] == ["step-00000002", "step-00000008"]
    margins = {row["step"]: row["eval/margin"] for row in evaluations(learnt.run)}
    assert margins[2] == min(margins[step] for step in (2, 4, 6, 8))
    kept = json.loads((learnt.run / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert kept["metrics"]["eval/margin"] == margins[2]


def test_resume_is_equal_bit_for_bit(learnt: Learnt, tmp_path: Path) -> None:
    again = Path(shutil.copytree(learnt.run, tmp_path / "again"))
    shutil.rmtree(again / "final")
    output = finish("resume", "--ckpt", str(again / "checkpoints" / "step-00000002"))
    assert "resuming after step 2" in output
    assert "reference log-probs of 320 pairs: all from the cache" in output
    assert differences(learnt.run, again) == []


def test_a_live_reference_gives_the_same_run(learnt: Learnt) -> None:
    """Up to rounding: batches of a cache are packed otherwise. Nothing of the cache is read or written."""
    caches = sorted(learnt.run.parent.glob("data-cache/*/reference-*"))
    assert len(caches) == 2
    finish("train", "dpo", "--recipe", str(learnt.recipe), "dpo.reference=live", "train.steps=4", "run.name=live", "checkpoint.every=0")
    assert sorted(learnt.run.parent.glob("data-cache/*/reference-*")) == caches
    live = learnt.run.parent / "live"
    assert steps_of(live)[0]["update/reference_gap"] == 0.0  # the same rows, packed the same
    for ours, theirs in zip(steps_of(live), steps_of(learnt.run), strict=False):
        for name in ("loss", "margin", "kl", "grad_norm", "accuracy"):
            assert ours[f"update/{name}"] == pytest.approx(theirs[f"update/{name}"], abs=2e-4, rel=2e-4), (ours["step"], name)
    assert len(steps_of(live)) == 4


# Runs msrl; the process is killed when it is about to write the third part of the reference's log-probs.
DIES_AT_THE_THIRD_PART = """
import os, signal, sys
from rlcli.app import main
from rlcli.trainers.reference import ReferenceCache
write = ReferenceCache._write
ReferenceCache._write = lambda self, part, scores: os.kill(os.getpid(), signal.SIGKILL) if part == 2 else write(self, part, scores)
main(sys.argv[1:])
"""


def test_killed_while_the_reference_is_computed(learnt: Learnt, tmp_path: Path) -> None:
    """Started again, it goes on where it stopped; and the run is that of one that was never disturbed, bit for bit."""
    args = ("train", "dpo", "--recipe", str(learnt.recipe), f"run.dir={tmp_path}")
    with command(*args, "run.name=killed", program=("-c", DIES_AT_THE_THIRD_PART)) as running:
        assert running.wait() == -signal.SIGKILL, running.output
    assert len(list(tmp_path.glob("data-cache/*/reference-*/part-*.npz"))) == 2
    output = finish(*args, "run.name=again")
    assert "reference log-probs: going on after 2 of 5 parts" in output
    assert "reference log-probs of 320 pairs: 192 computed" in output
    assert differences(learnt.run, tmp_path / "again") == []


@pytest.mark.parametrize(("which", "where"), [("pairs.train", "step 1, update"), ("pairs.test", "evaluation before")])
def test_a_reference_that_is_not_the_models_own_stops_the_run(learnt: Learnt, tmp_path: Path, which: str, where: str) -> None:
    """As if the folder of another model's cache had been renamed to this one's: the shapes fit, the numbers do not."""
    shutil.copytree(learnt.run.parent / "data-cache", tmp_path / "data-cache")
    pairs = {"pairs.train": 320, "pairs.test": 64}[which]
    caches = tmp_path.glob("data-cache/*/reference-*")
    (folder,) = [cache for cache in caches if sum(len(np.load(part)["starts"]) - 1 for part in cache.glob("part-*")) == pairs]
    for part in folder.glob("part-*"):
        loaded = dict(np.load(part))
        np.savez(part, values=loaded["values"] - np.float32(0.5), starts=loaded["starts"])
    output = finish("train", "dpo", "--recipe", str(learnt.recipe), f"run.dir={tmp_path}", "run.name=other", code=1)
    first = next(line for line in output.splitlines() if line.startswith("error: "))
    assert f"{where}: the reference's log-probs differ from the model's own by 0.5 nats a token before any update (limit 0.02): delete the folders" in first
    assert "Traceback" not in output


def test_a_finished_run_is_not_run_again(learnt: Learnt, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["resume", "--ckpt", str(learnt.run)])
    assert not ended.value.code
    assert "finished, all 8 steps are done" in capsys.readouterr().out


# override -> words of the one line that answers it
FAULTS = {
    "dpo.beta=0": ("dpo.beta", "above 0"),
    "dpo.losses=[sigmoid,hinge]": ("dpo.losses has 2 names and dpo.weights 1 numbers",),
    "dpo.losses=[dpoo]": ("dpo.losses: dpoo; known are sigmoid",),
    "dpo.label_smoothing=0.7": ("dpo.label_smoothing", "0.5"),
    "dpo.divergence=kl": ("dpo.divergence", "reverse_kl"),
    "dpo.reference_model=/nowhere": ("/nowhere",),
    "data.max_prompt_tokens=256": ("leaves no token for an answer in data.max_tokens=256",),
    "train.micro_batch_tokens=300": ("train.micro_batch_tokens=300", "2 x data.max_tokens = 512"),
    "data.truncation=cut": ("data.truncation", "keep_prompt_end"),
    "checkpoint.keep_best=eval/margn": ("there is no metric eval/margn, did you mean eval/margin?",),
    "data.eval=null": ("checkpoint.keep_best=-eval/margin needs an evaluation",),
}


@pytest.mark.parametrize("override", FAULTS)
def test_wrong_settings_are_one_line(override: str, tmp_path: Path, tiny_model_factory: Callable[..., Path], demo_data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, tmp_path, pair_recipe(tmp_path, tiny_model_factory("llama"), demo_data_folder), override)
    assert all(words in line for words in FAULTS[override]), line


def test_wrong_data_is_one_line(learnt: Learnt, capsys: pytest.CaptureFixture[str]) -> None:
    runs = learnt.run.parent
    train = yaml.safe_load(learnt.recipe.read_text())["data"]["train"]
    assert "320 of its 320 pairs are in the training pairs too" in complaint(capsys, runs, learnt.recipe, f"data.eval={train}", "run.name=x")
    short = ("data.max_tokens=30", "data.max_prompt_tokens=20", "data.truncation=drop", "run.name=x")
    assert "none of its 320 pairs can be trained on (320 too_long)" in complaint(capsys, runs, learnt.recipe, *short)


def complaint(capsys: pytest.CaptureFixture[str], folder: Path, recipe: Path, *overrides: str) -> str:
    """The one line that a wrong `msrl train dpo` ends with; nothing but prepared rows is written."""
    before = {path for path in folder.rglob("*") if "data-cache" not in path.parts}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["train", "dpo", "--recipe", str(recipe), *overrides])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert (ended.value.code, line.startswith("error: ")) == (2, True)
    assert {path for path in folder.rglob("*") if "data-cache" not in path.parts} == before
    return line
