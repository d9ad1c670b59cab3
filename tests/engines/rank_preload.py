"""Imported once by the server that ranks are forked from, so that not every rank pays for importing torch and Megatron."""

import os
import warnings

warnings.filterwarnings("ignore")
os.environ["OMP_NUM_THREADS"] = "1"

from rlcli.platforms.base import pick  # noqa: E402

pick("auto").before_megatron()

import megatron.core.dist_checkpointing  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401
