"""Every metric that the code writes has its meaning in the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcli.algorithms import dapo
from rlcli.errors import UserError
from rlcli.runs.metrics import MEANINGS, check_metric, meaning

METRIC = re.compile(r'"((?:sampled|sampling|batch|update|rate|seconds|memory|sync|eval)/[a-z_]+)"')


def test_every_name_in_the_trainers_has_a_meaning(repository: Path) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (repository / "rlcli" / "trainers").glob("*.py"))
    names = set(METRIC.findall(text))
    assert len(names) > 30
    assert [name for name in sorted(names) if not meaning(name)] == []


def test_every_mean_of_the_policy_loss_has_a_meaning() -> None:
    assert [name for name in dapo.MEANS if not meaning(f"update/{name}")] == []


@pytest.mark.parametrize("name", ["eval/avg@32", "eval/pass@1", "eval/maj@8", "seconds/save", "eval/reward_chosen"])
def test_names_made_at_run_time_have_one_too(name: str) -> None:
    assert meaning(name)


def test_an_unknown_name_has_none() -> None:
    assert meaning("other/x") == ""
    assert meaning("update/x") == ""


def test_no_meaning_is_empty() -> None:
    assert all(MEANINGS.values())


def test_the_best_by_a_metric_that_no_run_has_is_refused() -> None:
    for name in ("eval/margin", "eval/accuracy", "eval/pass@4", "update/loss"):
        check_metric("checkpoint.keep_best", name)
    with pytest.raises(UserError, match=r"checkpoint.keep_best=-eval/margn: there is no metric eval/margn, did you mean eval/margin\?"):
        check_metric("checkpoint.keep_best=-eval/margn", "eval/margn")
    with pytest.raises(UserError, match=r"there is no metric nope \(a run's report lists them\)"):
        check_metric("checkpoint.keep_best=nope", "nope")
