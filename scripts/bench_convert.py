"""Speed of `msrl ckpt convert` against plain copying of the same bytes, both to the disk (fsync), in turns in one run.

    python scripts/bench_convert.py --model SmolLM2 [--copies 8] [--to mcore] [--rounds 3]

The model is that folder with its layers repeated so that gigabytes are moved. The last line is `ratio N.NN`: converting / copying, bytes a second,
medians, verification apart (its time is in the table). Peak memory is that of the conversion's own process.
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
import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--to", default="mcore")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--work", type=Path, default=None, help="folder on the disk to measure; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        source = Path(work) / "hf"
        size = enlarge(options.model, source, options.copies)
        copies, converts, verifies, memory = [], [], [], 0.0
        for i in range(options.rounds):
            copies.append(copy(source, Path(work) / "copy"))
            shutil.rmtree(Path(work) / "copy")
            seconds, checked, moved, before, peak = convert(source, Path(work) / "out", options.to, (options.tp, options.pp), True, options.threads)
            shutil.rmtree(Path(work) / "out")
            converts.append(seconds)
            verifies.append(checked)
            memory = max(memory, peak - before)
            print(f"round {i + 1}: copy {size / copies[-1] / 1e9:.2f} GB/s, convert {moved / seconds / 1e9:.2f} GB/s, verify {moved / checked / 1e9:.2f} GB/s", flush=True)
        rate = [size / statistics.median(x) / 1e9 for x in (copies, converts, verifies)]
        print(f"hf -> {options.to} tp={options.tp} pp={options.pp}, {size / 2**30:.2f} GiB; medians of {options.rounds}")
        print(f"copy {rate[0]:.2f} GB/s   convert {rate[1]:.2f} GB/s   verify {rate[2]:.2f} GB/s   memory above start {memory / 2**20:.0f} MiB")
        print(f"ratio {rate[1] / rate[0]:.2f}")


if __name__ == "__main__":
    main()
