"""The mark in a folder that is being written: who reads refuses it, so that weights not written yet are never taken for zeros."""

from __future__ import annotations

from pathlib import Path

from rlcli.errors import UserError

MARK = ".msrl-converting"
WHOLE = "whole\n"  # the mark's content once all is written, until the folder has its name


def refuse_unfinished(folder: Path) -> None:
    """UserError where `folder`, or the one it lies in, is being written or was left half-written."""
    folder = folder.resolve()
    for at in (folder, folder.parent):
        try:
            content = (at / MARK).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            content = ""
        if content != WHOLE:
            raise UserError(f"{at}: was not written to the end (stopped, or still at work); write it again, or remove it")
