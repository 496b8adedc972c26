"""Killed at any moment, the engine resumes to the bytes of an uninterrupted run and does no finished shard again."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest

from pipeline import files
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


WRITES = FORK.Value("q", 0)


def logged_run(source, target, workers, log):
    """The engine; counts its writes, and tells ``log`` which process starts which shard."""
    write, convert = streaming.Writer.write, engine.convert_shard

    def counted(self, data):
        time.sleep(0.0005)
        with WRITES.get_lock():
            WRITES.value += 1
        write(self, data)

    def logged(source, target, shard, *rest):
        with open(log, "a") as stream:
            stream.write(f"{os.getpid()} {shard.name}\n")
        return convert(source, target, shard, *rest)

    streaming.Writer.write, engine.convert_shard = counted, logged
    engine.requantize(source, target, RECIPE, workers=workers)


def run_and_kill(source, target, workers, log, at_write):
    """Kill the run with -9 when it has written ``at_write`` times (never, for ``None``)."""
    WRITES.value = 0
    process = FORK.Process(target=logged_run, args=(source, target, workers, log))
    process.start()
    while process.is_alive() and (at_write is None or WRITES.value < at_write):
        time.sleep(0.0002)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def recorded(target):
    records = target.parent / f".{target.name}.partial" / engine.RECORDS
    return {path.name.removesuffix(".json") for path in records.glob("*.safetensors.json")}


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_at_random_moments(k3, uninterrupted, tmp_path, workers):
    run_and_kill(k3, tmp_path / "whole", workers, tmp_path / "log", None)
    assert manifest.build(tmp_path / "whole")["files"] == uninterrupted
    writes, rng, caught = WRITES.value, random.Random(workers), 0
    for attempt in range(10):
        target, log = tmp_path / f"out{attempt}", tmp_path / f"log{attempt}"
        run_and_kill(k3, target, workers, log, rng.randrange(1, writes))
        lines = log.read_text().splitlines()
        deadline = time.monotonic() + 5
        while any(alive(line.split()[0]) for line in lines) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(alive(line.split()[0]) for line in lines), "a worker outlived its parent"
        if target.exists():  # the machine was slow to kill
            assert manifest.build(target)["files"] == uninterrupted
            continue
        caught += 1
        done = recorded(target)
        whole = {entry["name"]: entry["sha256"] for entry in uninterrupted}
        for path in (target.parent / f".{target.name}.partial" / engine.OUTPUT).glob("*.safetensors"):
            assert files.sha256_file(path) == whole[path.name], "a half-written shard has its final name"
        assert len(lines) - len(done) <= workers, "more than the shards in flight were lost"
        report = engine.requantize(k3, target, RECIPE)
        assert report["files"] == uninterrupted
        assert report["run"]["shards_resumed"] == len(done)
        assert not list(tmp_path.glob(f".{target.name}*"))
    assert caught >= 6, "most kills must have hit the run"


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
    output = target.parent / f".{target.name}.partial" / engine.OUTPUT
    (output / calls[0]).unlink()
    os.truncate(output / calls[1], 100)
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_done"] == SHARDS and report["files"] == uninterrupted


def test_after_a_reboot_an_output_must_prove_itself_by_hash(interrupted, uninterrupted):
    source, target, calls = interrupted
    partial = target.parent / f".{target.name}.partial"
    for name in calls:
        record = partial / engine.RECORDS / f"{name}.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"boot_id": "another"}))
    size = (partial / engine.OUTPUT / calls[0]).stat().st_size
    (partial / engine.OUTPUT / calls[0]).write_bytes(bytes(size))  # a power failure leaves zeros of the right size
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_resumed"] == 1 and report["files"] == uninterrupted


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe_sha256": '])
def test_a_record_that_cannot_be_read_is_no_record(interrupted, uninterrupted, text):
    source, target, calls = interrupted
    (target.parent / f".{target.name}.partial" / engine.RECORDS / f"{calls[0]}.json").write_text(text)
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_resumed"] == 1 and report["files"] == uninterrupted


def test_what_a_kill_leaves_under_a_temporary_name_is_not_carried_into_the_target(interrupted):
    source, target, _ = interrupted
    output = target.parent / f".{target.name}.partial" / engine.OUTPUT
    (output / ".model-99999-of-99999.safetensors.tmp").write_bytes(b"x")
    (output / ".config.json.abc.tmp").write_bytes(b"x")
    engine.requantize(source, target, RECIPE)
    assert not list(target.glob(".*"))


def test_a_target_that_waited_to_be_replaced_when_the_run_was_killed_is_removed(k3, tmp_path):
    engine.requantize(k3, tmp_path / "out", Recipe("w4a16"))
    shutil.copytree(tmp_path / "out", tmp_path / ".out.replaced")
    (tmp_path / ".out.partial").mkdir()
    assert engine.requantize(k3, tmp_path / "out", Recipe("w4a16"))["run"]["shards_done"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_left_overs_of_an_earlier_attempt_are_not_carried_into_the_target(interrupted):
    source, target, _ = interrupted
    output = target.parent / f".{target.name}.partial" / engine.OUTPUT
    (output / "model-99999-of-99999.safetensors").write_bytes(b"x")
    engine.requantize(source, target, RECIPE)
    assert not list(target.glob("*99999*")) and not list(target.glob(".*"))


def test_a_second_run_over_a_finished_target_does_nothing(k3, tmp_path):
    first = engine.requantize(k3, tmp_path / "out", RECIPE)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    for listed in (None, first["source"]):
        second = engine.requantize(k3, tmp_path / "out", RECIPE, source_manifest=listed)
        assert second.pop("run")["shards_done"] == 0
        assert second == {key: value for key, value in first.items() if key != "run"}
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("damage", ["source", "output cut", "config", "file lost"])
def test_a_finished_target_that_no_longer_holds_is_made_again(k3, uninterrupted, tmp_path, damage):
    source, target = shutil.copytree(k3, tmp_path / "source"), tmp_path / "out"
    engine.requantize(source, target, RECIPE)
    shard = f"model-00001-of-{SHARDS:06d}.safetensors"
    if damage == "source":
        raw = bytearray((source / shard).read_bytes())
        raw[-1] ^= 1
        (source / shard).write_bytes(raw)
    elif damage == "output cut":
        os.truncate(target / shard, 100)
    elif damage == "config":
        fixtures.edit_json(target, "config.json", lambda c: c.pop("quantization_config"))
    else:
        (target / "LICENSE").unlink()
    report = engine.requantize(source, target, RECIPE)
    assert report["run"]["shards_done"] == SHARDS
    assert (report["files"] == uninterrupted) is (damage != "source")
