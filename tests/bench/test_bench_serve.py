"""The whole bench, with vllm's real client, against servers that lie.  Runs in serve-cpu; no engine is started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.bench import BenchSettings, bench, runner
from pipeline.bench.client import BenchClient
from pipeline.errors import Invalid, Refused
from pipeline.files import read_json, write_json
from pipeline.serve import Server, ServerDied, running

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny-k3"
# One repeat, and no judgement of speed: these tests also run on machines that are busy with something else.
SETTINGS = BenchSettings(
    input_len=16,
    output_len=6,
    concurrency=(1, 3),
    num_prompts_per_concurrency=2,
    min_prompts=3,
    repeats=1,
    min_repeats=1,
    max_repeats=1,
    min_itl_ms=0.0,
    max_spread=1e9,
)
MEMORY = (
    {
        "rank": 0,
        "weight_bytes": 10,
        "kv_capacity_tokens": 500,
        "emulated": [],
        "kv_block_size": 512,
        "max_num_seqs": 16,
    },
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """One client process for all tests: importing vllm takes seconds."""
    with BenchClient(Path(sys.executable), tmp_path_factory.mktemp("client") / "log") as started:
        yield started


@pytest.fixture
def checkpoint(tmp_path):
    """What the client reads of a checkpoint: its tokenizer."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    return folder


@pytest.fixture
def measure(mock_settings, checkpoint, client, tmp_path, monkeypatch):
    """``measure(behaviour fields...)`` -> bench result of a stand-in server that has them."""
    monkeypatch.setattr(runner, "python_of", lambda name: sys.executable)
    monkeypatch.setattr(runner, "BenchClient", lambda *_: contextlib.nullcontext(client))

    def run(settings=SETTINGS, server=None, **fields):
        fields = {"token_s": 0.002, "tokenizer": str(checkpoint), "memory_report": MEMORY} | fields
        requested = dataclasses.replace(mock_settings(**fields), **server or {})
        with running(requested, tmp_path / "server.log") as started:
            return bench(started, settings, tmp_path / "bench", hardware={"cpu": "x"}, software={"vllm": "y"})

    return run


def test_an_honest_server(measure, tmp_path):
    resets = []
    original = Server.reset_prefix_cache
    Server.reset_prefix_cache = lambda self: (resets.append(1), original(self))
    try:
        result = measure(dataclasses.replace(SETTINGS, repeats=2, max_repeats=2), prefix_hits_on_repeat=True)
    finally:
        Server.reset_prefix_cache = original
    assert result["status"] == "valid", result["reason"]
    assert result["output_tok_s"] > 0 and result["ttft_ms_p50"] > 0 and result["tpot_ms_p50"] >= 2
    assert (
        result["itl_ms_p50"] >= 2 and result["e2el_ms_p50"] > result["ttft_ms_p50"] and result["request_throughput"] > 0
    )
    seeds = [seed for point in result["per_concurrency"].values() for seed in point["seeds"]]
    assert len(set(seeds)) == 4 == len(resets)
    assert result["speed_label"] == "measured" and result["memory"] == list(MEMORY)
    assert result["memory_summary"]["weight_bytes"] == 10 and result["memory_summary"]["activation_peak_bytes"] is None
    assert result["effective"]["block_size"] == 512 and result["effective"]["max_num_seqs"] == 16
    assert result["requested"]["block_size"] is None and result["host_memory"]["host_rss_bytes"] > 0
    assert result["comparability"]["key"]
    write_json(tmp_path / "result.json", result)  # no NaN, no path objects
    assert str(tmp_path) not in (tmp_path / "result.json").read_text(), (
        "a result that names this machine compares with none"
    )
    raw = read_json(tmp_path / "bench" / "runs" / "c3-r0.json")["run"]["raw"]
    assert len(raw["itls"]) == 6 and all(len(itl) == 5 for itl in raw["itls"]), "per-request detail is kept"


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"prefix_hits_per_request": 5}, "prefix_hits"),
        ({"stream_error_after": 3, "stream_error_every": 4}, "stream_error"),
        ({"generation_fails_after": 9}, "requests_failed"),
        ({"cut_stream_after": 3}, "requests_failed"),
        ({"stream_usage": False}, "token_counts_disagree"),
        ({"short_output_tokens": 2}, "short_outputs"),
        ({"prompt_tokens_lower_by": 4}, "prompt_tokens_disagree"),
        ({"completion_tokens_higher_by": 2}, "coalesced_chunks"),
        ({"metrics_generation_tokens_higher_by": 1}, "token_counts_disagree"),
        ({"coalesce": True}, "insane_itl"),
        ({"restart_counters_after": 9}, "server_restarted"),
    ],
)
def test_each_lie_is_caught_by_its_guard(measure, fields, code):
    result = measure(dataclasses.replace(SETTINGS, min_itl_ms=0.05), **fields)
    assert result["status"] == "invalid" and code in result["reason_codes"], result["reason"]


def test_a_slow_first_token_is_a_figure_and_no_fault(measure):
    result = measure(dataclasses.replace(SETTINGS, concurrency=(2,)), first_token_s=0.3)
    assert result["status"] == "valid" and result["ttft_ms_p50"] >= 300 > result["tpot_ms_p50"]


def test_open_loops_and_a_trace(measure, tmp_path):
    """Rates and traces: token-id prompts of the trace's lengths, sent at its times, its own output lengths asked."""
    entries = [
        {"timestamp": 100 * index, "input_length": 40 + index, "output_length": 4 + index, "hash_ids": [1, 2 + index]}
        for index in range(5)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    settings = dataclasses.replace(
        SETTINGS,
        concurrency=(),
        request_rate=(20.0,),
        num_prompts_per_rate=6,
        trace=str(path),
        trace_block_tokens=32,
        cache="shared",
        max_late_ms=1e4,
        repeats=2,
        max_repeats=2,
        slo_ttft_ms=60e3,
        slo_tpot_ms=1e-3,
    )
    result = measure(settings, prefix_hits_on_repeat=True)
    assert result["status"] == "valid", result["reason"]
    assert list(result["per_request_rate"]) == ["20"] and result["headline"] == "q20"
    replay, rate = result["trace"], result["per_request_rate"]["20"]
    assert replay["output_tok_s"] > 0 and result["trace_facts"]["requests"] == 5
    assert rate["goodput_requests_s"] == 0 == replay["goodput_fraction"], "no token comes in a microsecond"
    first, second = (read_json(tmp_path / "bench" / "runs" / f"trace-r{index}.json")["run"] for index in (0, 1))
    assert first["prompt_tokens_sent"] == first["raw"]["input_lens"] == [40, 41, 42, 43, 44]
    assert first["raw"]["output_lens"] == [4, 5, 6, 7, 8] == first["output_tokens_asked"]
    starts = first["raw"]["start_times"]
    assert starts[-1] - starts[0] > 0.35, "sent at the trace's times"
    assert first["seed"] != second["seed"]


def test_a_shared_prefix_is_shared(measure, client):
    settings = dataclasses.replace(SETTINGS, dataset="shared_prefix", prefix_len=24, num_prefixes=2, cache="shared")
    result = measure(settings)
    assert result["status"] == "valid", result["reason"]


def test_a_trace_longer_than_the_server_takes_is_refused(measure, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 40, "output_length": 4, "hash_ids": [1]}')
    settings = dataclasses.replace(SETTINGS, trace=str(path), cache="shared")
    with pytest.raises(Refused, match="trace_length_scale"):
        measure(settings, server={"max_model_len": 32})


def test_the_same_seed_on_a_warm_cache_is_caught(measure, monkeypatch):
    """https://github.com/vllm-project/vllm/issues/52884: repeated random prompts measured the prefix cache."""
    monkeypatch.setattr(BenchSettings, "point_seed", lambda self, repeat, load: 7)
    monkeypatch.setattr(Server, "reset_prefix_cache", lambda self: None)
    result = measure(dataclasses.replace(SETTINGS, repeats=2, max_repeats=2), prefix_hits_on_repeat=True)
    assert "prefix_hits" in result["reason_codes"]


def test_a_dropped_connection_is_sent_again_once_and_counted(measure):
    result = measure(drop_requests=[7, 12])  # after the readiness probe and two warm-ups of three
    assert result["status"] == "valid", result["reason"]
    assert sum(point["retries"] for point in result["per_concurrency"].values()) == 2


def test_idle_sockets_that_close_break_nothing(measure):
    result = measure(drop_idle_s=0.05)
    assert result["status"] == "valid", result["reason"]


def test_a_request_dropped_twice_has_failed(measure):
    result = measure(drop_requests=list(range(8, 40)))
    assert "requests_failed" in result["reason_codes"]


def test_a_server_that_dies_keeps_what_was_done(measure, tmp_path):
    with pytest.raises(ServerDied, match="while benching c3"):
        measure(die_after=1 + 3 + 3 + 3 + 2)  # readiness, warm-ups, the first run, into the second
    kept = tmp_path / "bench" / "runs" / "c1-r0.json"
    assert [path.name for path in kept.parent.glob("c?-r?.json")] == ["c1-r0.json"]
    before = kept.stat().st_mtime_ns
    assert measure()["status"] == "valid"
    assert kept.stat().st_mtime_ns == before, "not run again"


def test_emulated_kernels_label_the_speed(measure):
    result = measure(memory_report=[MEMORY[0] | {"emulated": ["mxfp4"]}])
    assert result["speed_label"] == "emulated" and result["emulated"] == ["mxfp4"] and result["status"] == "valid"


def test_a_client_that_fails_says_why(measure, monkeypatch):
    monkeypatch.setattr(BenchSettings, "prompts", lambda self, load: -1)
    with pytest.raises(Invalid, match="vllm bench serve failed at c1"):
        measure()
