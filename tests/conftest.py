"""Fixtures for the whole suite, and a closing section that says loudly which tests did not run here, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# A suite started in the background, or by nohup, inherits ignored signals, and so would the programs whose signals it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # still no end to the suite, but programs start without it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    """A module of scripts/, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Imports a script by its name without suffix."""
    return load_script


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with ChatML template: ids 0-255 bytes, 256 bos and pad, 257 <|im_start|>, 258 <|im_end|> (eos)."""
    folder: Path = load_script("make_tiny_model").make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return folder


@pytest.fixture(scope="session")
def tiny_model_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model_factory(kind="llama", tie=False, layers=2, seed=1, dtype="float32")` -> HF folder, made once for the same arguments.

    kinds: llama, qwen2, qwen3, mistral, qwen3_moe. Tests must not write into the folder: copy it first.
    """
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str = "llama", tie: bool = False, layers: int = 2, seed: int = 1, dtype: str = "float32") -> Path:
        key = (kind, tie, layers, seed, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{kind}")
            made[key] = load_script("make_tiny_model").make_model(folder, kind, tie, layers, seed, dtype)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """add20.train/test.parquet (320 and 64 rows of the DAPO schema) and pairs.train/test.jsonl."""
    folder = tmp_path_factory.mktemp("demo-data")
    load_script("make_demo_data").make(folder, train=320, test=64, seed=1)
    return folder


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model_factory: Callable[..., Path]) -> Any:
    """A finished run of `msrl train dapo` on a tiny model (`whole_runs.Finished`), that others are compared with. Read only."""
    from whole_runs import run_undisturbed

    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), tiny_model_factory("qwen2"))


def _lacks_cuda() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return "no CUDA device: nvidia-smi is not there"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device: this torch build sees none"


def _lacks_namespaces() -> str | None:
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    return None if shutil.which("ip") else "needs the `ip` command (Debian: iproute2)"


def _lacks_npu() -> str | None:
    return None if list(Path("/dev").glob("davinci[0-9]*")) else "no Ascend NPU: no /dev/davinci* device"


NEEDS: dict[str, Callable[[], str | None]] = {"gpu": _lacks_cuda, "multinode": _lacks_namespaces, "npu": _lacks_npu}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, each with its reason."""
    reasons = {marker: lacks() for marker, lacks in NEEDS.items() if any(item.get_closest_marker(marker) for item in items)}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason of a skip, with the number of tests behind it: a green run must not hide what it left out."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        counts[reason] = counts.get(reason, 0) + 1
    if counts:
        terminalreporter.section("NOT RUN ON THIS MACHINE", sep="=", yellow=True, bold=True)
        for reason, count in sorted(counts.items()):
            terminalreporter.write_line(f"  {count:4d} tests: {reason}", yellow=True)
