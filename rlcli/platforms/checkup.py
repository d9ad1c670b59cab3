"""What `msrl doctor` looks at: packages against the versions this project supports, this machine, and, if asked, whether the engines start to load."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rlcli.platforms.base import PRIVATE, Platform, pick

OK, WARN, BAD = "ok", "warn", "bad"
DEEP_SECONDS = 180.0

# Distribution -> what to import to see whether it works; in a process of its own, since each takes seconds.
ENGINES = {"torch": "torch", "megatron-core": "megatron.core", "ray": "ray", "vllm": "vllm"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, what was found, and what to do unless it is ok."""

    group: str
    name: str
    state: str
    text: str
    advice: str = ""


def examine(platform_name: str = "auto", deep: bool = False) -> list[Finding]:
    """All findings, in the order to be shown. Raises UserError for a platform that this machine has not."""
    platform = pick(platform_name)
    findings = [*_packages(platform.name), *_machine(platform)]
    if deep:
        findings += _engines(platform)
    return findings


def supported(extra: str) -> tuple[str, list[str]]:
    """(Python versions, requirements) of this project with one of its extras, as its packaging states them."""
    try:
        own = metadata.metadata("msrl")
        return own["Requires-Python"] or "", own.get_all("Requires-Dist") or []
    except metadata.PackageNotFoundError:
        return _from_checkout(extra)


def _from_checkout(extra: str) -> tuple[str, list[str]]:
    """The same from pyproject.toml, for a checkout that is not installed."""
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        import tomllib
    except ImportError:  # Python 3.10
        return "", []
    if not path.is_file():
        return "", []
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).get(extra, [])
    return project.get("requires-python", ""), [*project["dependencies"], *(f'{item}; extra == "{extra}"' for item in extras)]


def _packages(extra: str) -> Iterator[Finding]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    python, requirements = supported(extra)
    version = ".".join(map(str, sys.version_info[:3]))
    fits = SpecifierSet(python).contains(version)
    yield Finding("packages", "Python", OK if fits else BAD, version, "" if fits else f"msrl needs Python {python}")
    if not requirements:
        yield Finding("packages", "msrl", WARN, "not installed, so the supported versions are not known", "pip install -e .")
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield _package(requirement.name, requirement.specifier)


def _package(name: str, wanted: object) -> Finding:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("packages", name, BAD, "not installed", f'pip install "{name}{wanted}", or install from requirements/')
    fits = wanted.contains(found, prereleases=True)  # type: ignore[attr-defined]
    return Finding("packages", name, OK if fits else BAD, found, "" if fits else f'supported: {wanted}; pip install "{name}{wanted}"')


def _machine(platform: Platform) -> Iterator[Finding]:
    count = platform.device_count()
    yield Finding("machine", "platform", OK, f"{platform.name}, {count} {'device' if count == 1 else 'devices'}; collectives by {platform.collectives}")
    for probe in platform.probes():
        text, _, advice = probe.text.partition(": ") if not probe.ok else (probe.text, "", "")
        yield Finding("machine", probe.name, OK if probe.ok else WARN, text, advice or ("" if probe.ok else "see the figure"))
    yield _temporary()
    yield _files()
    yield _hub()


def _temporary() -> Finding:
    folder = tempfile.gettempdir()
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("machine", "temporary files", BAD, f"{folder} cannot be written ({error.strerror})", "set TMPDIR to a folder that can")
    state = OK if free > 5 << 30 else WARN
    return Finding("machine", "temporary files", state, f"{folder} has {free / 2**30:.1f} GiB free", "" if state == OK else "Ray and logs need about 5 GiB: set TMPDIR")


def _files() -> Finding:
    """Workers and their connections take many file descriptors; the soft limit is raised up to the hard one by Ray, not beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = OK if hard == resource.RLIM_INFINITY or hard >= 8192 else WARN if hard >= 1024 else BAD
    return Finding("machine", "open files", state, f"{soft:,} allowed, {hard:,} at most", "" if state == OK else "raise the hard limit: ulimit -Hn 65536")


def _hub() -> Finding:
    value = os.environ.get("HF_HUB_OFFLINE")
    text = "workers never ask a model hub; models and data are folders and files"
    return Finding("machine", "offline", OK, text + (" (HF_HUB_OFFLINE is set here too)" if value == "1" else ""))


def _engines(platform: Platform) -> Iterator[Finding]:
    """Import each engine in a process of its own, with the environment that a worker of its role would have."""
    for name, module in ENGINES.items():
        before = f"from rlcli.platforms.base import pick; pick({platform.name!r}).before_megatron(); " if name == "megatron-core" else ""
        yield _import(name, f"{before}import {module}; print({module}.__version__)")


def _import(name: str, code: str) -> Finding:
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **PRIVATE}, capture_output=True, text=True, timeout=DEEP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("engines", name, BAD, f"does not load within {DEEP_SECONDS:.0f} s", "look at the machine's load, and install again from requirements/")
    if done.returncode == 0:
        return Finding("engines", name, OK, f"{done.stdout.split()[-1]} loads in {time.monotonic() - started:.1f} s")
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return Finding("engines", name, BAD, f"does not load: {last[:160]}", "install again from requirements/, into an environment of its own")
