"""Allocators that can be preloaded: garbage is refused by the trial start, absence is no error, and what is there really gets loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.errors import UserError
from rlcli.platforms import allocator


@pytest.fixture
def garbage(tmp_path: Path) -> Path:
    file = tmp_path / "libtcmalloc.so.4"
    file.write_bytes(b"this is no library")
    return file


def test_a_garbage_file_fails_the_trial_start(garbage: Path) -> None:
    assert allocator.trial(str(garbage)) == "the loader refuses it"
    assert allocator.trial(str(garbage.with_name("absent.so"))) == "no such file"


def test_auto_passes_over_garbage_and_absence_is_no_error(garbage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "candidates", lambda: [str(garbage)])
    assert allocator.find("auto") == allocator.Allocator(None, allocator.NOT_FOUND)
    monkeypatch.setattr(allocator, "candidates", lambda: [])
    assert "install tcmalloc" in allocator.find("auto").note
    assert allocator.find("off") == allocator.Allocator(None, "off")


def test_a_named_library_that_cannot_be_loaded_is_the_users_error(garbage: Path) -> None:
    with pytest.raises(UserError, match=r"cluster.preload_allocator=.*cannot be preloaded"):
        allocator.find(str(garbage))


def test_the_library_is_appended_to_what_is_preloaded_already() -> None:
    found = allocator.Allocator("/lib/b.so", "")
    assert found.preload("") == "/lib/b.so"
    assert found.preload("/lib/a.so") == "/lib/a.so:/lib/b.so"
    assert found.preload("/lib/a.so /lib/b.so") == "/lib/a.so:/lib/b.so"
    assert allocator.Allocator(None, "off").preload("/lib/a.so") == "/lib/a.so"


def test_what_is_found_is_really_loaded() -> None:
    found = allocator.find("auto")
    if found.path is None:
        pytest.skip("no tcmalloc or jemalloc on this machine")
    code = "print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], env={**os.environ, "LD_PRELOAD": found.preload()}, capture_output=True, text=True, check=True)
    assert os.path.realpath(found.path) in maps.stdout
