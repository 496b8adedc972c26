"""Requantize a checkpoint: plan, convert shard by shard in one or several processes, resume, and write it whole or
not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline import files
from pipeline.checkpoint import manifest
from pipeline.checkpoint.reading import CONFIG, INDEX, LOCATION, MANIFEST
from pipeline.errors import Invalid, Refused, Unreadable
from pipeline.quant import native, planning, records
from pipeline.quant.config import PROVENANCE
from pipeline.quant.damage import summarize
from pipeline.quant.planning import Plan, ShardPlan
from pipeline.quant.recipe import Recipe
from pipeline.quant.records import LOCK, OUTPUT, RECORDS
from pipeline.quant.streaming import convert_shard

if TYPE_CHECKING:
    from pipeline.quant.calibrated.run import Calibrated

LOCK_PATIENCE_S = 2.0

# tqdm's own lock is shared with forked processes; one that is killed while it holds it would stop all the others.
tqdm.set_lock(threading.RLock())


def requantize(
    source: Path | str,
    target: Path | str,
    recipe: Recipe,
    *,
    workers: int = 1,
    source_manifest: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write ``target``, a compressed-tensors checkpoint of ``source`` re-encoded by ``recipe``.

    Everything is checked before a byte is written.  The work happens in ``.TARGET.partial`` beside the target; a shard
    whose (source hash, recipe) is on record there is not done again.  The target appears whole, by a rename.

    ``source_manifest``: where given, each source shard's SHA-256 must equal it (checked while reading).
    A calibrated recipe calibrates first and then writes in this process; shards of an earlier, killed calibration are
    done again, for two calibrations must not mix.  ``trust_remote_code`` is for its tokenizer.
    Returns ``{"status", "reason", "recipe", "recipe_sha256", "source", "damage", "files", "run"}`` and ``calibration``
    where there was one; ``files`` lists the target's files, name, size_bytes and sha256 each (the result is a
    manifest).  All but ``run`` (seconds, bytes, shards done and resumed) depends on the input alone and is also in
    ``TARGET/requantization.json`` and ``TARGET/manifest.json``.  Raises :class:`Refused` or ``Unreadable`` with the offender's name.
    """
    source, target = Path(source), Path(target)
    if workers < 1:
        raise Refused(f"workers {workers}: at least one is needed")
    _check_target(source, target)
    try:
        if recipe.format == "native":
            return native.link(source, target, source_manifest)
        return _requantize(source, target, recipe, workers, source_manifest, trust_remote_code)
    except OSError as error:
        raise Refused(
            f"{error.filename or target}: {error.strerror or error}; whatever is finished is kept, run again to resume"
        ) from error


def _requantize(
    source: Path, target: Path, recipe: Recipe, workers: int, source_manifest: dict[str, Any] | None,
    trust_remote_code: bool,
) -> dict[str, Any]:  # fmt: skip
    started = time.monotonic()
    plan = planning.plan(source, recipe)
    expected = manifest.entries(source_manifest) if source_manifest else {}
    unlisted = [shard.name for shard in plan.shards if shard.name not in expected]
    if expected and unlisted:
        raise Refused(f"{source}: {unlisted[0]} and {len(unlisted) - 1} more shards are not in the source's manifest")
    work = target.parent / f".{target.name}.partial"
    with _locked(work):
        report = records.finished_target(plan, target, expected)
        known = {shard.name: records.finished_shard(plan, shard, work) for shard in plan.shards}
        done = {name: record for name, record in known.items() if record is not None and recipe.calibration is None}
        todo = [] if report else [shard for shard in plan.shards if shard.name not in done]
        if report is None:
            _check_space(plan, todo, work)
            calibrated = _calibrate(plan, trust_remote_code)
            for name, record in _convert_all(plan, todo, work, workers, calibrated):
                _check_hash(source / name, record["source"]["sha256"], expected.get(name))
                done[name] = record
            for name, record in done.items():
                _check_hash(source / name, record["source"]["sha256"], expected.get(name))
            calibration = {"calibration": calibrated.finish()} if calibrated else {}
            report = _finish(plan, done, work / OUTPUT, target, calibration)
        shutil.rmtree(_replaced(target), ignore_errors=True)
        shutil.rmtree(work)
    seconds = time.monotonic() - started
    return report | {
        "run": {
            "seconds": seconds,
            "workers": workers,
            "source_bytes": sum(shard.source_bytes for shard in plan.shards),
            "target_bytes": plan.target_bytes,
            "shards_done": len(todo),
            "shards_resumed": len(plan.shards) - len(todo),
        }
    }


def _check_target(source: Path, target: Path) -> None:
    """The target is replaced as a whole: it must be an output of ours, and must not hold the source or lie in it."""
    inner, outer = source.resolve(), target.resolve()
    if inner == outer:
        raise Refused(f"{target}: source and target are the same directory")
    if outer in inner.parents or inner in outer.parents:
        raise Refused(f"{target}: one of source {source} and target lies inside the other; choose a target beside it")
    if target.exists() and not target.is_dir():
        raise Refused(f"{target}: a file; choose another target")
    names = sorted(path.name for path in target.iterdir()) if target.exists() else []
    if names and not {PROVENANCE, MANIFEST, LOCATION} & set(names):
        raise Refused(
            f"{target}: would be replaced, and holds {len(names)} files ({names[0]} ...) that no run of this program "
            "wrote; choose another target, or remove it"
        )


def _replaced(target: Path) -> Path:
    """Where an older target waits while the new one takes its name."""
    return target.parent / f".{target.name}.replaced"


def _calibrate(plan: Plan, trust_remote_code: bool) -> Calibrated | None:
    if plan.recipe.calibration is None:
        return None
    from pipeline.quant.calibrated.run import calibrate  # torch and llm-compressor: not for a look-up in a table

    return calibrate(plan.source, plan.recipe, trust_remote_code)


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold the directory.  Workers inherit the lock: it is free only when the last of a killed run's workers is gone.

    A run that ends removes the directory with its lock: whoever waited for that file starts over with a new one.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (lock := _take(work)) is None:
        if time.monotonic() > deadline:
            raise Refused(f"{work}: another process is writing it; wait for it")
        time.sleep(0.02)
    with lock:
        yield


def _take(work: Path) -> IO[str] | None:
    try:
        for name in (RECORDS, OUTPUT):
            (work / name).mkdir(parents=True, exist_ok=True)
        lock = open(work / LOCK, "w")  # noqa: SIM115 - handed out open
    except FileNotFoundError:  # removed in between
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock.fileno()).st_ino == (work / LOCK).stat().st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    lock.close()
    return None


def _check_space(plan: Plan, todo: list[ShardPlan], work: Path) -> None:
    needed = sum(shard.target_bytes for shard in todo)
    needed += sum((plan.source / name).stat().st_size for name in plan.auxiliary)
    free = shutil.disk_usage(work).free
    if needed > free:
        raise Refused(
            f"{work}: {needed / 1e9:.2f} GB are needed for {len(todo)} shards, {free / 1e9:.2f} GB are free; "
            "free some space or choose another target"
        )


def _check_hash(path: Path, digest: str, wanted: dict[str, Any] | None) -> None:
    if wanted is not None and wanted["sha256"] != digest:
        raise Refused(f"{path}: sha256 {digest}, its manifest says {wanted['sha256']}; fetch it again")


def _convert_one(
    plan_source: Path, work: Path, shard: ShardPlan, recipe: Recipe, progress: Callable[[int], None],
    calibrated: Calibrated | None = None,
) -> dict:  # fmt: skip
    stamp = records.stamp_of(plan_source / shard.name)
    result = convert_shard(plan_source, work / OUTPUT, shard, recipe, progress, calibrated)
    if records.stamp_of(plan_source / shard.name) != stamp:
        raise Refused(f"{plan_source / shard.name}: changed while it was read; let its writer finish")
    return records.write(work, shard, recipe, stamp, result)


_shared_progress: Any = None


def _start_worker(progress: Any, parent: int) -> None:
    """A worker dies with its parent, however that ends, and leaves Ctrl-C to it."""
    global _shared_progress
    _shared_progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _work(plan_source: Path, work: Path, shard: ShardPlan, recipe: Recipe) -> dict[str, Any]:
    def progress(count: int) -> None:
        with _shared_progress.get_lock():
            _shared_progress.value += count

    return _convert_one(plan_source, work, shard, recipe, progress)


def _convert_all(
    plan: Plan, todo: list[ShardPlan], work: Path, workers: int, calibrated: Calibrated | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    total = sum(shard.source_bytes for shard in todo)
    bar = {
        "total": total, "unit": "B", "unit_scale": True, "desc": plan.recipe.format, "disable": None if todo else True
    }
    if workers == 1 or len(todo) < 2 or calibrated is not None:  # the model is in this process
        with tqdm(**bar) as shown:
            for shard in todo:
                yield shard.name, _convert_one(plan.source, work, shard, plan.recipe, shown.update, calibrated)
        return
    # fork: a worker must not import the caller's main module again, as spawn does; nothing here runs threads before.
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    largest_first = sorted(todo, key=lambda shard: -shard.source_bytes)
    pool = ProcessPoolExecutor(min(workers, len(todo)), context, _start_worker, (counter, os.getpid()))
    try:
        pending: dict[Future, str] = {
            pool.submit(_work, plan.source, work, shard, plan.recipe): shard.name for shard in largest_first
        }
        with tqdm(**bar) as shown:
            while pending:
                finished, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                shown.update(counter.get_obj().value - shown.n)  # without the lock, which a killed worker may hold
                for future in finished:
                    yield pending.pop(future), future.result()
    except BrokenProcessPool:
        raise Invalid("a worker process was killed (out of memory?); run again to resume, with fewer workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _finish(
    plan: Plan, done: dict[str, dict[str, Any]], output: Path, target: Path, calibration: dict[str, Any]
) -> dict[str, Any]:
    """Write what is not a shard, check the whole, and rename it into place."""
    wanted = {shard.name for shard in plan.shards} | set(plan.auxiliary) | {CONFIG, INDEX, PROVENANCE}
    for path in [path for path in output.rglob("*") if path.is_file()]:
        if str(path.relative_to(output)) not in wanted:  # of an earlier recipe or source, or of a killed run
            path.unlink()
    for name in plan.auxiliary:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.source / name, output / name)
    files.write_json(output / CONFIG, plan.config)
    files.write_json(output / INDEX, plan.index)
    rows = (
        (*plan.kinds[module], damage)
        for name in sorted(done)
        for module, damage in records.damage_of(done[name]).items()
    )
    provenance = {
        "recipe": plan.recipe.to_dict(),
        "recipe_sha256": plan.recipe.sha256,
        "source": {
            "files": [
                {"name": name, "size_bytes": record["source"]["size_bytes"], "sha256": record["source"]["sha256"]}
                for name, record in sorted(done.items())
            ]
        },
        "damage": summarize(rows),
    } | calibration
    files.write_json(output / PROVENANCE, provenance)
    hashes = {name: record["target"]["sha256"] for name, record in done.items()}
    built = manifest.build(output, hashes)
    files.write_json(output / MANIFEST, built)
    shutil.rmtree(_replaced(target), ignore_errors=True)
    if target.exists():
        os.replace(target, _replaced(target))
    os.replace(output, target)
    return {"status": "valid", "reason": None} | provenance | built
