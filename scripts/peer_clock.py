"""The seconds of each step of a TRL trainer, as the peers' sides of the benchmarks print them."""

from __future__ import annotations

import json
import time
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Prints the seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        print(json.dumps({"step": state.global_step, "seconds": now - self.last}), flush=True)
        self.last = now
