"""A small process that outlives the driver by a moment: when the driver is gone, however it went, it ends all that was the driver's.

Started as `python -m rlcli.cluster.guardian FOLDER` with a pipe as standard input, whose other end only the driver holds: its end of
file is the driver's death. Ray's own agents outlive a killed driver, and so may processes that workers started.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlcli.cluster.processes import STOP_SIGNALS, ProcessId, marked

RECORD = "processes.json"
MARK = "MSRL_CLUSTER"  # in the environment of every process of a run but its driver: helpers that lost their parents are known by it
FOLDERS = "folders.json"  # elsewhere, that go with the run
DYING_S = 5.0
TIDYING_S = 3.0  # for helpers that clear up what processes left that were killed, and then end by themselves
GRACE_S = 1.0  # for those that end by themselves, so that they can flush their logs


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the guardian of `folder`; keep the returned process: closing its standard input lets it do its work."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlcli.cluster.guardian", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C on the terminal is not for it
    )


def end_family(folder: Path) -> None:
    """End every process on record and its descendants, then remove the run's folders. The first on record is the driver itself: left alone."""
    try:
        known = [ProcessId(*pair) for pair in json.loads((folder / RECORD).read_text())[1:]]
    except (OSError, ValueError, TypeError):
        known = []
    try:
        others = [Path(name) for name in json.loads((folder / FOLDERS).read_text())]
    except (OSError, ValueError, TypeError):
        others = []
    begun = time.monotonic()
    while family := {member for process in known for member in process.tree()} | set(marked(MARK, str(folder))):
        spent = time.monotonic() - begun
        for member in family:
            if spent > TIDYING_S or not member.tidies():
                member.kill()
        if spent > DYING_S:
            break
        time.sleep(0.02)  # what still dies may still write into the folders
    for path in [*others, folder]:
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # only the driver's end is for it
    sys.stdin.buffer.read()  # until the driver closes its end, or dies
    folder = Path(sys.argv[1])
    if folder.exists():
        time.sleep(GRACE_S)
        end_family(folder)


if __name__ == "__main__":
    main()
