"""Killed at any moment, the engine resumes to the bytes of an uninterrupted run and does no finished shard again."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest

from pipeline.checkpoint import manifest
from pipeline.quant import Recipe, engine, streaming
from tests.checkpoint import fixtures

FORK = multiprocessing.get_context("fork")
RECIPE = Recipe("fp8_block", "dense_too")
SHARDS = 5


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return fixtures.write_k3(tmp_path_factory.mktemp("k3") / "k3", shards=SHARDS)


@pytest.fixture(scope="module")
def uninterrupted(k3, tmp_path_factory):
    return engine.requantize(k3, tmp_path_factory.mktemp("whole") / "out", RECIPE)["files"]


def slow_run(source, target, workers, log):
    """The engine at a few kilobytes a millisecond; tells ``log`` which process starts which shard."""
    write, convert = streaming.Writer.write, engine.convert_shard

    def slow_write(self, data):
        time.sleep(0.001)
        write(self, data)

    def logged(source, target, shard, *rest):
        with open(log, "a") as stream:
            stream.write(f"{os.getpid()} {shard.name}\n")
        return convert(source, target, shard, *rest)

    streaming.Writer.write, engine.convert_shard = slow_write, logged
    engine.requantize(source, target, RECIPE, workers=workers)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"


def recorded(target):
    records = target.parent / f".{target.name}.partial" / engine.RECORDS
    return {path.name.removesuffix(".json") for path in records.glob("*.safetensors.json")}


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_at_random_moments(k3, uninterrupted, tmp_path, workers):
    started = time.monotonic()
    slow_run_process(k3, tmp_path / "timing", workers, tmp_path / "log", None)
    duration = time.monotonic() - started
    assert manifest.build(tmp_path / "timing")["files"] == uninterrupted
    rng, caught = random.Random(workers), 0
    for attempt in range(10):
        target, log = tmp_path / f"out{attempt}", tmp_path / f"log{attempt}"
        slow_run_process(k3, target, workers, log, rng.uniform(0.02, duration))
        pids = {int(line.split()[0]) for line in log.read_text().splitlines()} if log.exists() else set()
        deadline = time.monotonic() + 5
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(alive, pids)), "a worker outlived its parent"
        if target.exists():
            assert manifest.build(target)["files"] == uninterrupted
            continue
        caught += 1
        done = recorded(target)
        begun = len(log.read_text().splitlines()) if log.exists() else 0
        assert begun - len(done) <= workers, "more than the shards in flight were lost"
        report = engine.requantize(k3, target, RECIPE)
        assert report["files"] == uninterrupted
        assert report["run"]["shards_resumed"] == len(done)
        assert not list(tmp_path.glob(f".{target.name}*"))
    assert caught >= 6, "most kills must have hit the run"


def slow_run_process(source, target, workers, log, kill_after):
    process = FORK.Process(target=slow_run, args=(source, target, workers, log))
    process.start()
    process.join(kill_after)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.fixture
def interrupted(k3, tmp_path, monkeypatch):
    """A copy of the source, and a target of which two shards are done; then the run failed."""
    source = shutil.copytree(k3, tmp_path / "source")
    original, calls = engine.convert_shard, []

    def failing(source, target, shard, *rest):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(shard.name)
        return original(source, target, shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "convert_shard", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.requantize(source, tmp_path / "out", RECIPE)
    assert len(recorded(tmp_path / "out")) == 2
    return source, tmp_path / "out", calls


def test_done_shards_are_not_done_again(interrupted, uninterrupted):
    source, target, _ = interrupted
    report = engine.requantize(source, target, RECIPE)
    assert (report["run"]["shards_done"], report["run"]["shards_resumed"]) == (SHARDS - 2, 2)
    assert report["files"] == uninterrupted


def test_another_recipe_does_them_all_again(interrupted):
    source, target, _ = interrupted
    assert engine.requantize(source, target, Recipe("fp8_block"))["run"]["shards_done"] == SHARDS


def test_a_changed_source_shard_is_done_again(interrupted):
    source, target, calls = interrupted
    path = source / calls[0]
    tensors = fixtures.load(path)
    fixtures.save(path, tensors | {"extra.weight": ("U8", fixtures.np.zeros(8, fixtures.np.uint8))})
    fixtures.write_index(source)
    assert engine.requantize(source, target, RECIPE)["run"]["shards_done"] == SHARDS - 1


def test_a_source_shard_with_equal_size_and_other_bytes_is_done_again(interrupted, uninterrupted):
    source, target, calls = interrupted
    path = source / calls[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_done"] == SHARDS - 1
    assert report["files"] != uninterrupted


def test_a_touched_but_equal_source_shard_is_recognised_by_its_hash(interrupted, uninterrupted):
    source, target, calls = interrupted
    os.utime(source / calls[0], (1, 1))
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_resumed"] == 2 and report["files"] == uninterrupted


def test_a_lost_or_cut_output_is_done_again(interrupted, uninterrupted):
    source, target, calls = interrupted
    partial = target.parent / f".{target.name}.partial"
    (partial / calls[0]).unlink()
    os.truncate(partial / calls[1], 100)
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_done"] == SHARDS and report["files"] == uninterrupted


def test_after_a_reboot_an_output_must_prove_itself_by_hash(interrupted, uninterrupted):
    source, target, calls = interrupted
    partial = target.parent / f".{target.name}.partial"
    for name in calls:
        record = partial / engine.RECORDS / f"{name}.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"boot_id": "another"}))
    size = (partial / calls[0]).stat().st_size
    (partial / calls[0]).write_bytes(bytes(size))  # a power failure leaves zeros of the right size
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_resumed"] == 1 and report["files"] == uninterrupted


def test_left_overs_of_an_earlier_attempt_are_not_carried_into_the_target(interrupted):
    source, target, _ = interrupted
    partial = target.parent / f".{target.name}.partial"
    (partial / "model-99999-of-99999.safetensors").write_bytes(b"x")
    engine.requantize(source, target, RECIPE)
    assert not list(target.glob("*99999*")) and not list(target.glob(".*"))
