"""Make the demo's data: a small task with exact answers, and preference pairs about the same task.

addition: two worked turns and a question ("What is 7 + 12?", to be answered "Answer: 19"), in the official DAPO-Math-17k schema, as parquet.
  A held-out sum never occurs in training, in either order of its operands.
pairs: prompt, chosen and rejected as lists of messages, as jsonl; the chosen answer is right and in the asked format, the rejected one is wrong,
  or right and out of format. A third of them follow the two worked turns, a third have a system prompt.

    python scripts/make_demo_data.py --out .demo
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Message = dict[str, str]
WORKED = ((3, 5), (12, 7))
LARGEST = 20  # operands run from 1 to this
SYSTEM = "You solve sums. Reply with one line of the form Answer: N, and nothing else."

MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)


def message(role: str, content: str) -> Message:
    return {"content": content, "role": role}


def question(a: int, b: int) -> Message:
    return message("user", f"What is {a} + {b}?")


def worked_turns() -> list[Message]:
    """The two examples that show the model the asked format."""
    return [turn for a, b in WORKED for turn in (question(a, b), message("assistant", f"Answer: {a + b}"))]


def split_sums(rng: random.Random, test: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of operands but the worked ones, as (train, test): a pair and its mirror image fall on the same side."""
    worked = {tuple(sorted(pair)) for pair in WORKED}
    unordered = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1) if (a, b) not in worked]
    rng.shuffle(unordered)
    held_out: list[tuple[int, int]] = []
    while len(held_out) < test:
        a, b = unordered.pop()
        held_out += [(a, b)] if a == b else [(a, b), (b, a)]
    train = [pair for a, b in unordered for pair in {(a, b), (b, a)}]
    train.sort()
    rng.shuffle(train)
    return train, held_out[:test]


def addition_row(name: str, number: int, a: int, b: int) -> dict[str, Any]:
    """One row of the DAPO-Math-17k schema."""
    return {
        "data_source": "math_dapo",
        "prompt": [*worked_turns(), question(a, b)],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(a + b), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"addition-{name}-{number}"},
    }


def pair_row(rng: random.Random, number: int, a: int, b: int) -> dict[str, Any]:
    """One preference: the right line against a wrong or an unformatted answer."""
    prompts = ([question(a, b)], [message("system", SYSTEM), question(a, b)], [*worked_turns(), question(a, b)])
    total, off = a + b, rng.choice((-3, -2, -1, 1, 2, 3, 10))
    wrong = f"Answer: {max(total + off, 0)}"
    loose = rng.choice((f"{total}", f"The answer is {total}.", f"Sure! {a} plus {b} equals {total}, I believe.", f"{a} + {b} = {total}"))
    return {
        "prompt": prompts[number % 3],
        "chosen": [message("assistant", f"Answer: {total}")],
        "rejected": [message("assistant", wrong if rng.random() < 0.5 else loose)],
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows beside the file and rename: a crash leaves no half file."""
    draft = path.with_name(f".{path.name}.part")
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), draft)
    else:
        draft.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(draft, path)


def make(folder: Path, train: int, test: int, seed: int) -> dict[str, int]:
    """Write the four files; returns the rows of each. The same seed gives the same rows."""
    sums, held_out = split_sums(random.Random(seed), test)
    rng = random.Random(seed + 1)
    files = {
        "add20.train.parquet": [addition_row("train", i, a, b) for i, (a, b) in enumerate(sums[:train])],
        "add20.test.parquet": [addition_row("test", i, a, b) for i, (a, b) in enumerate(held_out)],
        "pairs.train.jsonl": [pair_row(rng, i, a, b) for i, (a, b) in enumerate(sums[:train])],
        "pairs.test.jsonl": [pair_row(rng, i, a, b) for i, (a, b) in enumerate(held_out)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        write(folder / name, rows)
    return {name: len(rows) for name, rows in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--train", type=int, default=320, help="most training rows (default: %(default)s)")
    parser.add_argument("--test", type=int, default=64, help="held-out rows, 1 to 100 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not 1 <= args.test <= 100 or args.train < 1:
        parser.error("--train must be at least 1 and --test between 1 and 100")
    for name, rows in make(args.out, args.train, args.test, args.seed).items():
        print(f"{args.out / name}: {rows} rows")


if __name__ == "__main__":
    main()
