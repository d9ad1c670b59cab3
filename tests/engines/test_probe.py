"""The probe's arithmetic and what it says."""

from __future__ import annotations

import numpy as np
import pytest

from rlcli.engines.probe import check, compare, tolerance
from rlcli.errors import RunError

TRAINER = [np.array([-1.0, -2.0], np.float32), np.array([-3.0, -1.0, -0.5], np.float32)]
ROLLOUT = [np.array([-1.1, -2.0], np.float32), np.array([-3.0, -0.6, -0.5], np.float32)]


def test_gaps_by_hand() -> None:
    report = compare(ROLLOUT, TRAINER)  # differences -0.1, 0 and 0, +0.4, 0
    assert report.mean == pytest.approx(0.5 / 5, abs=1e-6)
    assert report.largest == pytest.approx(0.4, abs=1e-6)
    assert [gap.mean for gap in report.gaps] == pytest.approx([0.05, 0.4 / 3], abs=1e-6)
    assert [gap.bias for gap in report.gaps] == pytest.approx([-0.05, 0.4 / 3], abs=1e-6)
    assert [gap.tokens for gap in report.gaps] == [2, 3]


def test_tolerance_by_dtype_or_by_setting() -> None:
    assert [tolerance(0.0, dtype) for dtype in ("float32", "bfloat16", "float16")] == [0.02, 0.25, 0.25]
    assert tolerance(0.5, "float32") == 0.5


def test_within_the_limit_the_report_is_returned() -> None:
    assert check(ROLLOUT, TRAINER, 0.11, engine="rollout engine 0", version=3).mean == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("rollout", "before", "tied", "temperature", "words"),
    [
        (ROLLOUT, ROLLOUT, True, 1.0, "still runs the old weights"),
        (ROLLOUT, TRAINER, True, 1.0, "tied head"),
        (ROLLOUT, None, False, 0.7, "temperature 0.7"),
        ([np.array([np.nan, -1.0], np.float32), ROLLOUT[1]], None, False, 1.0, "not finite"),
    ],
)
def test_beyond_it_the_message_names_sequence_size_and_suspect(rollout: list, before: list | None, tied: bool, temperature: float, words: str) -> None:
    with pytest.raises(RunError) as caught:
        check(rollout, TRAINER, 0.05, engine="rollout engine 1", version=3, before=before, tied_head=tied, temperature=temperature)
    text = str(caught.value)
    assert text.startswith("probe after weight sync 3: rollout engine 1 and the trainer disagree by")
    assert "sequence 1: mean 0.1333, largest 0.4000, bias +0.1333 over 3 tokens" in text
    assert words in text
