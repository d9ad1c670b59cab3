"""Verdicts a second: through the pool of killable processes, against calling the same verifier in this process. One run, both sides.

    python scripts/bench_reward.py [--workers 2] [--seconds 5]

Responses are like a mathematics model's: 16 of one prompt judged together, about 2,000 characters, half right, answers written in
several ways. Verifiers are warmed up before; every prompt is new to them in each round. Targets on two cores: 500 verdicts/s for
dapo and boxed, 100 for math. The last line is the ratio of the pool to the calls, for math.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlcli.config.schema import RewardConfig
from rlcli.rewards.pool import Item, RewardPool
from rlcli.rewards.verifiers import resolve

SAMPLES = 16
TARGETS = {"dapo": 500, "boxed": 500, "math": 100}
THOUGHT = "Let us set up the equation and solve it step by step, checking each of the cases in turn. "


def forms(number: int) -> tuple[str, list[str]]:
    """A truth that no other number has, and ways to write it, of which half are wrong; most need algebra."""
    n = number + 2
    kinds: list[tuple[str, list[str]]] = [
        (f"\\frac{{{n}}}{{{n + 1}}}", [f"{n}/{n + 1}", f"\\dfrac{{{2 * n}}}{{{2 * n + 2}}}", f"{n + 1}/{n}", f"\\frac{{{n}}}{{{n + 2}}}"]),
        (f"{n}\\sqrt{{2}}", [f"\\sqrt{{{2 * n * n}}}", f"\\sqrt{{2}} \\cdot {n}", f"\\sqrt{{{2 * n}}}", f"{n + 1}\\sqrt{{2}}"]),
        (f"x^2 + {2 * n}x + {n * n}", [f"(x+{n})^2", f"{n * n} + {2 * n}x + x^2", f"(x-{n})^2", f"x^2 + {n * n}"]),
        (f"({n}, \\frac{{\\pi}}{{2}})", [f"({n}, \\pi/2)", f"\\left({n}, \\frac{{1}}{{2}}\\pi\\right)", f"({n}, \\pi)", f"({n + 1}, \\pi/2)"]),
    ]
    return kinds[number % len(kinds)]


def group(number: int) -> list[Item]:
    truth, answers = forms(number)
    texts = (f"{THOUGHT * 22}\nSo we get $\\boxed{{{answer}}}$.\nAnswer: ${answer}$" for answer in (answers * SAMPLES)[:SAMPLES])
    return [Item(text, truth) for text in texts]


def rate(seconds: float, groups: Iterator[list[Item]], judge: Callable[[list[list[Item]]], int]) -> float:
    """Verdicts a second over at least so many seconds, after one round that is not measured."""
    judge([next(groups) for _ in range(16)])
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        done += judge([next(groups) for _ in range(16)])
    return done / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    cores = f"{len(os.sched_getaffinity(0))} cores, load of the last minute {os.getloadavg()[0]:.1f}"
    print(f"{SAMPLES} responses a prompt, {len(group(0)[0].text)} characters each; {args.workers} workers, {cores}")
    print(f"{'verifier':10}{'in process':>14}{'pool':>14}{'ratio':>8}{'target':>8}")
    ratio = 0.0
    for name, target in TARGETS.items():
        verifier = resolve([name])
        verifier.warm_up()

        def call(groups: list[list[Item]], verifier: Callable[..., object] = verifier) -> int:
            return len([verifier(item.text, item.truth, item.extra) for items in groups for item in items])

        numbers = count()  # each side gets prompts that neither has seen
        fresh = (group(next(numbers)) for _ in count())
        alone = rate(args.seconds, fresh, call)
        with RewardPool(RewardConfig(verifiers=[name], workers=args.workers)) as pool:

            def judge(groups: list[list[Item]], pool: RewardPool = pool) -> int:
                for key, items in enumerate(groups):
                    pool.submit(key, items)
                waiting, done = len(groups), 0
                while waiting:
                    finished = pool.poll(10.0)
                    waiting -= len(finished)
                    done += sum(len(verdicts) for _, verdicts in finished)
                return done

            pooled = rate(args.seconds, fresh, judge)
            lost = pool.counts["timeout"] + pool.counts["crashed"]
        ratio = pooled / alone
        met = "met" if pooled >= target else "missed"
        print(f"{name:10}{alone:11.0f} /s{pooled:11.0f} /s{ratio:8.2f}{target:8} {met}" + (f", {lost} lost" if lost else ""))
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
