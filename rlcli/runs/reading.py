"""Reading a run's samples back, for a terminal. What a model wrote may hold control sequences: none of them reaches the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlcli.errors import UserError
from rlcli.runs import jsonl
from rlcli.runs.folder import read_state
from rlcli.runs.samples import harmless

Row = dict[str, Any]


def find_samples(run: Path, kind: str, step: int | None, correct: bool | None, limit: int) -> list[Row]:
    """The newest samples that fit, at most `limit`, oldest first. Raises UserError where the run has none such."""
    read_state(run)
    path = run / "samples" / f"{kind}.jsonl"
    rows = list(jsonl.read(path))
    if not rows:
        raise UserError(f"{path} has no samples (yet); run.save_samples says how many a step are kept")
    fit = [row for row in rows if (step is None or row.get("step") == step) and (correct is None or bool(row.get("correct")) == correct)]
    if not fit:
        steps = sorted({int(row["step"]) for row in rows})
        word = {None: "", True: "right ", False: "wrong "}[correct]
        where = f" of step {step}" if step is not None else ""
        raise UserError(f"{path} has no {word}samples{where}; it has those of {len(steps)} steps from {steps[0]} to {steps[-1]}")
    return fit[:limit] if step is not None else fit[-limit:]


def show(row: Row, raw: bool = False) -> str:
    """One sample as text, or as one line of JSON."""
    if raw:
        return json.dumps(row, ensure_ascii=True)
    verdict = "right" if row.get("correct") else str(row.get("reason")).replace("_", " ")
    head = f"step {row.get('step')} · prompt {row.get('prompt_id')} · {verdict} · score {row.get('score')} · {row.get('tokens')} tokens · {row.get('finish')}"
    answer = f"answer {harmless(str(row.get('answer')))} · extracted {harmless(str(row.get('extracted')))}"
    prompt, response = (_indent(harmless(str(row.get(name)))) for name in ("prompt", "response"))
    return f"{head}\n{answer}\n  prompt\n{prompt}\n  response\n{response}"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
