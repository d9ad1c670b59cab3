"""Kill a run at random instants, resume it each time, and compare it in the end with a run that nothing disturbed: bit for bit.

    python scripts/torture_resume.py --rounds 30                on a tiny model made on the way
    python scripts/torture_resume.py --rounds 100 --folder DIR  keeps the runs in DIR
    python scripts/torture_resume.py --kind dpo                 of `msrl train dpo`

Each round kills one process with kill -9: the driver, the training rank, the rollout engine's actor or vLLM's own process; at any instant of
a step, or in the middle of a save. The first round of DPO kills while the reference's log-probs are computed. After it no process and no temporary file of the run may be left. Then the run is resumed, until the rounds
are over; the last resume runs to the end. Prints a line a round, a summary, and last `equal` or what differs; the exit code is 0 only where all
held. A round costs a start of all engines: 10 to 20 seconds on two cores.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from whole_runs import THOROUGH, Command, checkpoints_of, command, differences, finish, pair_recipe, steps_of, tiny_recipe  # noqa: E402

VICTIMS = {
    "dapo": {"driver": "", "rank": "ray::Host", "rollout": "ray::RolloutWorker", "vLLM": "VLLM::EngineCore"},
    "dpo": {"driver": "", "rank": "ray::Host"},
}
STEPS_A_ROUND = 3
WAIT_S = 180.0
CACHED = "data-cache/*/reference-*/part-*.npz"  # below the folder of runs


@dataclass(frozen=True)
class Round:
    """What one round did: the process killed, when, the command's exit code, the newest checkpoint after, and what was left behind."""

    victim: str
    moment: str
    code: int
    newest: str
    seconds: float
    left: tuple[str, ...]

    @property
    def good(self) -> bool:
        return self.code == (-signal.SIGKILL if self.victim == "driver" else 1) and not self.left and bool(self.newest)

    def line(self, number: int) -> str:
        verdict = "ok" if self.good else f"WRONG: exit code {self.code}, left: {', '.join(self.left) or 'nothing'}"
        return f"{number:4d}  {self.victim:8s} {self.moment:5s} {self.newest:15s} {self.seconds:6.1f} s  {verdict}"


def wait_for(running: Command, ready: Callable[[], bool]) -> bool:
    """Wait until `ready`; False where the run ends, or nothing happens, before."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        if running.process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@dataclass(frozen=True)
class Target:
    """The run that is tortured: kind of its recipe, the recipe, the run's folder."""

    kind: str
    recipe: Path
    run: Path

    @property
    def arguments(self) -> list[str]:
        """The command that resumes the run, or begins it where there is nothing to resume."""
        if checkpoints_of(self.run):
            return ["resume", "--ckpt", str(self.run)]
        shutil.rmtree(self.run, ignore_errors=True)
        return ["train", self.kind, "--recipe", str(self.recipe)]


def strike(running: Command, target: Target, victim: str, moment: str, dice: random.Random) -> bool:
    """Kill the victim after a new checkpoint: at a random instant of the time of a step, or within a save; or while the reference's log-probs
    are computed. False where the run ended first."""
    run = target.run
    before = set(checkpoints_of(run))
    begun = (lambda: any(run.parent.glob(CACHED))) if moment == "cache" else (lambda: bool(set(checkpoints_of(run)) - before))
    if not wait_for(running, begun):
        return False
    if moment == "save":
        if not wait_for(running, lambda: any((run / "checkpoints").glob(".partial-*"))):
            return False
        time.sleep(dice.uniform(0.0, 0.1))
    elif moment == "step":
        time.sleep(dice.uniform(0.0, 1.0) * steps_of(run)[-1]["seconds/step"])
    if running.process.poll() is not None:
        return False
    (running.process if victim == "driver" else running.member(VICTIMS[target.kind][victim])).send_signal(signal.SIGKILL)
    return True


def one_round(target: Target, dice: random.Random) -> Round | None:
    """Start, kill, look at what is left; None where the run came to its end."""
    filling = target.kind == "dpo" and not any(target.run.parent.glob(CACHED))
    victim, moment, started = dice.choice(list(VICTIMS[target.kind])), dice.choice(("step", "step", "save")), time.monotonic()
    moment = "cache" if filling else moment
    with command(*target.arguments) as running:
        if not strike(running, target, victim, moment, dice):
            if running.process.poll() == 0:
                return None
            print(running.output, file=sys.stderr)
            return Round(victim, moment, running.process.poll() or 0, "", time.monotonic() - started, ("no progress",))
        code, left = running.wait(WAIT_S), running.leftovers()
    newest = max((path.name for path in checkpoints_of(target.run)), default="none yet" if filling else "")
    return Round(victim, moment, code, newest, time.monotonic() - started, tuple(left))


def torture(target: Target, reference: Path, rounds: int, seed: int) -> bool:
    """All rounds, the end of the run, and the comparison. Prints as it goes; whether everything held."""
    dice, done = random.Random(seed), []
    print(f"{rounds} rounds, seed {seed}\n   #  killed   when  newest after      time", flush=True)
    for number in range(1, rounds + 1):
        result = one_round(target, dice)
        if result is None:
            print(f"the run came to its end after {len(done)} rounds")
            break
        done.append(result)
        print(result.line(number), flush=True)
        if not result.newest:
            return False
    finish(*target.arguments)
    kinds = Counter(f"{item.victim} in a {item.moment}" for item in done)
    print(f"{len(done)} kills: {', '.join(f'{count} x {kind}' for kind, count in sorted(kinds.items()))}")
    print(f"{sum(bool(item.left) for item in done)} rounds left something behind, {sum(not item.good for item in done)} rounds went wrong")
    different = differences(target.run, reference)
    print("\n".join(different) if different else "equal")
    return not different and all(item.good for item in done)


def prepare(kind: str, folder: Path, rounds: int) -> dict[str, Target]:
    """A tiny model in `folder`, and recipes of two runs that are long enough, each with a folder of its own."""
    from make_demo_data import make as make_data
    from make_tiny_model import make_model

    steps = STEPS_A_ROUND * rounds + 4
    model = make_model(folder / "model", "qwen2" if kind == "dapo" else "llama")
    if kind == "dpo":
        make_data(folder / "data", train=320, test=64, seed=1)
    targets = {}
    for name in ("undisturbed", "tortured"):
        (folder / name).mkdir(exist_ok=True)
        run = {"name": name}
        if kind == "dapo":
            # slow enough that the task is not learnt before the end: where every answer is right, no step has an update
            settings = {**THOROUGH, "train": {**THOROUGH["train"], "steps": steps}, "optim": {"lr": 2e-5}, "run": run}
            recipe = tiny_recipe(folder / name, model, **settings)
        else:
            recipe = pair_recipe(folder / name, model, folder / "data", train={"steps": steps}, checkpoint={"every": 1, "keep_last": 3}, eval={"every": 5}, run=run)
        targets[name] = Target(kind, recipe, folder / name / "runs" / name)
    return targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=sorted(VICTIMS), default="dapo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="of the kills; by default another one each time")
    parser.add_argument("--folder", type=Path, default=None, help="keep the runs here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the run of the round is ended with it
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="msrl-torture-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        targets = prepare(args.kind, folder, args.rounds)
        finish(*targets["undisturbed"].arguments)
        held = torture(targets["tortured"], targets["undisturbed"].run, args.rounds, seed)
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
