"""Processes, Ray and placement of a run.

The settings below are read by Ray when it is imported, so they stand here, before any module of this package can import it:
token authentication everywhere, no usage report, every log line kept, and workers at the priority of the command itself
(Ray would put them behind every other process of the machine).
"""

from __future__ import annotations

import os

os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_worker_niceness="0",
)
# A stray address of somebody else's cluster must never be joined silently.
os.environ.pop("RAY_ADDRESS", None)
