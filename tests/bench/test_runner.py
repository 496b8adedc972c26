"""Order, resumption and repetition of the points, with a client and a server that measure what the test says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from pipeline.bench import BenchSettings, bench, runner
from pipeline.errors import Refused
from pipeline.files import write_json
from pipeline.serve import ServerDied, ServerSettings
from tests.bench.conftest import make_run

SETTINGS = BenchSettings(input_len=16, output_len=8, concurrency=(1, 4), num_prompts_per_concurrency=2, min_prompts=2)


class Server:
    """A server whose counters grow by what the client says it sent."""

    pid, model, base_url = os.getpid(), "tiny", "http://127.0.0.1:1"
    effective = {"block_size": 256}
    load = {"load_s": 1.0}
    max_model_len = 64

    def __init__(self, checkpoint: Path) -> None:
        self.settings = ServerSettings(model=checkpoint, served_name="tiny")
        self.counters = dict(make_run().before)
        self.events: list[str] = []

    def settled_metrics(self):
        return dict(self.counters)

    metrics = settled_metrics

    def reset_prefix_cache(self):
        self.events.append("reset")

    def check(self, doing):
        pass

    def memory_report(self):
        self.events.append("memory")
        return [{"rank": 0, "emulated": []}]


class Client:
    """``speeds``: output tokens/s of the timed runs at each concurrency, in order."""

    def __init__(self, server: Server, speeds: dict[int, list[float]], dies_at: int | None = None) -> None:
        self.busy_s = 0.0
        self.server, self.speeds, self.dies_at = server, {key: list(value) for key, value in speeds.items()}, dies_at

    def run(self, arguments, timeout_s):
        options = dict(zip(arguments, arguments[1:]))
        name, prompts = options["--result-filename"], int(options["--num-prompts"])
        timed = not name.startswith("warmup")
        concurrency = int(options["--max-concurrency"])
        if self.dies_at == sum(" seed " in event for event in self.server.events):
            raise ServerDied("the server exited with code 1")
        self.server.events.append(f"{'timed' if timed else 'warmup'} {concurrency} seed {options['--seed']}")
        run = make_run(prompts=prompts, tok_s=self.speeds[concurrency].pop(0) if timed else 1.0)
        for counter, values in (("generation", "output_lens"), ("prompt", "input_lens")):
            self.server.counters[f"vllm:{counter}_tokens_total"] += sum(run.raw[values])
        write_json(Path(options["--result-dir"]) / name, run.raw)
        return {"ok": True, "retries": 0, "seed": int(options["--seed"]), "prompt_tokens_sent": [16] * prompts}


@pytest.fixture
def measure(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"1")
    monkeypatch.setattr(runner, "python_of", lambda name: sys.executable)

    def run(speeds, settings=SETTINGS, server=None, **fault):
        server = server or Server(checkpoint)
        monkeypatch.setattr(runner, "BenchClient", lambda *_: contextlib.nullcontext(Client(server, speeds, **fault)))
        result = bench(server, settings, tmp_path / "out", hardware={}, software={}, checkpoint_sha256="abc")
        return result, server.events

    return run


STEADY = {1: [10, 10.1, 9.9], 4: [30, 30.1, 29.9]}


def test_order_of_a_bench(measure):
    result, events = measure(STEADY)
    kinds = [event.split(" seed")[0] for event in events]
    assert kinds == ["warmup 1", "warmup 4"] + ["reset", "timed 1", "reset", "timed 4"] * 3 + ["memory"], (
        "warm-ups apart, a reset before each run, concurrencies alternate, memory after the last timed run"
    )
    seeds = [event.split()[-1] for event in events if "seed" in event]
    assert len(set(seeds)) == len(seeds) == 8, "no two runs, warm or timed, share a seed"
    assert result["status"] == "valid" and result["output_tok_s"] == 30 and result["checkpoint_id"] == "abc"
    json.dumps(result, allow_nan=False)


def test_requests_that_the_server_cannot_take_are_refused_before_the_first(measure):
    """Each would fail, or be cut; so would the points that fit."""
    with pytest.raises(Refused, match=r"requests of up to 69 tokens .*input_len 60.* longer than the 64.*max-model-len"):
        measure(STEADY, dataclasses.replace(SETTINGS, input_len=60))


def test_a_warm_workload_keeps_its_cache(measure):
    _, events = measure(STEADY, dataclasses.replace(SETTINGS, cache="warm"))
    assert "reset" not in events


def test_repeats_that_disagree_are_measured_again_and_all_count(measure):
    result, _ = measure(STEADY | {4: [30, 60, 30.2, 30.1, 29.8]})
    point = result["per_concurrency"]["4"]
    assert result["status"] == "valid" and point["repeats"] == 5
    assert point["output_tok_s"] == 30.1 and point["output_tok_s_max"] == 60, "the outlier stays visible"
    assert result["per_concurrency"]["1"]["repeats"] == 3


def test_repeats_that_never_agree_are_invalid(measure):
    result, _ = measure(STEADY | {4: [30, 60, 20, 80, 45]})
    assert result["reason_codes"] == ["spread_too_wide"]


def test_a_cold_first_repeat_is_told_apart_from_noise(measure):
    settings = dataclasses.replace(SETTINGS, max_repeats=3, max_spread=0.05)
    assert measure(STEADY | {4: [20, 30, 30.1]}, settings)[0]["reason_codes"] == ["first_repeat_outlier"]


def test_finished_runs_are_not_measured_again(measure):
    with pytest.raises(ServerDied):
        measure(STEADY, dies_at=5)  # two warm-ups and three runs went well
    result, events = measure({1: [10.2], 4: [29.5, 30]})
    assert [event.split(" seed")[0] for event in events if " seed" in event] == [
        "warmup 1",
        "warmup 4",
        "timed 4",
        "timed 1",
        "timed 4",
    ]
    assert result["status"] == "valid" and result["per_concurrency"]["1"]["output_tok_s_max"] == 10.2


def test_runs_that_another_version_kept_are_measured_again(measure, tmp_path):
    measure(STEADY)
    for path in (tmp_path / "out" / "runs").glob("*-r?.json"):
        kept = json.loads(path.read_text())
        kept["run"]["a field of another version"] = 1
        write_json(path, kept)
    _, events = measure(STEADY)
    assert sum(event.startswith("timed") for event in events) == 6


@pytest.mark.parametrize("change", [{"seed": 1}, {"output_len": 9}, {"cache": "warm"}])
def test_runs_of_another_workload_are_not_reused(measure, change):
    measure(STEADY)
    settings = dataclasses.replace(SETTINGS, **change)
    _, events = measure(STEADY, settings)
    assert sum(event.startswith("timed") for event in events) == 6


def test_runs_of_another_checkpoint_are_not_reused(measure, tmp_path):
    measure(STEADY)
    _, events = measure(STEADY)
    assert not [event for event in events if event.startswith(("timed", "warmup"))], "all done: nothing to measure"
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"22")
    _, events = measure(STEADY)
    assert sum(event.startswith("timed") for event in events) == 6
