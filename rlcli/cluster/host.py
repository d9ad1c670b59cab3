"""The Ray actor that houses one engine worker: it keeps a log of its own, answers signs of life, and forwards calls."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from typing import Any

from rlcli.cluster.processes import ProcessId, die_with_parent, ignore_stop_signals


def redirect_output(log: str) -> None:
    """Send everything this process writes, C++ libraries included, to its own log file."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=sys.stderr)


class Host:
    """Houses one object, made from `factory` ("package.module:Class"). Calls run one at a time; `ping` answers beside them."""

    def __init__(self, log: str) -> None:
        redirect_output(log)
        die_with_parent()
        ignore_stop_signals()
        self.inner: Any = None

    def build(self, factory: str, *args: Any) -> None:
        module, name = factory.split(":")
        self.inner = getattr(importlib.import_module(module), name)(*args)

    def identity(self) -> tuple[ProcessId, str]:
        """This process, and the address of its node."""
        import ray

        return ProcessId.own(), ray.util.get_node_ip_address()

    def free_port(self) -> int:
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.inner, method)(*args)

    def ping(self) -> bool:
        return True
