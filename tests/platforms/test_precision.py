"""Every process that computes asks oneMKL for its functions on one thread first: a first call by two threads may give half the digits.

The fault itself comes once in some thousand starts, too seldom for a test: scripts/torture_first_calls.py counts it, with and without.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rlcli.cluster.processes import ProcessId
from rlcli.platforms import precision

ENGINE = "import rlcli.engines.vllm_worker"
RANK = "from rlcli.platforms.base import pick; pick('cpu').before_megatron()"


@pytest.mark.parametrize("start", [ENGINE, RANK])
def test_processes_that_compute_have_settled(start: str) -> None:
    own = ProcessId.own()
    env = {**os.environ, "MSRL_ROLLOUT_OWNER": f"{own.pid} {own.started}"}
    code = f"{start}; from rlcli.platforms import precision; print(precision.settled())"
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_the_process_of_a_rollout_engine_imports_nothing_where_it_has_no_owner() -> None:
    env = {name: value for name, value in os.environ.items() if name != "MSRL_ROLLOUT_OWNER"}
    code = f"import sys; {ENGINE}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_all_functions_exist_and_compute_both_dtypes() -> None:
    for name in precision.FUNCTIONS:
        for dtype in (torch.float32, torch.float64):
            assert getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype)).isfinite().all(), name
