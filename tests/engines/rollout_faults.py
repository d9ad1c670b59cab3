"""Faults put into the rollout engine on purpose, by the tests. A file whose path is in the environment switches them on."""

from __future__ import annotations

import os
from pathlib import Path

from rlcli.engines.vllm_worker import WorkerExtension

SWITCH = "MSRL_TEST_KEEP_HEAD"


class KeepsItsHead(WorkerExtension):
    """Takes new weights, but while the switch is on it leaves the tied head's packed copy as it was."""

    def msrl_repack_head(self) -> None:
        if not Path(os.environ[SWITCH]).exists():
            super().msrl_repack_head()
