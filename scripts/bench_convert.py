"""Speed of `msrl ckpt convert` against plain copying of the same bytes, both to the disk (fsync), in turns in one run.

    python scripts/bench_convert.py --model SmolLM2 [--copies 6] [--formats mcore torch_dist classic] [--rounds 3]

The model is that folder with its layers repeated so that gigabytes are moved, to each format and back. The last line is `ratio N.NN`: the least of
all conversions' speeds / copying, bytes a second, medians. Apart stand verification (every tensor read again from both sides and compared, checksums
of all that was written) and the start of Python and torch. Peak memory is that of the conversion's own process.
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

ROOT = Path(__file__).resolve().parent.parent
CONVERT = """
import sys
from pathlib import Path
from rlcli.checkpoint.convert import Conversion, convert
from rlcli.models.layout import Layout
import torch, torch.distributed.checkpoint.filesystem
load, save, to, tp, pp, verify, threads = sys.argv[1:]
layout = Layout(tensor=int(tp), pipeline=int(pp))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
peak = lambda: [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
before = peak()
done = convert(Conversion(Path(load), Path(save), to, layout=layout, verify=verify == "1", threads=int(threads)))
after = peak()
print(done.seconds, done.verify_seconds, done.bytes, before * 1024, after * 1024)
"""


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


def convert(source: Path, target: Path, to: str, layout: tuple[int, int], verify: bool, threads: int) -> list[float]:
    """[seconds, verify seconds, bytes, memory before, peak memory] in a process of its own."""
    words = [str(source), str(target), to, *map(str, layout), "1" if verify else "0", str(threads)]
    run = subprocess.run([sys.executable, "-c", CONVERT, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return [float(x) for x in run.stdout.split()]


class Timings:
    """Of one conversion: seconds to copy, convert and verify, round by round."""

    def __init__(self) -> None:
        self.copies: list[float] = []
        self.converts: list[float] = []
        self.verifies: list[float] = []
        self.memory = 0.0

    def rates(self, size: float) -> list[float]:
        """GB/s of the medians."""
        return [size / statistics.median(x) / 1e9 for x in (self.copies, self.converts, self.verifies)]


def measure(source: Path, work: Path, to: str, layout: tuple[int, int], options: argparse.Namespace) -> tuple[float, Path]:
    """Print a row of the table; (converting / copying, the folder that was made)."""
    out, times, moved = work / f"{source.name}-{to}", Timings(), 0.0
    for _ in range(options.rounds):
        shutil.rmtree(out, ignore_errors=True)
        times.copies.append(copy(options.copied, work / "copy"))
        shutil.rmtree(work / "copy")
        seconds, checked, moved, before, peak = convert(source, out, to, layout, True, options.threads)
        times.converts.append(seconds)
        times.verifies.append(checked)
        times.memory = max(times.memory, peak - before)
    rate = times.rates(moved)
    label = f"{source.name.rpartition('-')[2]} -> {to}" + ("" if to == "hf" else f" tp={layout[0]} pp={layout[1]}")
    print(f"{label:28s}{rate[0]:10.2f}{rate[1]:14.2f}{rate[1] / rate[0]:8.2f}{rate[2]:13.2f}{times.memory / 2**20:14.0f}", flush=True)
    return rate[1] / rate[0], out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--formats", nargs="+", default=["mcore", "torch_dist", "classic"])
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
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
