"""Converting a model between formats and layouts: one parameter at a time, then everything compared bit for bit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcli.checkpoint.classic_write import ClassicTarget
from rlcli.checkpoint.disk import THREADS, explained, hash_file
from rlcli.checkpoint.dist_write import DistTarget
from rlcli.checkpoint.formats import open_stored
from rlcli.checkpoint.hf_folder import HfTarget
from rlcli.checkpoint.narrow import check_range
from rlcli.checkpoint.regions import SIZES, same_bits
from rlcli.checkpoint.sharded import ShardedTarget
from rlcli.checkpoint.stored import Stored
from rlcli.checkpoint.sums import SUMS
from rlcli.checkpoint.target import Target, place
from rlcli.errors import RunError, UserError
from rlcli.models.layout import Layout
from rlcli.models.megatron import check_layout
from rlcli.models.rules import Rule, pieces

TARGETS: dict[str, type[Target]] = {"hf": HfTarget, "mcore": ShardedTarget, "torch_dist": DistTarget, "classic": ClassicTarget}
Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)


def threads_by_default() -> int:
    """More threads than cores wait for one another, busily, at the same files."""
    return min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert, and how. `dtype`: "keep", or torch's name of what the weights become."""

    load: Path
    save: Path
    to: str
    named: str | None = None  # format that `load` must be in
    layout: Layout = field(default_factory=Layout)
    extend: bool | None = None  # experts dealt over TP too (moe_tp_extend_ep): of the target, and of a source that does not tell
    names: str = "mindspeed"  # names in classic folders
    dtype: str = "keep"
    model: Path | None = None  # HF folder with config.json and tokenizer, where `load` has none
    verify: bool = True
    logits: bool = False  # compare logits too
    threads: int = field(default_factory=threads_by_default)


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did."""

    source: str
    target: str
    tensors: int
    bytes: int
    seconds: float
    verified: int  # parameters found equal, bit for bit
    verify_seconds: float
    left_out: list[str]  # what of the source is no part of the model
    damaged: list[str]  # newer checkpoints of a run that could not be taken
    logits: tuple[float, float] | None = None  # (largest difference, standard deviation), where they were compared


def convert(job: Conversion, progress: Progress = lambda stage, done, total: None) -> Converted:
    """Convert, and verify unless told not to; `job.save` gets its name when all is well, and nothing is left there or beside it when not.

    Raises UserError for a source that is incomplete, a layout that cannot be or a folder that cannot be written, RunError for a full disk and
    for a target that does not come out equal.
    """
    import torch  # noqa: F401  not in the time that is told

    source = open_stored(job.load, job.named, job.model, job.extend)
    target = make_target(job, source)
    rules = [rule for rule in source.spec.rules if job.to != "hf" or not rule.copy]
    with _written(target):
        target.check_place(filter(None, (job.load, job.model)))
        if job.verify:
            check_sums(source, progress, beside=job.model is None)
        began = time.perf_counter()
        target.create()
        total = sum(source.dtypes().values())
        done = each(rules, lambda rule: _move(source, target, rule), "convert", job.threads, lambda stage, now, _: progress(stage, now, total))
        target.finish()
        seconds = time.perf_counter() - began
        verified = verify(source, job, target, progress) if job.verify else 0
        verify_seconds = time.perf_counter() - began - seconds
        compared = compare_logits(job, target) if job.logits else None
        target.publish()
    return Converted(source.format, job.to, len(rules), done, seconds, verified, verify_seconds, source.left_out(), source.damaged, compared)


@contextmanager
def _written(target: Target) -> Iterator[None]:
    """Leaves nothing of the target behind when anything fails, and tells the system's errors in one line."""
    try:
        yield
    except OSError as error:
        target.abandon()
        problem = f"{target.folder}: cannot be written; nothing is left there"
        raise explained(problem, target.folder, error, "or choose another folder for --save", "choose another folder for --save") from error
    except BaseException:
        target.abandon()
        raise


def make_target(job: Conversion, source: Stored) -> Target:
    """The target, its layout checked; nothing is written yet."""
    if job.to not in TARGETS:
        raise UserError(f"--to {job.to}: no such format (only {', '.join(TARGETS)})")
    layout, extend = job.layout, bool(job.extend) and job.to == "classic"
    if layout.virtual > 1 and layout.pipeline == 1:
        raise UserError(f"--vpp {layout.virtual}: model chunks are those of pipeline ranks; give --pp too")
    if not source.spec.experts:
        if layout.expert_tensor not in (1, layout.tensor):
            raise UserError(f"--etp {layout.expert_tensor}: a {source.spec.family.name} model has no experts; leave it out")
        layout = replace(layout, expert_tensor=1)
    elif extend:
        layout = replace(layout, expert=layout.expert * layout.tensor, expert_tensor=1)
    if job.to != "hf":
        check_layout(source.spec, layout)
    target = TARGETS[job.to](source.spec, layout, place(job.save), job.dtype, source.dtype_by_name(), source.step)
    if isinstance(target, ClassicTarget):
        target.extend, target.names = extend, job.names
    if job.to != "hf":
        target.check_dtypes(job.load)
    return target


def _move(source: Stored, target: Target, rule: Rule) -> int:
    """Read one parameter, write it; the bytes it had. A tied head's copy comes from the embedding."""
    origin = rule if not rule.copy else next(r for r in source.spec.rules if r.sources == rule.sources and not r.copy)
    read = source.tensors(origin) if source.hf else source.parts(origin)
    if target.dtype != "keep":
        parts = enumerate(read) if source.hf else ((number, piece) for number, _, piece in pieces(origin, read))
        check_range(origin, parts, target.dtype_of(rule), source.folder)
    (target.put if source.hf else target.put_parts)(rule, read)
    return 0 if rule.copy else size_of(rule, source)


def size_of(rule: Rule, stored: Stored) -> int:
    """Bytes of the HF tensors of `rule` in the dtype that they are stored in."""
    if stored.hf:
        return sum(stored.hf[source.name].bytes for source in rule.sources)
    return sum(math.prod(source.shape) for source in rule.sources) * SIZES[stored.dtype(rule)]


def each(rules: Iterable[Rule], work: Callable[[Rule], int], stage: str, threads: int, progress: Progress) -> int:
    """`work` on every rule by a few threads, never more than twice as many in hand (what bounds memory); the sum of what it returned."""
    rules, done, pending = list(rules), 0, set[Future[int]]()
    with one_thread(), ThreadPoolExecutor(max(threads, 1)) as pool:
        try:
            for i, rule in enumerate(rules):
                pending.add(pool.submit(work, rule))
                while len(pending) >= 2 * threads or (pending and i == len(rules) - 1):
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    done += sum(f.result() for f in finished)
                    progress(stage, done, 0)
        except BaseException:
            for future in pending:
                future.cancel()
            raise
    return done


def check_sums(stored: Stored, progress: Progress = lambda stage, done, total: None, beside: bool = True) -> int:
    """Compute every checksum that was noted anew; how many there were. UserError names the first file that is missing or differs.

    beside: those of configuration and tokenizer too.
    """
    noted = {**stored.checksums, **(stored.beside if beside else {})}
    paths = list(noted)
    lost = next((path for path in paths if not path.is_file()), None)
    if lost is not None:
        raise UserError(f"{lost}: file is missing, though a checksum was noted of it")
    sizes = [path.stat().st_size for path in paths]
    with ThreadPoolExecutor(THREADS) as pool:
        for i, (path, (_, digest)) in enumerate(zip(paths, pool.map(hash_file, paths), strict=True)):
            if digest != noted[path]:
                meant = "" if path in stored.checksums else f" (if that was meant, remove its line from {SUMS})"
                raise UserError(f"{path}: differs from its checksum; its content was changed after it was written{meant}")
            progress("checksums", sum(sizes[: i + 1]), sum(sizes))
    return len(paths)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own threads rest: several tensors are in hand at once, each on one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def verify(source: Stored, job: Conversion, target: Target, progress: Progress = lambda stage, done, total: None) -> int:
    """Open what was written as if it were given, and compare every tensor with the source; the number of parameters compared.

    Opening accounts for every name and shape, none left and none twice. RunError names the first difference.
    """
    written = open_stored(target.partial, job.to, None, job.extend, unfinished=True)
    rules = [rule for rule in source.spec.rules if not rule.copy]

    def compare(rule: Rule) -> int:
        name = differing(rule, source, written, [target.dtype_of(rule, number) for number in range(len(rule.sources))])
        if name:
            raise RunError(f"{job.save}: {name} did not come out as what {job.load} holds; nothing is left there")
        written.check_replicas(rule)
        return size_of(rule, source)

    total = sum(source.dtypes().values())
    with ThreadPoolExecutor(1) as beside:
        sealed = beside.submit(target.seal)  # takes checksums of what is compared meanwhile: together they read it once
        try:
            each(rules, compare, "verify", job.threads, lambda stage, now, _: progress(stage, now, total))
            check_copies(written)
        except BaseException:
            target.clear()  # what is not there takes no time to read
            raise
        sealed.result()
    return len(rules)


def differing(rule: Rule, source: Stored, written: Stored, dtypes: Sequence[str]) -> str | None:
    """The HF name of the first tensor of `rule` that differs, the source's converted to those of `dtypes`; None where none does."""
    import torch

    whole, other = (written, source) if written.hf and not source.hf else (source, written)
    tensors, axis = whole.tensors(rule), rule.axis or 0
    parts = ((i, 0, tensor) for i, tensor in enumerate(other.tensors(rule))) if other.hf else pieces(rule, other.parts(rule))
    for number, start, piece in parts:
        mine, dtype = tensors[number].narrow(axis, start, piece.shape[axis]), getattr(torch, dtypes[number])
        same = same_bits(mine.to(dtype), piece) if whole is source else same_bits(mine, piece.to(dtype))
        if not same:
            return rule.sources[number].name
    return None


def compare_logits(job: Conversion, target: Target) -> tuple[float, float]:
    """(largest difference, standard deviation) of both models' logits on a few tokens; RunError where they are not those of the same model."""
    from rlcli.checkpoint.logits import compare

    difference, spread = compare(job.load, target.partial, job.model, job.extend)
    if not difference < 1e-3 * max(spread, 1.0):
        raise RunError(f"{job.save}: logits differ from those of {job.load} by {difference:.2e} at a spread of {spread:.2f}; nothing is left there")
    return difference, spread


def check_copies(written: Stored) -> None:
    """A tied head that is stored a second time equals the embedding."""
    for rule in written.spec.rules:
        if rule.copy and not written.hf and rule.name in written.shards:
            origin = next(r for r in written.spec.rules if r.sources == rule.sources and not r.copy)
            written.check_replicas(rule)
            if not same_bits(written.tensors(rule)[0], written.tensors(origin)[0]):
                raise RunError(f"{written.folder}: the tied head {rule.name} differs from {origin.name}")
