"""Speed of `msrl ckpt convert` against plain copying of the same bytes, both to the disk (fsync), in turns in one run.

    python scripts/bench_convert.py --model SmolLM2 [--copies 6] [--formats mcore torch_dist classic] [--rounds 4]

The model is that folder with its layers repeated so that gigabytes are moved, to each format and back. The last line is `ratio N.NN`: the least of
all conversions' speeds / copying, bytes a second, medians. Apart stand verification (every tensor read again from both sides and compared, checksums
of all that was written) and the start of Python and torch. Both sides run in the same process, first one, then the other, by turns, each some seconds
after memory was freed last. Memory is what conversion and verification add to that process at their peak.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ONE = "--one-round"  # how this script starts itself
SETTLE = 5.0  # seconds after memory was freed until either side starts: a virtual machine may hand it back to its host, which makes it slow to touch


def enlarge(model: Path, out: Path, copies: int) -> int:
    """A model with `copies` times the layers of `model`; returns its bytes."""
    sys.path.insert(0, str(ROOT))
    from dataclasses import replace

    from rlcli.models.export import HfWriter
    from rlcli.models.files import Reader
    from rlcli.models.registry import read_config, read_model

    small = read_model(model, tokenizer=False)
    config = {**small.config, "num_hidden_layers": small.layers * copies}
    spec = replace(read_config(config, model), tensors=small.tensors)
    read = Reader(small.tensors)

    def original(name: str) -> str:
        parts = name.split(".")
        return ".".join([*parts[:2], str(int(parts[2]) % small.layers), *parts[3:]]) if parts[:2] == ["model", "layers"] else name

    names = {s.name: small.dtype for rule in spec.rules for s in rule.sources}
    writer = HfWriter(spec, out, dtypes=names)
    writer.create()
    writer.finish(writer.write((n, read(original(n))) for n in writer.places))
    (out / "config.json").write_text(json.dumps(config))
    return writer.bytes


def copy(source: Path, target: Path) -> float:
    """Seconds to copy every file and see it to the disk."""
    began = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as f:
            os.fsync(f.fileno())
    return time.perf_counter() - began


def one_round(words: list[str]) -> None:
    """Of a process of its own: copy and convert, each to a disk and a memory that have settled; prints what `Round` holds."""
    sys.path.insert(0, str(ROOT))
    import torch.distributed.checkpoint.filesystem  # noqa: F401  neither side's time

    from rlcli.checkpoint.convert import Conversion
    from rlcli.checkpoint.convert import convert as run
    from rlcli.models.layout import Layout

    copied, load, save, to, tp, pp, threads, copy_first = words
    aside = Path(save).with_name("copy")

    def copying() -> float:
        time.sleep(SETTLE)
        seconds = copy(Path(copied), aside)
        shutil.rmtree(aside)
        return seconds

    seconds = copying() if copy_first == "1" else 0.0
    time.sleep(SETTLE)
    before = _peak(reset=True)
    done = run(Conversion(Path(load), Path(save), to, layout=Layout(tensor=int(tp), pipeline=int(pp)), threads=int(threads)))
    memory = _peak() - before
    print(json.dumps([seconds or copying(), done.seconds, done.verify_seconds, done.bytes, memory]))


def _peak(reset: bool = False) -> int:
    """Highest resident memory of this process in bytes, from now on where `reset`."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024


class Round(NamedTuple):
    """Seconds, bytes of the model, and bytes of memory that converting and verifying added at their peak."""

    copy: float
    convert: float
    verify: float
    bytes: int
    memory: int


def measure(source: Path, work: Path, to: str, layout: tuple[int, int], options: argparse.Namespace) -> tuple[float, Path]:
    """Print a row of the table; (converting / copying, the folder that was made)."""
    out, rounds = work / f"{source.name}-{to}", list[Round]()
    for number in range(options.rounds):
        shutil.rmtree(out, ignore_errors=True)
        words = [options.copied, source, out, to, *layout, options.threads, 1 - number % 2]
        run = subprocess.run([sys.executable, __file__, ONE, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
        rounds.append(Round(*json.loads(run.stdout)))
    seconds = [statistics.median(column) for column in list(zip(*rounds, strict=True))[:3]]
    rate = [rounds[0].bytes / x / 1e9 for x in seconds]
    label = f"{source.name.rpartition('-')[2]} -> {to}" + ("" if to == "hf" else f" tp={layout[0]} pp={layout[1]}")
    memory = max(r.memory for r in rounds) / 2**20
    print(f"{label:28s}{rate[0]:10.2f}{rate[1]:14.2f}{rate[1] / rate[0]:8.2f}{rate[2]:13.2f}{memory:14.0f}", flush=True)
    return rate[1] / rate[0], out


def main() -> None:
    if sys.argv[1:2] == [ONE]:
        one_round(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--formats", nargs="+", default=["mcore", "torch_dist", "classic"])
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="even, so that each side is first as often")
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--work", type=Path, default=None, help="folder on the disk to measure; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as made:
        work, ratios = Path(made), []
        source = options.copied = work / "hf"
        size = enlarge(options.model, source, options.copies)
        print(f"{size / 2**30:.2f} GiB, medians of {options.rounds}")
        print(f"{'':28s}{'copy GB/s':>10}{'convert GB/s':>14}{'ratio':>8}{'verify GB/s':>13}{'memory MiB':>14}", flush=True)
        for to in options.formats:
            ratio, there = measure(source, work, to, (options.tp, options.pp), options)
            back, again = measure(there, work, "hf", (1, 1), options)
            ratios += [ratio, back]
            shutil.rmtree(there)
            shutil.rmtree(again)
        print(f"ratio {min(ratios):.2f}")


if __name__ == "__main__":
    main()
