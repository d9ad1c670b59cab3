"""How fast rows become a prepared data set, beside the bare tokenizer on the same texts, both in one run on one core.

    python scripts/bench_data.py --tokenizer MODEL --input dapo-math-17k.parquet

Without --input, 17,917 rows of the same schema and about the same length are made here. Prints seconds of reading, cleaning, rendering,
tokenising and writing, rows/s, and last `ratio N.NN`: rows/s of the whole preparation over rows/s of `encode_batch` alone on the rendered
texts (1.00 would mean that all else costs nothing). Both sides of the ratio are processor time, so that other work on the machine does
not count. The preparation can even be ahead: it asks the library for ids alone, without offsets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 15.0  # for the whole file, the import of the libraries aside

_SENTENCE = "let the triangle ABC have integer sides whose sum is prime find all numbers such that $x^2 + \\frac{a}{b} = 7$ and the remainder is"


def make_rows(path: Path, count: int = 17_917) -> Path:
    """Rows of the DAPO schema with about 190 tokens each, some of them repeated."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance, words = random.Random(1), _SENTENCE.split()
    rows = []
    for i in range(count):
        if i % 25 == 24:
            rows.append(rows[chance.randrange(len(rows))])
            continue
        question = " ".join(chance.choices(words, k=75)) + f" {i}?"
        text = f"Solve the following problem. The last line must be Answer: $Answer.\n\n{question}\n\nPut the answer on its own line."
        rows.append({"prompt": [{"content": text, "role": "user"}], "reward_model": {"ground_truth": str(i), "style": "rule"}, "extra_info": {"index": str(i)}})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def bare(texts: list[str], folder: str) -> float:
    """Seconds of processor time that the tokenizer library needs for the texts alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    begin = time.process_time()
    for at in range(0, len(texts), 256):
        tokenizer.encode_batch(texts[at : at + 256], add_special_tokens=False)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder of a model or its tokenizer")
    parser.add_argument("--input", help="rows; without it, some are made")
    parser.add_argument("--workers", type=int, nargs="*", default=[1], help="numbers of worker processes to measure")
    parser.add_argument("--copies", type=int, default=1, help="read the rows so many times over, as the published file has them 100 times")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begin = time.perf_counter()
    import transformers  # noqa: F401 - timed apart
    from transformers import AutoTokenizer  # noqa: F401

    print(f"importing the libraries     {time.perf_counter() - begin:8.1f} s")
    folder = Path(tempfile.mkdtemp(prefix="bench_data-"))
    try:
        measure(args, folder)
    finally:
        shutil.rmtree(folder)


def measure(args: argparse.Namespace, folder: Path) -> None:
    from rlcli.data.prepare import prepare
    from rlcli.data.settings import PrepareSettings

    path = Path(args.input) if args.input else make_rows(folder / "rows.parquet")
    if args.copies > 1:
        path = repeat(path, folder / "copies.parquet", args.copies)
    processor = {}
    for workers in args.workers:
        cpu = time.process_time()
        report = prepare(PrepareSettings(input=[str(path)], out=str(folder / f"out{workers}"), tokenizer=args.tokenizer, workers=workers))
        processor[workers] = time.process_time() - cpu
        counts = report.manifest.counts
        print(
            f"{workers} worker{'s' if workers > 1 else ' '}  {counts['read']:,} rows read, {counts['kept']:,} kept   {report.seconds:8.1f} s"
            f"  ({processor[workers]:.1f} s of processor time here)   {counts['read'] / report.seconds:8,.0f} rows/s in all"
            f"   {report.encoded / report.busy_s:8,.0f} rows/s rendered and tokenised by a worker"
        )
    if len({(folder / f"out{workers}" / "part-00000.parquet").read_bytes() for workers in args.workers}) != 1:
        sys.exit("the results differ between numbers of workers")
    first = args.workers[0]
    kept, longest = report.manifest.counts["kept"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    alone = bare(texts_of(folder / f"out{first}"), args.tokenizer)
    print(f"the tokenizer alone on the {kept:,} texts {alone:.1f} s of processor time")
    print(f"peak memory                 {longest / 1024**2:8.2f} GiB")
    if args.copies == 1 and first == 1:
        print(f"within {LIMIT_S:.0f} s on one core: {'yes' if processor[1] < LIMIT_S else 'NO'} ({processor[1]:.1f} s)")
    if first == 1:
        print(f"ratio {alone / processor[1]:.2f}")


def texts_of(folder: Path) -> list[str]:
    import pyarrow.parquet as pq

    files = [shard["file"] for shard in json.loads((folder / "manifest.json").read_text())["files"]]
    return [text for file in files for text in pq.read_table(folder / file, columns=["prompt"])["prompt"].to_pylist()]


def repeat(path: Path, out: Path, copies: int) -> Path:
    """The same rows so many times over in one file, as a big file is."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    with pq.ParquetWriter(out, table.schema) as writer:
        for _ in range(copies):
            writer.write_table(table)
    return out


if __name__ == "__main__":
    main()
